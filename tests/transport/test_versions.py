"""Test peers of another release whose handshake has another version. Both sides must be told."""

from __future__ import annotations

import asyncio
import logging

import pytest

from aiordma import cm, verbs
from aiordma._core.handshake_layout import ENDPOINT_SIZE
from aiordma._core.refusal import REFUSAL_SIZE, unpack_refusal
from aiordma._transport.connect_tcp import MAGIC
from aiordma._transport.tcp_link import REFUSED

from .connection_factory import ConnectionFactory, hello
from .marks import by_cm, by_tcp, one_loop
from .raw_peer import raw_request

pytestmark = [one_loop, pytest.mark.any_device]

OLDER = {
    "version 1": (
        4,
        "hello: the peer uses version 1, but this side uses version 2; run the same release of "
        "aiordma on both sides",
    ),
    "a key proved late": (
        5,
        "hello: this side does not support all features that the peer requires (flags 0x01); "
        "run the same release of aiordma on both sides",
    ),
}
"""Byte of a hello that is 1 in an older release, and what its user is told."""

older = pytest.mark.parametrize(("offset", "message"), OLDER.values(), ids=OLDER)


def old_hello(offset: int) -> bytes:
    data = bytearray(hello().pack())
    data[offset] = 1
    return bytes(data)


@by_tcp
@older
async def test_version_mismatch_is_reported_to_both_sides_over_tcp(
    factory: ConnectionFactory, offset: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with verbs.open_device(factory.device) as context, context.alloc_pd() as pd:
        cq = context.create_cq(1)
        qp = pd.create_qp(cq, cq, verbs.QPCapabilities(1, 1))
        endpoint = qp.endpoint(context.find_gid(factory.host)).pack()
        qp.close()
        cq.close()
    assert len(endpoint) == ENDPOINT_SIZE
    async with factory.witness(), await factory.listen() as listener:
        reader, writer = await asyncio.open_connection(factory.host, listener.port)
        writer.write(MAGIC + endpoint + old_hello(offset))
        answer = await reader.readexactly(len(REFUSED) + REFUSAL_SIZE)
        assert not await reader.read()
        writer.close()
        assert answer.startswith(REFUSED)
        assert unpack_refusal(answer[len(REFUSED) :]) == message
        assert message in caplog.text


@by_cm
@older
async def test_version_mismatch_is_reported_to_both_sides_over_cm(
    factory: ConnectionFactory, offset: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        factory.witness(),
        await factory.listen() as listener,
        raw_request(factory, listener.port, old_hello(offset)) as (_, event),
    ):
        assert event.type is cm.EventType.REJECTED
        assert unpack_refusal(event.private_data) == message
        assert message in caplog.text
