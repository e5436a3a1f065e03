"""Tests of enhanced connection establishment for queue pairs that an id does not own."""

from __future__ import annotations

import errno

from aiordma import cm
from aiordma.cm import ECE, ConnectionId, ConnectionParameters, EventType
from aiordma.errors import RejectedError
from tests.cm.conftest import address_of, expect, refused, resolved, with_qp

OFFER, CHOICE = ECE(0x2C9, 0x33), ECE(0x2C9, 0x11)


def test_ece_offer_and_choice_are_exchanged(
    events: cm.EventChannel, listener: ConnectionId
) -> None:
    with resolved(events, address_of(listener)) as id:
        id.set_local_ece(OFFER)
        id.connect(ConnectionParameters(qp_num=0x4321))
        with expect(events, EventType.CONNECT_REQUEST).id as passive:
            assert passive.get_remote_ece() == OFFER
            passive.set_local_ece(CHOICE)
            passive.accept(ConnectionParameters(qp_num=0x1234))
            expect(events, EventType.CONNECT_RESPONSE)
            assert id.get_remote_ece() == CHOICE


def test_ece_rejection_error_mentions_ece(events: cm.EventChannel, listener: ConnectionId) -> None:
    with resolved(events, address_of(listener)) as id:
        id.set_local_ece(OFFER)
        id.connect(ConnectionParameters(qp_num=0x4321))
        with expect(events, EventType.CONNECT_REQUEST).id as passive:
            passive.reject(b"other options", for_ece=True)
        error = expect(events, EventType.REJECTED).error()
        assert isinstance(error, RejectedError)
        assert error.reason == 35
        assert error.private_data[:13] == b"other options"
        assert "ECE" in str(error)


def test_invalid_ece_calls_are_refused(events: cm.EventChannel, listener: ConnectionId) -> None:
    with resolved(events, address_of(listener)) as id:
        refused(errno.EINVAL, lambda: id.set_local_ece(ECE(0)))
    with with_qp(events, address_of(listener)) as (id, _pd, _cq):
        refused(errno.EINVAL, id.get_remote_ece)
        refused(errno.EINVAL, lambda: id.set_local_ece(OFFER))
