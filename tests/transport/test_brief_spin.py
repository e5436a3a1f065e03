"""Test that a task polls once before it waits, which can save an iteration of the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiordma import Config, Connection
from aiordma._event_loop import completion_reader

from .connection_factory import ConnectionFactory, pattern
from .marks import one_loop, sets_polling

pytestmark = sets_polling


class Turns:
    """Counts the event loop iterations since its creation."""

    def __init__(self) -> None:
        self.count = 0
        self._next()

    def _next(self) -> None:
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self.count += 1
        self._next()

    def stop(self) -> int:
        self._handle.cancel()
        return self.count


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend brief spins to their maximum of one millisecond."""
    monkeypatch.setattr(completion_reader, "BRIEF_SPIN_US", 1_000_000)


def look_until_it_completes(conn: Connection) -> None:
    """Repeat each brief spin until a completion arrives, however slow the machine is."""
    wakeups = conn._endpoint.driver.table.wakeups
    look = wakeups.poll_for
    assert look

    def patient(spin_us: int) -> None:
        before = conn._queue.completions
        while conn._queue.completions == before:
            look(spin_us)

    wakeups.poll_for = patient


async def test_most_awaited_writes_complete_without_a_loop_iteration(
    factory: ConnectionFactory,
) -> None:
    async with factory.sharing(4096, config=Config(polling=1.0)) as (client, _, there, remote):
        with client.alloc(4096) as buffer:
            buffer.view[:] = pattern(4096)
            look_until_it_completes(client)
            turns = Turns()
            went_round = 0
            for start in range(0, 4096, 64):
                before = turns.count
                await client.write(buffer[start : start + 64], remote[start : start + 64])
                went_round += turns.count > before
            turns.stop()
            assert 0 < went_round < 8  # some writes must let other tasks run
        assert there.view == pattern(4096)


@one_loop
@pytest.mark.usefixtures("patient")
async def test_writing_task_does_not_starve_other_tasks(factory: ConnectionFactory) -> None:
    async with factory.sharing(64, config=Config(polling=1.0)) as (client, _, _, remote):
        with client.alloc(64) as buffer:
            over = False

            async def write() -> None:
                while not over:
                    await client.write(buffer, remote)

            writing = asyncio.create_task(write())
            for _ in range(10):
                await asyncio.sleep(0)
            over = True
            await writing


@one_loop
async def test_writes_complete_in_the_event_loop_when_polling_is_disabled(
    factory: ConnectionFactory,
) -> None:
    async with factory.sharing(64, config=Config(polling=0)) as (client, _, _, remote):
        with client.alloc(64) as buffer:
            turns = Turns()
            for _ in range(20):
                await client.write(buffer, remote)
            assert turns.stop() >= 20


@pytest.mark.usefixtures("patient")
async def test_each_task_receives_its_own_reply_when_another_task_polls(
    factory: ConnectionFactory,
) -> None:
    """A task that was just resumed polls, and finds messages that other tasks wait for.

    Each of these tasks must receive its own message, in the order of the messages.
    """
    async with factory.pair(Config(polling=1.0)) as (client, server):

        async def echo() -> None:
            for _ in range(200):
                with await server.recv() as message:
                    await server.send(message)

        async def ask() -> None:
            for number in range(200):
                await client.send(number.to_bytes(2, "little"))
                with await client.recv() as message:
                    assert int.from_bytes(message.data, "little") == number

        async with asyncio.TaskGroup() as group:
            group.create_task(echo())
            group.create_task(ask())


@one_loop
@pytest.mark.usefixtures("patient")
async def test_waiters_do_not_poll_outside_their_loop(factory: ConnectionFactory) -> None:
    """The waiter is stepped in a thread without a running loop, and then in another loop."""
    async with factory.pair(Config(polling=1.0)) as (client, server):
        sending = client.send_nowait(b"x")

        async def step() -> None:
            next(iter(sending))

        def outside() -> None:
            next(iter(sending))
            asyncio.run(step())

        thread = threading.Thread(target=outside)
        before = client._queue.completions
        thread.start()
        thread.join()  # blocks this loop in the meantime
        assert client._queue.completions == before
        assert not sending.done()
        await asyncio.wait([sending])
        assert bytes(await server.recv()) == b"x"
