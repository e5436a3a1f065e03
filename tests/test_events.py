"""Tests of `async for` over device events: every subscriber gets every event."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import threading
from collections.abc import Callable

import pytest

import aiordma
from aiordma import cm, verbs
from aiordma._event_loop.driver import ContextEvents
from aiordma._native import lib
from aiordma.errors import BufferStateError, DeviceNotFoundError
from aiordma.events import MAX_STORED, DeviceEvents
from aiordma.verbs import AsyncEvent, EventType

Happen = Callable[[], None]


@pytest.fixture
def addresses_change(device: verbs.Device) -> Happen:
    """Provide a function that makes the device report changed addresses (GID_CHANGE)."""
    if device.library.name == "embedded":

        def raise_it() -> None:
            assert lib.aiordma_embedded_raise(EventType.GID_CHANGE) == 0

        return raise_it

    def add_and_take_away() -> None:
        for do in ("add", "del"):
            command = ["ip", "address", do, "10.9.9.77/32", "dev", "dummy0"]
            subprocess.run(command, check=True, timeout=30)

    return add_and_take_away


async def next_of(events: DeviceEvents, kind: EventType) -> AsyncEvent:
    """Return the next event of this type, waiting for up to 30 s."""
    async with asyncio.timeout(30):
        while True:
            event = await events.get()
            if event.type is kind:
                return event


async def test_device_events_iterator_yields_gid_changes(
    device: verbs.Device, addresses_change: Happen
) -> None:
    async with aiordma.device_events(device.name) as events:
        assert events.get_nowait() is None
        addresses_change()
        async with asyncio.timeout(30):
            async for event in events:
                assert event.type is EventType.GID_CHANGE
                assert event.port_num == 1
                assert event.element is None
                break
    assert events.context.closed


async def test_every_subscriber_receives_the_event(
    device: verbs.Device, addresses_change: Happen
) -> None:
    with device.open() as context:
        async with (
            aiordma.device_events(context) as one,
            aiordma.device_events(context) as two,
            aiordma.device_events(device) as of_another_context,
        ):
            addresses_change()
            for events in (one, two, of_another_context):
                assert (await next_of(events, EventType.GID_CHANGE)).port_num == 1
        assert not context.closed  # it belongs to the caller


async def test_queue_pair_event_refers_to_its_queue_pair(device: verbs.Device) -> None:
    """A drained send queue reports an event on request (IBTA volume 1, clause 10.3.1.5)."""
    with device.open() as context, context.alloc_pd() as pd, context.create_cq(64) as cq:
        async with aiordma.device_events(context) as events:
            qp = pd.create_qp(cq)
            mine = qp.endpoint()
            qp.connect(mine, mine)
            qp.modify(qp_state=verbs.QPState.SQD, en_sqd_async_notify=True)
            event = await next_of(events, EventType.SQ_DRAINED)
            assert event.element is qp


async def test_close_stops_iteration_and_fails_waiting_tasks(device: verbs.Device) -> None:
    events = aiordma.device_events(device.name)
    event = AsyncEvent(EventType.PORT_ACTIVE, None, 1)
    ContextEvents.deliver(events.context, event)

    async def all_of_them() -> list[AsyncEvent]:
        return [event async for event in events]

    everything = asyncio.create_task(all_of_them())
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(events.get()) for _ in range(2)]
    await asyncio.sleep(0)
    assert "DeviceEvents of" in repr(events)
    events.close()
    events.close()
    assert await everything == [event]
    for waiter in waiting:
        with pytest.raises(BufferStateError, match="is closed"):
            await waiter
    with pytest.raises(BufferStateError, match="is closed"):
        await events.get()
    with pytest.raises(BufferStateError, match="is closed"):
        events.get_nowait()


async def test_get_nowait_returns_events_received_before_the_close(device: verbs.Device) -> None:
    events = aiordma.device_events(device.name)
    event = AsyncEvent(EventType.PORT_ACTIVE, None, 1)
    ContextEvents.deliver(events.context, event)
    events.close()
    assert events.get_nowait() == event
    with pytest.raises(BufferStateError, match="is closed"):
        events.get_nowait()


async def test_cancelled_get_does_not_lose_an_event(device: verbs.Device) -> None:
    async with aiordma.device_events(device.name) as events:
        first = asyncio.create_task(events.get())
        second = asyncio.create_task(events.get())
        await asyncio.sleep(0)
        event = AsyncEvent(EventType.PORT_ERR, None, 1)
        ContextEvents.deliver(events.context, event)
        first.cancel()  # already woken, but has not run yet
        assert await second == event
        assert first.cancelled() or (await asyncio.wait([first]))[0]


async def test_oldest_unread_events_are_dropped_with_a_warning(
    device: verbs.Device, caplog: pytest.LogCaptureFixture
) -> None:
    async with aiordma.device_events(device.name) as events:
        for port in range(1, MAX_STORED + 3):
            ContextEvents.deliver(events.context, AsyncEvent(EventType.PORT_ERR, None, port))
        told = [record for record in caplog.records if record.name.startswith("aiordma")]
        assert [record.levelno for record in told] == [logging.WARNING] * 2
        assert f"{MAX_STORED} events of" in caplog.text
        found = []
        while (event := events.get_nowait()) is not None:
            found.append(event.port_num)
        assert found == list(range(3, MAX_STORED + 3))


async def test_unknown_device_raises_device_not_found_error() -> None:
    with pytest.raises(DeviceNotFoundError):
        aiordma.device_events("nobody0")


async def test_closed_loop_does_not_block_events_for_another_loop(
    device: verbs.Device, host: str, addresses_change: Happen
) -> None:
    channel = cm.EventChannel(device.library)
    id = channel.create_id()
    id.bind_addr((host, 0))
    context = id.context
    assert context is not None
    ended = asyncio.new_event_loop()
    there = ContextEvents(ended, context)
    ContextEvents._instances[ended] = {there._key: there}
    there.subscribe(lambda _: pytest.fail("told in a loop that has ended"))
    ended.close()

    async with aiordma.device_events(context) as events:
        addresses_change()
        await next_of(events, EventType.GID_CHANGE)
    channel.close()


async def test_event_after_unsubscribe_is_not_delivered(device: verbs.Device) -> None:
    """The event is already on its way to the loop when the last subscriber leaves."""
    heard: list[AsyncEvent] = []
    with device.open() as context:
        here = ContextEvents.for_context(context)
        token = here.subscribe(heard.append)

        async def elsewhere() -> None:
            ContextEvents.deliver(context, AsyncEvent(EventType.PORT_ERR, None, 1))

        thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
        thread.start()
        thread.join()  # this loop has not run since
        here.unsubscribe(token)
        await asyncio.sleep(0)
        assert heard == []
        here.release()
