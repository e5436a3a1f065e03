"""Test that a completion queue cannot overrun, because every queue that can fill it reserves
entries.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma.errors import BusyError, UnsupportedError
from aiordma.verbs import QPCapabilities, SendFlags, WROpcode
from tests.verbs.draining import drain

if TYPE_CHECKING:
    from aiordma._native import handles as h
    from conftest import ConnectedPair


def test_queue_pair_reserves_completion_entries_until_closed(
    context: verbs.Context, pd: verbs.ProtectionDomain
) -> None:
    with context.create_cq(200) as sends, context.create_cq(200) as receives:
        qp = pd.create_qp(sends, receives, QPCapabilities(max_send_wr=20, max_recv_wr=30))
        assert sends.reserved == qp.capabilities.max_send_wr >= 20
        assert receives.reserved == qp.capabilities.max_recv_wr >= 30
        qp.close()
        assert sends.reserved == qp.capabilities.max_send_wr  # completions may lie there
        assert sends.in_use == 0
        assert sends.poll() == receives.poll() == []
        assert sends.reserved == receives.reserved == 0


def test_completion_queue_grows_as_queue_pairs_are_created(
    context: verbs.Context, pd: verbs.ProtectionDomain
) -> None:
    with context.create_cq(16) as cq:
        wanted = QPCapabilities(max_send_wr=50, max_recv_wr=50)
        made = [pd.create_qp(cq, capabilities=wanted) for _ in range(4)]
        assert sum(qp.capabilities.max_send_wr for qp in made) == cq.reserved // 2
        assert cq.cqe >= cq.reserved >= 400
        assert cq.pointer.cqe == cq.cqe


def test_create_qp_raises_busy_error_when_the_cq_cannot_grow(
    context: verbs.Context, pd: verbs.ProtectionDomain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(pointer: h.ibv_cq, cqe: int) -> None:
        raise UnsupportedError("ibv_resize_cq")

    monkeypatch.setattr(context.library.calls, "ibv_resize_cq", cannot)
    before = verbs.live()
    with context.create_cq(1) as small, context.create_cq(100) as large:
        wanted = QPCapabilities(max_send_wr=60, max_recv_wr=small.cqe + 1)
        with pytest.raises(BusyError, match="cannot be resized") as caught:
            pd.create_qp(large, small, wanted)
        assert isinstance(caught.value.__cause__, UnsupportedError)
        assert "resizing completion queues" in str(caught.value.__cause__)
        assert small.reserved == large.reserved == 0
        assert verbs.live() == {**before, "CompletionQueue": 2}
        qp = pd.create_qp(large, small, wanted, reserved=True)
        assert small.reserved == large.reserved == 0
        qp.close()


def test_dropped_queue_pair_reserves_cq_entries_until_pd_closes(
    context: verbs.Context, pd: verbs.ProtectionDomain
) -> None:
    """The device still has the queue pair until closing the protection domain destroys it."""
    with context.create_cq(100) as cq:
        other = context.alloc_pd()
        with pytest.warns(ResourceWarning):
            other.create_qp(cq, capabilities=QPCapabilities(max_send_wr=10, max_recv_wr=10))
        assert cq.reserved >= 20
        other.close()
        assert cq.poll() == []
        assert cq.reserved == 0


def test_cq_entries_are_released_after_the_last_completion(
    context: verbs.Context, connected_pair: ConnectedPair
) -> None:
    one, two = connected_pair(QPCapabilities(max_send_wr=4, max_recv_wr=4))
    for wr_id in range(4):
        two.qp.post_recv_one(wr_id, 0, 0, 0)
        one.qp.post_send_one(wr_id, WROpcode.SEND, SendFlags.SIGNALED, 0, 0, 0)
    two.completions(4)
    one.qp.close()
    held = one.cq.reserved
    assert held >= 8
    found = 0
    while one.cq.reserved:  # a poll that is full says nothing about what is behind it
        assert one.cq.reserved == held
        found += len(one.cq.poll(1))
        os.sched_yield()
    assert found <= 4  # a device may take completions of a destroyed queue pair back
    assert one.cq.available == one.cq.cqe


def test_draining_a_channel_releases_cq_entries_of_closed_queue_pairs(
    context: verbs.Context, connected_pair: ConnectedPair, channel: verbs.CompletionChannel
) -> None:
    one, two = connected_pair(channel=channel)
    for end in (one, two):
        end.cq.req_notify()
        end.qp.close()
        assert end.cq.reserved
        assert not end.cq.in_use
    records, more = drain(channel)
    assert not more
    assert records == []
    assert one.cq.reserved == two.cq.reserved == 0


def test_undrained_channel_does_not_accumulate_closed_queue_pairs(
    context: verbs.Context, pd: verbs.ProtectionDomain, channel: verbs.CompletionChannel
) -> None:
    with context.create_cq(64, channel) as cq:
        for _ in range(3):
            pd.create_qp(cq).close()
            assert cq.poll() == []
            assert cq.reserved == 0
            assert len(channel.entries_to_release) == 1
        pd.create_qp(cq).close()
        drain(channel)
        assert cq.reserved == 0
