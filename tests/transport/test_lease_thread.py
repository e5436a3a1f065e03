"""The thread that ends leases."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from aiordma._transport import lease_thread
from aiordma._transport.lease_thread import now
from aiordma.errors import RDMAError

from .connection_factory import BUSY, no_more_threads

LONG = 3600.0


def thread_ends() -> None:
    """There is none while nothing has an end."""
    limit = time.monotonic() + 10 * BUSY
    while lease_thread._thread is not None:
        assert time.monotonic() < limit
        time.sleep(0.001)
    assert not lease_thread._heap


def test_actions_come_in_order_and_on_time() -> None:
    """Nothing is due before all are there: the thread needs the lock to look."""
    came: list[tuple[int, bool]] = []
    done = threading.Event()
    with lease_thread._changed:
        start = now()
        for number in (3, 1, 2, 0):
            when = start + 0.01 * number
            lease_thread.at(when, lambda n=number, when=when: came.append((n, now() >= when)))  # type: ignore[misc]
        lease_thread.at(start + 0.04, done.set)
    assert done.wait(10 * BUSY)
    assert came == [(number, True) for number in range(4)]
    thread_ends()


def test_the_thread_ends_with_the_last_one() -> None:
    many = [lease_thread.at(now() + LONG, pytest.fail) for _ in range(1000)]
    assert lease_thread._thread is not None
    for deadline in many[:-1]:
        deadline.cancel()
        deadline.cancel()  # again: nothing
    assert len(lease_thread._heap) < 10
    assert many[-1].pending
    many[-1].cancel()
    thread_ends()
    again = threading.Event()
    lease_thread.at(now(), again.set)
    assert again.wait(10 * BUSY)
    thread_ends()


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The action is never called, and the next deadline has another thread."""
    thread_ends()  # that of another test
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        with pytest.raises(RDMAError, match=r"is not shared: .*can't start new thread"):
            lease_thread.at(now(), pytest.fail)
    done = threading.Event()
    lease_thread.at(now(), done.set)
    assert done.wait(10 * BUSY)
    thread_ends()


def test_after_cancel_it_does_not_run() -> None:
    """It waits for an action that is under way."""
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def act() -> None:
        begun.set()
        assert go.wait(10 * BUSY)
        done.set()

    deadline = lease_thread.at(now(), act)
    assert begun.wait(10 * BUSY)
    threading.Timer(0.01, go.set).start()
    deadline.cancel()
    assert done.is_set()
    thread_ends()


def test_an_action_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def fail() -> None:
        raise OSError("the device has gone")

    soon = now() + 0.01
    lease_thread.at(soon, fail)
    lease_thread.at(soon, done.set)
    with caplog.at_level(logging.ERROR, "aiordma.connection"):
        assert done.wait(10 * BUSY)
    assert "the device has gone" in caplog.text
    thread_ends()
