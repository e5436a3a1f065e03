"""Peers that offer long messages and do not answer the READs keep no others from memory."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from aiordma import ConnectionBrokenError
from aiordma._memory import stalled_reads
from aiordma._memory.stalled_reads import SLOWEST, StalledReads

from .connection_factory import (
    NEVER,
    SMALL,
    ConnectionFactory,
    ends,
    pattern,
    pool_statistics,
    yield_loop,
)
from .marks import one_loop

MIB = 1 << 20
LENGTH = 16 * MIB
HOSTILE = 5
CONFIG = replace(SMALL, pool_limit=4 * LENGTH, fetch_ahead=0, keep_alive=None)

CHILD = """
import asyncio, sys
import aiordma

async def main(host, port, device, via, length):
    async with await aiordma.connect(host, int(port), device=device, via=via) as conn:
        await conn.send(bytes(int(length)))

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def offering(factory: ConnectionFactory, port: int) -> Iterator[int]:
    """A process that offers a long message: its number."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, factory.host, str(port), factory.device, factory.via,
         str(LENGTH)],
        stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            yield process.pid
        finally:
            process.kill()


async def stopped(pid: int) -> None:
    """No thread of it runs, its device as little."""
    os.kill(pid, signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.any_device  # a card answers READs for a process that is stopped
@pytest.mark.parametrize("answers", ["not at all", "at first"])
@one_loop
async def test_peers_that_do_not_answer(factory: ConnectionFactory, answers: str) -> None:
    """The embedded device stops with its process; another one answers, and all arrive."""
    timeout = NEVER if answers == "not at all" else 0.05 * factory.slow
    async with await factory.listen(CONFIG) as listener:
        with ExitStack() as stack:
            receiving = []
            for _ in range(HOSTILE):
                pid = stack.enter_context(offering(factory, listener.port))
                async with factory.within(20):
                    conn = await listener.accept()
                    conn._memory.pool._stalled_reads.timeout = timeout
                    while not conn._messages.figures()["unread"]:
                        await yield_loop(1)
                if answers == "at first":
                    # As if each had answered when it was asked, and stopped after that.
                    conn._memory.pool._has_spare = lambda size: True  # type: ignore[method-assign]
                await stopped(pid)
                receiving.append((conn, asyncio.create_task(conn.recv())))
                await yield_loop(5)
            client, server = await factory.both(listener, CONFIG)
            # A busy machine may take long for the honest one's READs.
            stalled = server._memory.pool._stalled_reads
            begin, honest = stalled.begin, server._messages.inbox
            stalled.begin = lambda reader: None if reader is honest else begin(reader)  # type: ignore[method-assign]
            data = pattern(LENGTH)
            async with client, server:
                sending = asyncio.create_task(client.send(data))
                try:
                    async with factory.within(20):
                        with await server.recv() as message:
                            assert message == data
                        await sending
                except TimeoutError:
                    all_figures = [it._messages.figures() for it, _ in receiving]
                    pytest.fail(
                        f"{pool_statistics(server)}, {server._messages.figures()}, {all_figures}"
                    )
            silent = [task for _, task in receiving if not task.done()]
            if answers == "not at all":
                assert len(silent) == (HOSTILE if factory.slow == 1 else 0)
            else:
                assert len(silent) < HOSTILE
            for conn, task in receiving:
                if task in silent:
                    conn.abort()
                    await conn.wait_closed()
                    await ends(task, ConnectionError)
                elif factory.slow == 1:
                    error = await ends(task, ConnectionBrokenError)
                    assert "has not answered enough" in str(error)
                else:
                    (await task).release()

    async with factory.pair(replace(CONFIG, pool_limit=8 * LENGTH)) as (client, server):
        for _ in range(2):
            before = server._queue.completions
            sending = asyncio.create_task(client.send(bytes(LENGTH)))
            (await server.recv()).release()
            await sending
            assert server._queue.completions - before <= LENGTH // (8 * MIB) + 4
        assert pool_statistics(server).waiting == 0


@dataclass(eq=False)
class Reader:
    rate: float
    progress: int = 0
    broken: bool = False

    def stalled(self, timeout: float) -> None:
        self.broken = True


@pytest.mark.parametrize(
    ("rates", "broken"),
    [
        ([0], [0]),
        ([4 / SLOWEST], [0]),
        ([0.9], [0]),
        ([1.1], []),
        ([0.6, 0.6], []),
        ([1.1, 0.4, 0.6], []),
        ([2, 4 / SLOWEST, 0.6], [1]),
    ],
)
def test_peers_that_answer_slowly(
    monkeypatch: pytest.MonkeyPatch, rates: list[float], broken: list[int]
) -> None:
    """Each makes its part of the least rate, in whatever pieces."""
    now = 0.0
    monkeypatch.setattr(stalled_reads, "time", SimpleNamespace(monotonic=lambda: now))
    reads = StalledReads([])
    readers = [Reader(rate) for rate in rates]
    for reader in readers:
        reads.begin(reader)
    for _ in range(40):
        now += 0.5
        for reader in readers:
            reader.progress += int(reader.rate * SLOWEST / 2)
        reads._look()
    assert [number for number, reader in enumerate(readers) if reader.broken] == broken


@one_loop
async def test_a_message_that_goes_to_other_memory_than_it_waited_for(
    factory: ConnectionFactory,
) -> None:
    """Its READs into a receiver's own memory are none of the pool's."""
    async with factory.pair(CONFIG) as (client, server), factory.within(20):
        data = pattern(LENGTH)
        with ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(server.alloc(LENGTH // 4))
            sending = asyncio.create_task(client.send(data))
            receiving = asyncio.create_task(server.recv())
            while not pool_statistics(server).waiting:
                await yield_loop(1)
            receiving.cancel()
            await ends(receiving, asyncio.CancelledError)
            target = bytearray(LENGTH)
            await server.recv_into(target)
            assert target == data
            await sending
        sending = asyncio.create_task(client.send(data))
        with await server.recv() as message:
            assert message == data
        await sending
        assert not server._memory.pool._stalled_reads._readers
        assert server._messages.inbox.progress == 2 * LENGTH
