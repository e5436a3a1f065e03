"""Tests of the event-loop driver: every completion reaches its sink in all circumstances."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import select
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from aiordma import Config, LoopConfig, cm, connect, listen, verbs
from aiordma._core.operations import OperationKind
from aiordma._datapath.memory import Clock
from aiordma._datapath.rail import SendQueue
from aiordma._datapath.work_queue import WorkRequest, WorkRequestTable
from aiordma._event_loop import driver, per_loop_resource
from aiordma._event_loop.completion_reader import CompletionReader
from aiordma._event_loop.driver import (
    CQ_ENTRIES,
    MAX_EVENTS,
    ContextEvents,
    Driver,
    EventDriver,
    RequestDriver,
)
from aiordma._event_loop.time_share import BURST, MAX_WAIT, SHARE
from aiordma.errors import InternalError, VerbsError
from tests.combinations import LOOPS
from tests.datapath.bare_channel import Owner
from tests.processes import run_python

ROOT = Path(__file__).parents[1]
LIMIT = 64 << 20
CONFIG = Config(pool_limit=LIMIT)
WRITE = int(verbs.WROpcode.RDMA_WRITE)
SIGNALED = int(verbs.SendFlags.SIGNALED)
REMOTE_WRITE = verbs.AccessFlags.REMOTE_WRITE


class Sink(SendQueue):
    """Records completions and failures. Raises when the number of completions is in `fail_at`."""

    def __init__(self, driver: Driver, qp: verbs.QueuePair) -> None:
        self.fail_at: set[int] = set()
        self.completed: list[int] = []
        self.events: list[verbs.AsyncEvent] = []
        self.failures: list[BaseException] = []
        self.waiters: list[tuple[int, asyncio.Future[None]]] = []
        super().__init__(driver, qp, Owner())

    def complete(self, number: int) -> None:
        self.completed.append(number)
        for count, future in self.waiters:
            if len(self.completed) >= count and not future.done():
                future.set_result(None)
        if len(self.completed) in self.fail_at:
            raise ZeroDivisionError

    def device_event(self, event: verbs.AsyncEvent) -> None:
        self.events.append(event)

    def rail_broke(self, error: BaseException) -> None:
        """Record the failure and continue."""
        self.failures.append(error)

    connection_broke = rail_broke

    async def wait(self, count: int) -> None:
        """Wait until `count` completions have been recorded."""
        if len(self.completed) < count:
            future = asyncio.get_running_loop().create_future()
            self.waiters.append((count, future))
            async with asyncio.timeout(60):
                await future


class Sent(WorkRequest):
    """A zero-length write."""

    def __init__(self, sink: Sink, number: int) -> None:
        super().__init__(OperationKind.WRITE, WRITE, 0, 0, 0)
        self.sink = sink
        self.number = number

    def done(self, byte_len: int) -> None:
        self.sink.complete(self.number)

    def failed(self, error: BaseException) -> None:
        raise AssertionError(f"{self.number} failed: {error}")

    def release(self) -> None:
        """Do nothing, because the write has no memory."""


class End:
    """A queue pair with its own sink."""

    def __init__(self, driver: Driver, cq: verbs.CompletionQueue) -> None:
        self.qp = driver.pd.create_qp(cq, cq, verbs.QPCapabilities(32, 32), reserved=True)
        self.sink = Sink(driver, self.qp)

    def send(self, number: int = 0) -> None:
        self.sink.post_checked(Sent(self.sink, number))

    def close(self) -> None:
        self.sink.close()


@asynccontextmanager
async def two_ends(driver: Driver) -> AsyncIterator[tuple[End, End]]:
    """Provide two connected queue pairs that share a reserved completion queue."""
    cq = driver.reserve_cq(128)
    ends = End(driver, cq), End(driver, cq)
    first, second = (end.qp.endpoint() for end in ends)
    ends[0].qp.connect(first, second, access=REMOTE_WRITE)
    ends[1].qp.connect(second, first, access=REMOTE_WRITE)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()
        driver.release_cq(cq, 128)


def for_device(device: verbs.Device, config: Config = CONFIG) -> Driver:
    return Driver.for_device(device, config, "a test")


@asynccontextmanager
async def the_driver(device: verbs.Device, polling: float | None = None) -> AsyncIterator[Driver]:
    made = for_device(device, replace(CONFIG, polling=polling))
    try:
        yield made
    finally:
        made.release()


both_ways = pytest.mark.parametrize(
    "polling", [LoopConfig().polling, 0], ids=["polling", "sleeping"]
)


# ---- completions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["reader", "look"])
async def test_completion_arriving_between_poll_and_sleep_is_delivered(
    device: verbs.Device, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """Each completion arrives between the last poll and the loop's wait.

    No other event wakes the loop afterwards.
    """
    async with the_driver(device) as driver, two_ends(driver) as (first, _):
        reader, poller = driver._reader, driver._reader._poller
        drain, spin = reader._drain, poller.spin
        assert spin is not None
        left = 20

        def complete() -> None:
            nonlocal left
            if left:
                left -= 1
                first.send()
                # The device signals the completion before control returns to the loop.
                readable, _, _ = select.select([driver.channel.fd], [], [], 60)
                assert readable

        def drain_and_complete(
            table: WorkRequestTable, capacity: int, returns: bool
        ) -> tuple[bool, bool]:
            some, more = drain(table, capacity, returns)
            if not more:
                complete()
            return some, more

        def look_and_complete() -> None:
            spin()
            complete()

        monkeypatch.setattr(reader, "_drain", drain_and_complete)
        if whose == "reader":
            reader._polling._wakeups_to_skip = 1 << 20  # no looks
        else:
            poller.spin = look_and_complete
        first.send()
        await first.sink.wait(21)


async def test_done_callbacks_receive_the_completed_future(device_name: str, host: str) -> None:
    """A callback may be a task's wake-up, or any other callable, including a built-in one."""
    async with (
        await listen(host, device=device_name) as listener,
        await connect(host, listener.port, device=device_name) as there,
        await listener.accept() as here,
    ):
        for _ in range(3):
            seen: list[object] = []
            sending = there.send_nowait(b"a message")
            sending.add_done_callback(seen.append)
            await asyncio.gather(sending, here.recv())
            await sending
            assert seen == [sending]


@both_ways
@pytest.mark.parametrize(("batch", "rounds"), [(1, 1), (1, 4), (3, 2), (128, 4)])
async def test_completion_flood_does_not_starve_other_tasks(
    device: verbs.Device, monkeypatch: pytest.MonkeyPatch, batch: int, rounds: int, polling: float
) -> None:
    monkeypatch.setattr("aiordma._event_loop.completion_reader.COMPLETIONS_PER_CALL", batch)
    monkeypatch.setattr("aiordma._event_loop.completion_reader.MAX_DRAINS", rounds)

    async with the_driver(device, polling) as driver, two_ends(driver) as (first, second):
        driver._reader._polling._wakeups_to_skip = (
            1 << 20
        )  # no looks, which would also find the completions
        seen_by_others: set[int] = set()
        over = False

        async def other() -> None:
            while not over:
                seen_by_others.add(len(first.sink.completed) + len(second.sink.completed))
                await asyncio.sleep(0)

        watching = asyncio.create_task(other())
        for _ in range(30):
            first.send()
            second.send()
        # The loop has not run since the first send, so completions have piled up.
        await asyncio.gather(first.sink.wait(30), second.sink.wait(30))
        over = True
        await watching
        # Between two steps of the other task, the reader may run at most twice: once because the
        # channel is readable, and once to continue an earlier run.
        steps = [b - a for a, b in pairwise(sorted(seen_by_others))]
        assert max(steps, default=0) <= 2 * batch * rounds


async def test_failing_sink_does_not_affect_other_sinks(
    device: verbs.Device, reported: list[dict[str, Any]]
) -> None:
    """Only the failing sink is failed, even if one batch has completions for several sinks."""
    async with (
        the_driver(device) as driver,
        two_ends(driver) as (bad, its_peer),
        two_ends(driver) as (good, its_friend),
    ):
        bad.sink.fail_at = {1, 3}
        for _ in range(5):
            bad.send()
            good.send()
            its_peer.send()
            its_friend.send()
        await asyncio.gather(*(end.sink.wait(5) for end in (bad, its_peer, good, its_friend)))
        assert len(reported) == 2
        assert all(isinstance(context["exception"], ZeroDivisionError) for context in reported)
        assert len(bad.sink.failures) == 2
        for error in bad.sink.failures:
            assert isinstance(error, InternalError)
            assert isinstance(error.__cause__, ZeroDivisionError)
        assert not good.sink.failures
        assert not its_friend.sink.failures


async def test_completions_of_a_closed_queue_pair_are_counted_as_stray(
    device: verbs.Device,
) -> None:
    """Their slots are free or reused, so these completions must not complete anything."""
    async with the_driver(device) as driver, two_ends(driver) as (first, second):
        first.send()
        await first.sink.wait(1)
        # This wr_id belonged to the write above: slot 0, generation 1.
        used_up = 1 << 32 | OperationKind.WRITE << 24
        others = (0, used_up, used_up | 1 << 31, used_up | 1, 5 << 32, (1 << 64) - 1)
        first.send()
        assert driver.table.stray_completions == 0
        for wr_id in others:
            second.qp.post_send_one(wr_id, WRITE, SIGNALED, 0, 0, 0, 0, 0)
        second.send()  # completes after the stray requests
        await asyncio.gather(first.sink.wait(2), second.sink.wait(1))
        assert driver.table.stray_completions == len(others)
        assert len(driver.table) == 0


async def test_channel_failure_reaches_every_sink(
    device: verbs.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with the_driver(device) as driver, two_ends(driver) as (first, second):

        def broken(table: WorkRequestTable, capacity: int, returns: bool) -> tuple[bool, bool]:
            raise OSError("the channel is gone")

        monkeypatch.setattr(driver._reader, "_drain", broken)
        driver.poll()
        for end in (first, second):
            (error,) = end.sink.failures
            assert "the channel is gone" in str(error)
        monkeypatch.undo()


@both_ways
async def test_channel_failure_during_a_spin_reaches_every_sink(
    device: verbs.Device, polling: float
) -> None:
    """With polling, a task that polls before it waits notices the failure."""
    async with the_driver(device, polling) as driver, two_ends(driver) as (first, second):
        spin = driver.table.wakeups.poll_for
        assert isinstance(spin, partial) == bool(polling)
        *_, otherwise = spin.args if isinstance(spin, partial) else driver._reader.callback()
        otherwise(-errno.EIO)
        for end in (first, second):
            (error,) = end.sink.failures
            assert os.strerror(errno.EIO) in str(error)


@both_ways
async def test_released_cq_entries_are_freed_once_the_queue_is_empty(
    device: verbs.Device, polling: float
) -> None:
    async with the_driver(device, polling) as driver, two_ends(driver) as (first, _):
        cq = driver.reserve_cq(10)
        driver.release_cq(cq, 10)
        assert driver.channel.entries_to_release == [cq.entries]
        first.send()
        await first.sink.wait(1)
        assert driver.channel.entries_to_release == []
        assert cq.entries.pending_release == 0


@pytest.mark.parametrize("polling", [0, 30e-6, 1e-3])
async def test_reader_spins_before_sleep_for_the_configured_time(
    device_name: str, host: str, polling: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    check_soon = CompletionReader._spin_soon

    def noted(reader: CompletionReader) -> None:
        check_soon(reader)
        looks.append(reader._poller.spin_us)

    monkeypatch.setattr(CompletionReader, "_spin_soon", noted)

    config = Config(polling=polling)
    async with (
        await listen(host, device=device_name, config=config) as listener,
        await connect(host, listener.port, device=device_name, config=config) as there,
        await listener.accept() as here,
    ):
        sent = 0
        async with asyncio.timeout(100):
            while sent < 3 or (polling and not looks):
                delivered = there.send_nowait(b"a message")
                await asyncio.wait([delivered])  # only the loop polls
                (await here.recv()).release()
                sent += 1
    assert set(looks) == ({round(polling * 1e6)} if polling else set())


@pytest.mark.parametrize(
    ("awake", "woken", "looks"), [(1, 0, True), (3, 0, True), (0, 0, False), (1, 1, False)]
)
async def test_reader_spins_after_writing_to_polling_peers(
    device: verbs.Device, monkeypatch: pytest.MonkeyPatch, awake: int, woken: int, looks: bool
) -> None:
    """A polling peer responds soon, so even a reader whose spins failed for long spins again.

    Waking a sleeping peer takes longer than a spin.
    """
    async with the_driver(device) as driver:
        wakeups = 5 << 32 | 7
        looked: list[bool] = []

        def drain(*_: object) -> tuple[bool, bool]:
            nonlocal wakeups
            wakeups += woken << 32 | awake  # by the tasks that the drain wakes
            return True, False

        reader = driver._reader
        monkeypatch.setattr(reader, "_drain", drain)
        monkeypatch.setattr(driver.channel, "_peer_wakeups", lambda: wakeups)
        monkeypatch.setattr(reader, "_spin_soon", lambda: looked.append(True))
        reader._polling._wakeups_to_skip = 1 << 20
        reader.on_completions()
        assert looked == [True] * looks
        assert reader._polling._wakeups_to_skip == (1 << 20) - (not looks)


def test_config_rejects_polling_out_of_range() -> None:
    for polling in (-1e-6, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"Config\.polling (is|must be)"):
            Config(polling=polling)


# ---- completion queues ---------------------------------------------------------------------------


async def test_reserve_cq_adds_queues_and_closes_unused_ones(device: verbs.Device) -> None:
    async with the_driver(device) as driver:
        first = driver.reserve_cq(CQ_ENTRIES - 56)
        assert driver.reserve_cq(first.available) is first
        second = driver.reserve_cq(1)
        assert second is not first
        large = driver.reserve_cq(CQ_ENTRIES + 1)
        assert large.cqe > CQ_ENTRIES
        driver.release_cq(large, CQ_ENTRIES + 1)
        assert large.closed
        driver.release_cq(second, 1)
        assert second.closed
        driver.release_cq(first, first.reserved)
        assert not first.closed  # kept for the next user


# ---- asynchronous events -------------------------------------------------------------------------


async def test_device_events_reach_only_the_affected_sinks(device: verbs.Device) -> None:
    """After a fatal device event, later connections open the device again."""
    kinds = verbs.EventType
    async with the_driver(device) as driver, two_ends(driver) as (first, second):
        with driver.context.create_cq(16) as other:
            own = verbs.AsyncEvent(kinds.QP_ACCESS_ERR, first.qp)
            of_both = verbs.AsyncEvent(kinds.CQ_ERR, first.qp.send_cq)
            of_none = [
                verbs.AsyncEvent(kinds.PORT_ACTIVE, None, 1),
                verbs.AsyncEvent(kinds.QP_FATAL, None),
                verbs.AsyncEvent(kinds.CQ_ERR, other),
            ]
            fatal = verbs.AsyncEvent(kinds.DEVICE_FATAL)
            for event in (*of_none, own, of_both, fatal):
                ContextEvents.deliver(driver.context, event)
        assert first.sink.events == [own, of_both, fatal]
        assert second.sink.events == [of_both, fatal]
        again = for_device(device)
        assert again is not driver
        assert again.context is not driver.context
        again.release()


async def test_port_event_reaches_every_sink_when_the_query_fails(
    device: verbs.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with the_driver(device) as driver, two_ends(driver) as ends:
        event = verbs.AsyncEvent(verbs.EventType.PORT_ERR, None, 1)
        refuse = mock.Mock(side_effect=VerbsError(errno.EIO, "ibv_query_qp"))
        monkeypatch.setattr(verbs.QueuePair, "query", refuse)
        ContextEvents.deliver(driver.context, event)
        assert [end.sink.events for end in ends] == [[event], [event]]


async def test_event_received_by_another_loop_is_forwarded(device: verbs.Device, host: str) -> None:
    """If two loops share a context, only one of them receives an event and must forward it."""
    events = cm.EventChannel(device.library)
    id = events.create_id()
    id.bind_addr((host, 0))
    context = id.context
    assert context is not None

    async def theirs(event: verbs.AsyncEvent) -> None:
        driver = Driver.for_context(context, CONFIG, "a test")
        ContextEvents.deliver(context, event)
        driver.release()

    driver = Driver.for_context(context, CONFIG, "a test")
    async with two_ends(driver) as (first, second):
        event = verbs.AsyncEvent(verbs.EventType.QP_FATAL, first.qp)
        await asyncio.to_thread(asyncio.run, theirs(event))
        fatal = verbs.AsyncEvent(verbs.EventType.DEVICE_FATAL)
        await asyncio.to_thread(asyncio.run, theirs(fatal))
        await asyncio.sleep(0)
        assert first.sink.events == [event, fatal]
        assert second.sink.events == [fatal]  # concerns every sink
    driver.release()
    events.close()


# ---- one per loop --------------------------------------------------------------------------------


def test_driver_is_shared_per_loop_and_device(device: verbs.Device) -> None:
    drivers: list[Driver] = []

    async def main() -> None:
        first = for_device(device)
        second = for_device(device, Config(pool_limit=2 * LIMIT))
        assert first is second
        assert first.pool.limit == LIMIT
        first.release()
        assert not first.pd.closed
        second.release()
        third = for_device(device)
        assert third is first  # kept for a while
        assert not third.pd.closed
        third.release()
        fourth = for_device(device, Config(pool_limit=2 * LIMIT))
        assert fourth is not first  # the first one has another limit
        assert first.pd.closed
        assert first.context.closed
        drivers.append(fourth)
        fourth.release()
        assert not fourth.context.closed

    for loop_factory in LOOPS.values():
        with asyncio.Runner(debug=True, loop_factory=loop_factory) as runner:
            runner.run(main())
    assert drivers[0] is not drivers[1]
    assert all(driver.context.closed for driver in drivers)  # closed with their loops


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def wait_until_closed(driver: Driver) -> None:
    async with asyncio.timeout(60):
        while not driver.context.closed:
            await turns(1)


async def test_driver_closes_when_idle_after_the_last_release(
    device: verbs.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(per_loop_resource, "IDLE_TIMEOUT", 1e-9)

    first = for_device(device)
    first.release()
    assert for_device(device) is first
    await turns(5)
    assert not first.context.closed  # in use when the idle timer expires
    first.release()
    for_device(device).release()
    await wait_until_closed(first)
    async with the_driver(device) as other:
        assert other is not first


FORKED = """
import asyncio, os, sys
from aiordma import Config, verbs
from aiordma._event_loop import per_loop_resource
from aiordma._event_loop.driver import Driver

per_loop_resource.IDLE_TIMEOUT = 0.01
closed = []
Driver._close = lambda driver: closed.append(driver)

async def use(device):
    Driver.for_device(verbs.find_device(device), Config(), "a test").release()

loop = asyncio.new_event_loop()
loop.run_until_complete(use(sys.argv[1]))
child = os.fork()
if child:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
while child and not closed:
    loop.run_until_complete(asyncio.sleep(0))
loop.run_until_complete(asyncio.sleep(0.1))
os._exit(len(closed))
"""


def test_forked_child_does_not_close_the_idle_driver_of_the_parent(device: verbs.Device) -> None:
    """The driver belongs to the parent, but the child's loop has inherited its timer."""
    done = run_python("-c", FORKED, device.name)
    assert (done.returncode, done.stdout) == (1, "0\n"), done.stderr


async def test_driver_releases_resources_when_its_memory_pool_fails(
    device: verbs.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context belongs to the connection manager and stays open."""
    refuse = mock.Mock(side_effect=VerbsError(errno.ENOMEM, "ibv_reg_mr"))
    with device.open() as context:
        before = verbs.live()
        monkeypatch.setattr(driver, "MemoryPool", refuse)
        with pytest.raises(VerbsError):
            Driver.for_context(context, CONFIG, "a test")
        assert verbs.live() == before


async def test_idle_driver_is_replaced_after_a_fatal_device_event(device: verbs.Device) -> None:
    """An unused driver must handle events, or they would wake the loop again and again."""
    async with the_driver(device) as driver, two_ends(driver) as (first, second):
        first.send()
        second.send()
        await asyncio.gather(first.sink.wait(1), second.sink.wait(1))
    driver.poll()
    readable, _, _ = select.select([driver.channel.fd], [], [], 0)
    assert not readable
    ContextEvents.deliver(driver.context, verbs.AsyncEvent(verbs.EventType.DEVICE_FATAL))
    async with the_driver(device) as other:
        assert other is not driver


async def test_idle_driver_drops_cached_registrations(device: verbs.Device) -> None:
    view = memoryview(bytearray(1 << 20))
    async with the_driver(device) as driver:
        before = verbs.live().get("MemoryRegion", 0)
        use = driver.registrations.find(view)
        assert use is not None
        use.close()
        assert verbs.live()["MemoryRegion"] == before + 1
    assert not driver.context.closed
    assert verbs.live().get("MemoryRegion", 0) == before


# ---- the end of a program -----------------------------------------------------------------------

ONCE = """
import asyncio, os, sys, time, aiordma
from aiordma import verbs

async def main(device, via, host):
    async with await aiordma.listen(host, 0, device=device, via=via) as listener:
        client = await aiordma.connect(host, listener.port, device=device, via=via)
        server = await listener.accept()
        async with client, server:
            await client.send(b"x")
            assert bytes(await server.recv()) == b"x"

asyncio.run(main(*sys.argv[1:]), debug=False)
end = time.monotonic() + 60
while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < end:
    pass  # a thread that has been joined stays in the list for a moment more
print(len(os.listdir("/proc/self/task")), verbs.live())
"""


@pytest.mark.parametrize("via", ["cm", "tcp"])
def test_program_exits_without_warnings_after_closing_connections(
    device: verbs.Device, host: str, via: str
) -> None:
    """The embedded device's thread has ended, and the interpreter prints no warnings."""
    done = run_python("-X", "dev", "-W", "error", "-c", ONCE, device.name, via, host)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 {}\n", "")


@pytest.mark.any_device
async def test_cm_events_per_iteration_are_limited(
    device: verbs.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more events than one iteration of the loop may process."""
    events = EventDriver.for_library(device.library)
    taken = 0

    def next_event() -> Any:
        nonlocal taken
        taken += 1
        return mock.Mock(listen_id=None) if taken < 2 * MAX_EVENTS else None

    monkeypatch.setattr(events.channel, "get_event", next_event)
    events.take()
    assert taken == MAX_EVENTS
    monkeypatch.undo()
    events.release()


@pytest.mark.any_device
async def test_connection_requests_are_delayed_when_over_the_time_budget(
    device: verbs.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each iteration takes one request. During the pause, the loop does not watch the channel."""
    now = 1000.0
    clock = Clock(lambda: now)
    monkeypatch.setattr("aiordma._event_loop.driver.clock_of", lambda _: clock)
    taken = 0

    def next_event() -> Any:
        nonlocal taken
        taken += 1
        return mock.Mock(listen_id=None)

    calls = mock.Mock()
    monkeypatch.setattr(driver, "stop_reading", calls.stop)
    monkeypatch.setattr(EventDriver, "_start_reading", calls.watch)

    def is_watched() -> bool:
        return bool(calls.method_calls[-1][0] == "watch")

    events = RequestDriver.for_library(device.library)
    assert events is not EventDriver.for_library(device.library)
    EventDriver.for_library(device.library).release()
    monkeypatch.setattr(events.channel, "get_event", next_event)
    events.take()
    assert (taken, is_watched()) == (1, True)
    events.share.use(60)
    events.take()
    assert (taken, is_watched()) == (1, False)
    now += MAX_WAIT + BURST * SHARE
    events._start_reading()
    events.take()
    assert (taken, is_watched()) == (2, True)
    events.share.use(60)
    events.take()
    assert not is_watched()
    events.release()
    events._end()
    events._start_reading()  # the last user released it during the pause
    assert not is_watched()


@pytest.mark.any_device
@pytest.mark.parametrize("make", LOOPS.values(), ids=LOOPS)
def test_closing_the_loop_closes_an_unwatched_event_channel(
    device: verbs.Device, make: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """During the pause, the loop does not watch the channel that it must close."""

    async def pause() -> RequestDriver:
        events = RequestDriver.for_library(device.library)
        events.share.use(60)
        events.take()
        return events

    loop = make()
    events = loop.run_until_complete(pause())
    loop.close()
    gc.collect()
    assert events._closed
