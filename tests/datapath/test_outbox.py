"""Tests of the reasons for which a message waits in the outbox, and of its release."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from aiordma._core import protocol
from aiordma._core.frames import FrameKind
from aiordma.errors import ConnectionClosedError, QuotaError
from aiordma.mr_pool import Block

from .bare_channel import BareChannel, Room, Wire, frame, wire

__all__ = ["wire"]


def waiting(bare: BareChannel) -> tuple[int, int]:
    """Return the number of waiting messages and the number of message frames in flight."""
    figures = bare.channel.figures()
    return figures["messages_waiting"], figures["frames_in_flight"]


def test_queued_messages_are_bundled_in_the_next_loop_iteration(wire: Wire) -> None:
    """They leave even if no request has completed since."""
    bare = BareChannel(wire)
    bare.send(b"at once")
    for round in range(1, 4):
        bare.send(b"one")
        bare.send(b"and another")
        assert waiting(bare) == (2, round)
        wire.turn()
        assert waiting(bare) == (0, round + 1)
    assert [kind for kind, _, _ in wire.peer_got(4)] == [FrameKind.DATA] + [FrameKind.BUNDLE] * 3
    bare.close()


def test_outbox_sends_nothing_after_the_channel_closes(wire: Wire) -> None:
    bare = BareChannel(wire)
    sending = [bare.send(b"") for _ in range(2)]
    bare.close()
    wire.turn()
    bare.channel.controls.send(protocol.Pong(0))
    assert not bare.channel.controls.can_send_now
    assert sending[1].exception() is not None
    assert len(wire.peer_has()) == 1


def test_closing_outbox_sends_queued_messages_but_rejects_new_ones(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = BareChannel(wire)

    def check() -> None:
        raise ConnectionClosedError

    async def run() -> None:
        for _ in range(2):
            bare.send(b"")
        bare.channel.outbox.closing = True
        with pytest.raises(ConnectionClosedError):
            bare.send(b"")

    monkeypatch.setattr(bare.owner, "check", check)
    wire.loop.run_until_complete(run())
    wire.turn()
    assert len(wire.peer_got(2)) == 2
    bare.close()


def test_message_sent_during_another_send_waits_for_credit(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finalizer that runs during the allocation of a block may send a message."""
    bare = BareChannel(wire, peer=Room(data_receives=1))
    make = wire.pool._block_if_first
    blocks: list[Any] = [*iter(partial(wire.pool.take, 1), None)]

    def block(size: int) -> Block | None:
        monkeypatch.undo()
        bare.send(b"second")
        return make(size)

    monkeypatch.setattr(wire.pool, "_block_if_first", block)
    bare.send(b"first")
    assert waiting(bare) == (1, 1)
    assert wire.peer_got(1) == [(FrameKind.DATA, None, b"first")]
    wire.peer_sends(frame(FrameKind.CREDIT, data=1))
    assert wire.peer_got(1) == [(FrameKind.DATA, None, b"second")]
    for block_ in blocks:
        block_.release()
    bare.close()


def test_channel_is_drained_when_no_message_is_pending(wire: Wire) -> None:
    bare = BareChannel(wire, peer=Room(data_receives=1))
    first, second = bare.send(b""), bare.send(b"")
    drained = bare.channel.drained()
    wire.until(first.done)
    assert not drained.done()
    second.cancel()
    assert drained.done()
    wire.peer_sends(frame(FrameKind.CREDIT, data=1))
    third = bare.send(b"")
    drained = bare.channel.drained()
    assert not drained.done()
    wire.until(third.done)
    assert drained.done()
    bare.close()


def test_released_block_goes_to_the_first_waiter(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A received frame makes the channel retry its messages before the waiter has its block."""
    bare = BareChannel(wire)
    ping = frame(FrameKind.CONTROL, protocol.encode(protocol.Ping(1)))
    held = list[Block]()

    async def run() -> None:
        monkeypatch.setattr(wire.pool, "limit", wire.pool.statistics().registered_bytes)
        with suppress(QuotaError):
            while True:
                held.append(wire.pool._block(1))
        other = wire.pool._waiters.join(1, internal=True)
        bare.send(b"message")
        held.pop().release()
        wire.peer_sends(ping)
        assert waiting(bare) == (1, 0)
        held.append(await other)
        assert waiting(bare) == (1, 0)
        held.pop().release()
        await asyncio.sleep(0)  # the waiter gets the block
        await asyncio.sleep(0)  # the waiter runs
        assert waiting(bare) == (0, 1)

    wire.loop.run_until_complete(run())
    for block in held:
        block.release()
    assert len(wire.peer_got(1)) == 1
    bare.close()
