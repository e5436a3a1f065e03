"""Test waiting for completions by events, busily and adaptively, and queues on one channel."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from aiordma.verbs import CompletionChannel, CompletionQueue, Context, WROpcode

if TYPE_CHECKING:
    from conftest import ConnectedPair, End, Pair


def send(one: End, two: End, wr_id: int = 1) -> None:
    two.post_recv(wr_id, 64)
    one.post(WROpcode.SEND, wr_id=wr_id)


@pytest.mark.parametrize("spin", [0.0, 0.001, math.inf], ids=["events", "adaptive", "busy"])
def test_wait_returns_completions_in_event_and_polling_modes(
    connected_pair: ConnectedPair, channel: CompletionChannel, spin: float
) -> None:
    one, two = connected_pair(channel=channel)
    for wr_id in range(50):  # long after the queue was armed for the first time
        send(one, two, wr_id)
        assert [wc.wr_id for wc in two.cq.wait(spin=spin, timeout=30)] == [wr_id]
        assert [wc.wr_id for wc in one.cq.wait(spin=spin, timeout=30)] == [wr_id]


@pytest.mark.parametrize("spin", [0.0, 0.01, math.inf], ids=["events", "adaptive", "busy"])
def test_wait_releases_the_gil(
    connected_pair: ConnectedPair, channel: CompletionChannel, spin: float
) -> None:
    """The sender in the other thread must run while this one sleeps or polls."""
    one, two = connected_pair(channel=channel)
    thread = threading.Timer(0.001, send, (one, two, 9))
    thread.start()
    assert [wc.wr_id for wc in two.cq.wait(spin=spin, timeout=30)] == [9]
    thread.join()


def test_wait_returns_at_most_max_completions(heard: Pair, channel: CompletionChannel) -> None:
    one, two = heard
    for wr_id in range(4):
        send(one, two, wr_id)
    found: list[int] = []
    while len(found) < 4:
        some = [wc.wr_id for wc in two.cq.wait(3, timeout=30)]
        assert 1 <= len(some) <= 3
        found += some
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("spin", [0.0, 0.01, math.inf])
def test_wait_returns_empty_list_after_timeout(
    context: Context, channel: CompletionChannel, spin: float
) -> None:
    with context.create_cq(16, channel) as cq:
        began = time.monotonic()
        assert cq.wait(timeout=0.05, spin=spin) == []
        assert time.monotonic() - began >= 0.05
        assert cq.wait(timeout=0, spin=spin) == []


def test_wait_without_a_channel_requires_infinite_spin(context: Context) -> None:
    with context.create_cq(16) as cq:
        with pytest.raises(ValueError, match="no completion channel to wait on"):
            cq.wait(timeout=1)
        with pytest.raises(ValueError, match="no completion channel to wait on"):
            cq.wait(timeout=1, spin=0.5)
        assert cq.wait(timeout=0.01, spin=math.inf) == []


def test_wait_preserves_events_of_other_queues(
    connected_pair: ConnectedPair, channel: CompletionChannel
) -> None:
    one, two = connected_pair(channel=channel)
    three, four = connected_pair(channel=channel)
    for end in (two, four):
        assert end.cq.wait(timeout=0) == []
        end.cq.req_notify()
    send(three, four)
    send(one, two)
    assert len(two.cq.wait(timeout=30)) == 1  # may read the other queue's event first
    assert len(four.cq.wait(timeout=30)) == 1
    send(three, four)
    assert len(four.cq.wait(timeout=30)) == 1


def test_threads_sharing_a_channel_receive_their_own_completions(
    connected_pair: ConnectedPair, channel: CompletionChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second thread must not take the event for which the first one is about to sleep."""
    one, two = connected_pair(channel=channel)
    three, four = connected_pair(channel=channel)
    found: list[int] = []
    second = threading.Thread(
        target=lambda: found.extend(wc.wr_id for wc in four.cq.wait(timeout=60))
    )
    waits = threading.Event()
    taken: list[threading.Thread] = []
    take, rest = channel.get_event, channel._event_taken.wait

    def take_late() -> CompletionQueue | None:
        queue = take()
        taken.append(threading.current_thread())
        if taken[-1] is second:
            waits.set()
        elif not second.ident:
            assert queue is None
            send(one, two, 1)
            second.start()
            assert waits.wait(30)
        return queue

    def rest_until_taken(timeout: float) -> bool:
        waits.set()
        return rest(timeout)

    monkeypatch.setattr(channel, "get_event", take_late)
    monkeypatch.setattr(channel._event_taken, "wait", rest_until_taken)
    assert [wc.wr_id for wc in two.cq.wait(timeout=60)] == [1]
    assert second not in taken[:2]
    send(three, four, 2)
    second.join(60)
    assert found == [2]


class Alarm(Exception):
    """Raised by the signal handler."""


@contextmanager
def alarm_soon() -> Iterator[None]:
    """Raise Alarm after 50 ms. On a busy machine, it may be raised before the block starts."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("spin", [0.0, math.inf], ids=["events", "busy"])
def test_wait_is_interrupted_by_signals(
    context: Context, channel: CompletionChannel, spin: float
) -> None:
    with context.create_cq(16, channel) as cq, pytest.raises(Alarm), alarm_soon():
        cq.wait(spin=spin)
