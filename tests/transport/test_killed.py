"""Peers that are killed or stopped at any moment, one after the other, and the one that survives.

`tests/soft/test_killed.c` does it hundreds of times to the embedded device; this is about what is
above it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from aiordma import (
    Connection,
    ConnectionBrokenError,
    ConnectionManagerError,
    RDMAError,
)

from .connection_factory import ConnectionFactory, at_rest, pattern, pool_statistics

ROOT = Path(__file__).parents[2]
ROUNDS = 24

# The end of a connection to a process that is being killed, before it is established and after; and
# ProtocolError, if it was in the middle of the TCP bootstrap.
ENDS = (ConnectionBrokenError, ConnectionManagerError)


class Prepared:
    """`tests.transport.prepared`."""

    def __init__(self, factory: ConnectionFactory) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.transport.prepared", factory.device,
             factory.via, factory.host],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    async def start(self, role: str, port: int) -> tuple[int, int]:
        """A new peer: its process, and the port where it listens if it does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{role} {port}\n".encode())
        self._process.stdin.flush()
        pid, told = (await asyncio.to_thread(self._process.stdout.readline)).split()
        return int(pid), int(told)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


# ---- what we do with a peer, until it is no more -------------------------------------------------


async def echo(conn: Connection, chance: random.Random) -> None:
    while True:
        sent = [pattern(chance.choice((1, 100, 5000, 1 << 20)), n) for n in range(4)]
        sending = asyncio.gather(*(conn.send(data) for data in sent))
        try:
            for data in sent:
                with await conn.recv() as message:
                    assert message == data
            await sending
        finally:
            sending.cancel()
            with suppress(RDMAError, asyncio.CancelledError):
                await sending


async def talk(conn: Connection, chance: random.Random) -> None:
    del chance
    async for message in conn:
        with message:
            assert bytes(message) in (bytes(1 << 20), bytes(10))


async def share(conn: Connection, chance: random.Random) -> None:
    remote = await conn.recv_region()
    added = 0
    while True:
        size = chance.choice((8, 5000, 1 << 19))
        data, back = pattern(size, added), bytearray(size)
        await conn.write(data, remote[8 : 8 + size])
        await conn.read(remote[8 : 8 + size], back)
        assert back == data
        assert await conn.fetch_and_add(remote[:8], 1) == added
        added += 1


ROLES = {role.__name__: role for role in (echo, talk, share)}


@dataclass
class Survivor:
    """Listens, and connects to the other listeners."""

    factory: ConnectionFactory
    port: int
    accepted: asyncio.Queue[Connection]
    chance: random.Random

    async def meet(self, role: str, port: int) -> None:
        """The whole life of a connection with the newest peer; raises what it ends with."""
        if port == self.port:
            conn = await self.accepted.get()
        else:
            conn = await self.factory.connect(port)
        try:
            await ROLES[role](conn, self.chance)
            await conn.recv()  # has ended
        except BaseException:
            await conn.close()
            raise


@asynccontextmanager
async def survivor(factory: ConnectionFactory) -> AsyncIterator[Survivor]:
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    async with await factory.listen() as listener:

        async def accept() -> None:
            async for conn in listener:
                accepted.put_nowait(conn)

        accepting = asyncio.create_task(accept())
        try:
            yield Survivor(factory, listener.port, accepted, random.Random(42))
        finally:
            accepting.cancel()
            while not accepted.empty():
                await accepted.get_nowait().close()


@pytest.mark.time_limit(500)
@pytest.mark.timeout(600)
async def test_killed_at_any_moment(factory: ConnectionFactory) -> None:
    """All waiters are told; nothing else notices, nothing is left."""
    peers = Prepared(factory)
    try:
        async with factory.witness() as witness, survivor(factory) as we:
            chance = we.chance
            await at_rest(witness.client, witness.server)
            before = pool_statistics(witness.client)
            for number in range(ROUNDS if factory.slow == 1 else 6):
                role = chance.choice(list(ROLES))
                pid, port = await peers.start(role, chance.choice((0, we.port)))
                meeting = asyncio.create_task(we.meet(role, port))
                # The moment is chance itself: often in the handshake, as often long after.
                await asyncio.sleep(factory.slow * chance.choice((0.005, 0.1)) * chance.random())
                if chance.random() < 0.3:
                    os.kill(pid, signal.SIGSTOP)  # it is not dead: nothing fails meanwhile
                    await asyncio.sleep(0.03)
                    assert not meeting.done()
                    os.kill(pid, chance.choice((signal.SIGCONT, signal.SIGSTOP)))
                assert not meeting.done()
                os.kill(pid, signal.SIGKILL)
                if port == we.port and not meeting.done():
                    # It may have been killed before we could hear of it: then none comes.
                    await asyncio.wait([meeting], timeout=factory.slow / 2)
                    if not meeting.done():
                        assert we.accepted.empty()
                        meeting.cancel()
                        await asyncio.wait([meeting])
                        continue
                async with factory.within(10):
                    await asyncio.wait([meeting])
                error = meeting.exception()
                assert isinstance(error, ENDS) or "bootstrap" in str(error), error
                if number % 4 == 0:
                    await witness.check()
            await witness.check()
            await at_rest(witness.client, witness.server)
            after = pool_statistics(witness.client)
            assert (after.leases, after.regions) == (before.leases, before.regions)
    finally:
        peers.end()
