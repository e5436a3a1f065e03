"""Test the socket of the bootstrap in isolation."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

import pytest

from aiordma._transport.auth import NO_SECURITY
from aiordma._transport.connect_tcp import accepted_link, connected_socket
from aiordma._transport.tcp_link import MAX_READ_AHEAD
from aiordma.errors import HandshakeBrokenError


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(there: Callable[[], bool]) -> None:
    while not there():  # noqa: ASYNC110 - the link has no event
        await asyncio.sleep(0)


def fill(sending: socket.socket) -> None:
    """Write until the socket accepts no more data."""
    with suppress(BlockingIOError):
        while True:
            sending.send(bytes(1 << 16))


async def test_tcp_link_stops_reading_at_the_read_ahead_limit() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        link = await accepted_link(ours, NO_SECURITY)
        fill(theirs)
        await until(lambda: len(link._received) > MAX_READ_AHEAD)
        received = len(link._received)
        fill(theirs)
        await turns()
        assert len(link._received) == received
        link.release()


@pytest.mark.parametrize("early", [b"", b"?"], ids=["its end", "more"])
async def test_established_reports_an_earlier_loss_of_the_link(early: bytes) -> None:
    """The peer may send more data, or die, between the bootstrap and `established`."""
    ours, theirs = socket.socketpair()
    link = await accepted_link(ours, NO_SECURITY)
    with theirs:
        theirs.sendall(b"last" + early)
    assert await link.read(4, b"last") == b""
    await until(lambda: link._is_lost)
    reasons: list[str] = []
    link.established(reasons.append)
    await turns()
    (reason,) = reasons
    assert ("sent data after the bootstrap" if early else "without a goodbye") in reason
    link.release()


async def test_connected_socket_waits_while_the_backlog_is_full() -> None:
    """A listener answers late when its backlog is full, so connecting has to wait."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        address = ("127.0.0.1", listening.getsockname()[1])
        first = await connected_socket(address, None)
        others = [asyncio.create_task(connected_socket(address, None)) for _ in range(3)]
        await turns()
        assert not all(task.done() for task in others)
        listening.setblocking(False)
        while not all(task.done() for task in others):
            with suppress(BlockingIOError):
                listening.accept()[0].close()
            await asyncio.sleep(0)
        for connected in (first, *(task.result() for task in others)):
            assert connected.getpeername() == address
            connected.close()


async def test_write_after_peer_closed_raises_handshake_broken_error() -> None:
    ours, theirs = socket.socketpair()
    link = await accepted_link(ours, NO_SECURITY)
    theirs.close()
    await until(lambda: link._is_lost)
    with pytest.raises(HandshakeBrokenError):
        link.write(b"you were refused")
    link.release()
