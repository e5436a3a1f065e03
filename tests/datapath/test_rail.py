"""Tests of which failures break one rail, and which break the connection."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiordma import verbs
from aiordma._core.operations import OperationKind
from aiordma._datapath.rail import SendQueue
from aiordma._datapath.work_queue import WorkRequest
from aiordma._event_loop.completion_reader import CompletionReader
from aiordma._event_loop.driver import Driver
from aiordma._transport.keep_alive import KeepAlive

from .bare_channel import CAPABILITIES, BareChannel, Room, Wire

RAIL, CONNECTION = "rail", "connection"


class RecordingSendQueue(SendQueue):
    """Records the order in which its failure callbacks are called."""

    def __init__(self, *arguments: Any) -> None:
        self.calls: list[str] = []
        super().__init__(*arguments)

    def rail_broke(self, error: BaseException) -> None:
        self.calls.append(RAIL)
        super().rail_broke(error)

    def connection_broke(self, error: BaseException) -> None:
        self.calls.append(CONNECTION)
        super().connection_broke(error)


class Write(WorkRequest):
    """A write with an invalid rkey, which fails unless the length is 0."""

    def __init__(self, wire: Wire, length: int, opcode: int = verbs.WROpcode.RDMA_WRITE) -> None:
        mr = wire.mr
        super().__init__(
            OperationKind.WRITE, opcode, mr.addr, length, mr.lkey, mr.addr, ~mr.rkey & 0xFFFFFFFF
        )

    def failed(self, error: BaseException) -> None:
        """Do nothing. The tests check the queue instead."""

    def release(self) -> None:
        """Do nothing, because the memory stays registered."""


@pytest.fixture
def wire(context: verbs.Context) -> Iterator[Wire]:
    wire = Wire(context, RecordingSendQueue)
    yield wire
    wire.close()


def refused_post(wire: Wire) -> None:
    wire.queue.post(Write(wire, 0, opcode=99))


def refused_receives(wire: Wire) -> None:
    BareChannel(wire, Room(data_receives=CAPABILITIES.max_recv_wr)).close()


def flush(wire: Wire) -> None:
    wire.qp.to_error()
    wire.queue.post(Write(wire, 0))
    wire.until(lambda: wire.queue.failed)


def refused_request(wire: Wire) -> None:
    wire.queue.post(Write(wire, 8))
    wire.until(lambda: wire.queue.failed)


def event(kind: verbs.EventType) -> Callable[[Wire], None]:
    return lambda wire: wire.queue.device_event(verbs.AsyncEvent(kind))


def silence(wire: Wire) -> None:
    timers = cast("Any", SimpleNamespace(call_later=lambda *_: None))
    KeepAlive(wire.queue, timers, 1, 1)._give_up()


def stalled_reads(wire: Wire) -> None:
    bare = BareChannel(wire)
    bare.channel.inbox.fetcher.stalled(1)
    bare.close()


def completion_channel(wire: Wire) -> None:
    reader = CompletionReader(wire.events, wire.table, {wire.qp: wire.queue}, 0)
    reader._handle(-errno.EIO, polls_again=False)


def bug(wire: Wire) -> None:
    loop = SimpleNamespace(call_exception_handler=lambda _: None)
    Driver.report(cast("Any", SimpleNamespace(loop=loop)), wire.queue, ZeroDivisionError())


FAILURES: dict[str, tuple[Callable[[Wire], None], str]] = {
    "refused post": (refused_post, RAIL),
    "refused receives": (refused_receives, RAIL),
    "flush": (flush, RAIL),
    "silence": (silence, RAIL),
    "completion channel": (completion_channel, RAIL),
    **{
        kind.name: (event(kind), RAIL)
        for kind in (
            verbs.EventType.QP_FATAL,
            verbs.EventType.CQ_ERR,
            verbs.EventType.SRQ_ERR,
            verbs.EventType.DEVICE_FATAL,
        )
    },
    "refused request": (refused_request, CONNECTION),
    "QP_REQ_ERR": (event(verbs.EventType.QP_REQ_ERR), CONNECTION),
    "QP_ACCESS_ERR": (event(verbs.EventType.QP_ACCESS_ERR), CONNECTION),
    "stalled reads": (stalled_reads, CONNECTION),
    "bug": (bug, CONNECTION),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_owner_is_notified_once_of_a_rail_or_connection_failure(wire: Wire, failure: str) -> None:
    """The owner is notified once. Later failures are ignored."""
    fail, what = FAILURES[failure]
    fail(wire)
    assert isinstance(wire.queue, RecordingSendQueue)
    assert wire.queue.calls[0] == what
    assert wire.queue.failed
    error = wire.queue.error
    wire.queue.connection_broke(ZeroDivisionError("too late"))
    wire.queue.rail_broke(ZeroDivisionError("too late"))
    assert wire.owner.failures == [error]


def test_rail_failure_is_not_reported_after_the_queue_has_failed(wire: Wire) -> None:
    error = ZeroDivisionError("it has ended")
    wire.queue.fail(error)
    wire.queue.rail_broke(ZeroDivisionError("too late"))
    assert wire.queue.error is error
    assert not wire.owner.failures
