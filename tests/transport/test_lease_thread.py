"""Test the thread that ends leases."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from aiordma._datapath.memory import MACHINE
from aiordma._transport import lease_thread
from aiordma._transport.lease_thread import Deadline, lease_seconds

from .connection_factory import BUSY

LONG = 3600.0
now = MACHINE.now


def thread_ends() -> None:
    """Wait until the lease thread has ended. It ends when no deadline is pending."""
    limit = time.monotonic() + 10 * BUSY
    while (thread := lease_thread._thread) is not None and thread.is_alive():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_deadline_actions_run_in_order_and_never_early() -> None:
    """The first action blocks the thread until all deadlines have been added."""
    came: list[tuple[int, bool]] = []
    go, done = threading.Event(), threading.Event()
    lease_thread.schedule(MACHINE, now(), go.wait)
    start = now()
    for number in (3, 1, 2, 0):
        when = start + 0.01 * number
        lease_thread.schedule(
            MACHINE,
            when,
            lambda n=number, when=when: came.append((n, now() >= when)),  # type: ignore[misc]
        )
    lease_thread.schedule(MACHINE, start + 0.04, done.set)
    go.set()
    assert done.wait(10 * BUSY)
    assert came == [(number, True) for number in range(4)]
    thread_ends()


def test_lease_thread_exits_after_the_last_deadline() -> None:
    many = [lease_thread.schedule(MACHINE, now() + LONG, pytest.fail) for _ in range(1000)]
    thread = lease_thread._thread
    assert thread is not None
    for deadline in many[:-1]:
        deadline.cancel()
        deadline.cancel()  # a second cancel does nothing
    limit = now() + 10 * BUSY
    while len(thread._heap) > 10:  # until the thread drops them
        assert now() < limit
        time.sleep(0.001)
    assert many[-1].pending
    many[-1].cancel()
    thread_ends()
    again = threading.Event()
    lease_thread.schedule(MACHINE, now(), again.set)
    assert again.wait(10 * BUSY)
    thread_ends()


def test_cancel_waits_for_a_running_action() -> None:
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def act() -> None:
        begun.set()
        assert go.wait(10 * BUSY)
        done.set()

    deadline = lease_thread.schedule(MACHINE, now(), act)
    assert begun.wait(10 * BUSY)
    threading.Timer(0.01, go.set).start()
    deadline.cancel()
    assert done.is_set()
    thread_ends()


def test_action_can_cancel_its_own_deadline() -> None:
    """Cancelling must not deadlock by waiting for the action that cancels."""
    go, done = threading.Event(), threading.Event()
    deadlines: list[Deadline] = []

    def act() -> None:
        assert go.wait(10 * BUSY)
        deadlines[0].cancel()
        done.set()

    deadlines.append(lease_thread.schedule(MACHINE, now(), act))
    go.set()
    assert done.wait(10 * BUSY)
    deadlines[0].cancel()
    thread_ends()


def test_all_deadlines_fire_when_threads_schedule_concurrently() -> None:
    """Other deadlines are cancelled at the same time."""
    barrier = threading.Barrier(8)
    met: SimpleQueue[int] = SimpleQueue()

    def begin(number: int) -> None:
        barrier.wait()
        for n in range(50):
            lease_thread.schedule(MACHINE, now() + LONG, pytest.fail).cancel()
            lease_thread.schedule(MACHINE, now() + 0.0001 * n, partial(met.put, 50 * number + n))

    with ThreadPoolExecutor(8) as threads:
        for one in [threads.submit(begin, number) for number in range(8)]:
            one.result()
    assert {met.get(timeout=10 * BUSY) for _ in range(400)} == set(range(400))
    thread_ends()


def test_cancelled_new_deadline_is_not_added_to_the_heap() -> None:
    """A search for cancelled deadlines may reset their count before the thread has taken this one.

    It must not enter the heap afterwards.
    """
    thread = lease_thread._LeaseThread()
    deadline = lease_thread.Deadline(now() + LONG, pytest.fail)
    thread.add(deadline)
    deadline.cancel()
    thread._remove_cancelled()
    thread._add_new()
    assert not thread._heap


def test_wait_returns_when_its_deadline_has_already_passed() -> None:
    """The system may preempt the thread between computing the timeout and waiting.

    A busy process on the same processor provokes that.
    """
    waits = lease_thread._LeaseThread()
    waits._heap.append((LONG, 0, Deadline(LONG, pytest.fail)))
    processor = {min(os.sched_getaffinity(0))}

    def wait() -> None:
        os.sched_setaffinity(0, processor)
        end = now() + 3
        while now() < end:
            waits._wake()
            waits._wait(now() + LONG)  # a pending wake-up ends this wait immediately
            waits._wait(now() + 2e-6)

    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as computes:
        os.sched_setaffinity(computes.pid, processor)
        assert computes.stdout is not None
        computes.stdout.readline()
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(10 * BUSY)
        computes.kill()
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [OSError, SystemExit, asyncio.CancelledError])
def test_failing_action_is_logged_and_the_thread_continues(
    caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    done = threading.Event()

    def fail() -> None:
        raise error("the device has gone")

    soon = now() + 0.01
    lease_thread.schedule(MACHINE, soon, fail)
    lease_thread.schedule(MACHINE, soon, done.set)
    with caplog.at_level(logging.ERROR, "aiordma.connection"):
        assert done.wait(10 * BUSY)
    assert "the device has gone" in caplog.text
    thread_ends()


@pytest.mark.parametrize(
    "lease",
    [5, 5.0, Fraction(5), Decimal(5), np.float32(5), np.float64(5), np.int64(5), np.uint8(5)],
)
def test_lease_seconds_converts_any_real_number_to_float(lease: Any) -> None:
    seconds = lease_seconds(lease)
    assert type(seconds) is float
    assert seconds == 5


@pytest.mark.parametrize("lease", [True, "60", 5j, [5], b"5", np.bool_(True)])
def test_lease_seconds_rejects_non_numbers(lease: Any) -> None:
    with pytest.raises(TypeError, match="a lease must be a number of seconds"):
        lease_seconds(lease)


@pytest.mark.parametrize(
    "lease", [0, -1, math.nan, math.inf, 10**400, np.float32("nan"), Fraction(-1, 2), 4294968]
)
def test_lease_seconds_rejects_values_out_of_range(lease: Any) -> None:
    with pytest.raises(
        ValueError, match=r"a lease (must be positive and at most 4294967|is out of range)"
    ):
        lease_seconds(lease)
