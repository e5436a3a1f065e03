"""Test peers in other processes that are busy, stopped or killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aiordma import (
    Connection,
    ConnectionBrokenError,
    RDMAError,
    RemoteRegion,
    RequestRefusedError,
    WorkCompletionError,
)
from conftest import EMBEDDED

from .connection_factory import (
    SMALL,
    ConnectionFactory,
    at_rest,
    ends,
    pattern,
    pool_statistics,
    told_once,
    yield_loop,
)
from .marks import one_loop

ROOT = Path(__file__).parents[2]


class Child:
    """A child process that runs a role of `tests.transport.child`, and a connection to it."""

    def __init__(self, factory: ConnectionFactory, role: str, *arguments: str) -> None:
        self._factory = factory
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.transport.child", role, factory.device,
             factory.via, factory.host, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.pid = self._process.pid
        self.conn: Connection

    async def line(self) -> str:
        """Return the next line printed, or an empty string if the child has ended."""
        assert self._process.stdout is not None
        return (await asyncio.to_thread(self._process.stdout.readline)).strip()

    async def ended(self) -> int:
        return await asyncio.to_thread(self._process.wait)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, factory: ConnectionFactory, role: str, **other: float
    ) -> AsyncIterator[Child]:
        """Start a child and connect to it. `other` overrides fields of the Config."""
        child = cls(factory, role)
        config = replace(SMALL, **other)  # type: ignore[arg-type]
        try:
            port = await child.line()
            async with await factory.connect(int(port), config) as conn:
                child.conn = conn
                yield child
        finally:
            child.end()


async def region(child: Child) -> RemoteRegion:
    return await child.conn.recv_region()


@one_loop
async def test_one_sided_operations_complete_while_the_peer_is_busy(
    factory: ConnectionFactory,
) -> None:
    """The peer's device serves the operations. The peer computes until it sees the last write."""
    async with Child.connected(factory, "busy") as child:
        conn = child.conn
        remote = await region(child)
        await conn.send(b"go")
        assert await child.line() == "busy"
        idle = asyncio.create_task(child.line())
        for n in range(10):
            data = pattern(100_000, n)
            await conn.write(data, remote[8:100_008])
            back = bytearray(100_000)
            await conn.read(remote[8:100_008], back)
            assert back == data
            assert await conn.fetch_and_add(remote[:8], 1) == n
            assert await conn.compare_and_swap(remote[:8], n + 1, n + 1) == n + 1
        assert not idle.done()
        await conn.write(b"x", remote[-1:])
        assert await idle == "idle"
        assert int.from_bytes(bytes(await conn.recv()), sys.byteorder) == 10


# ---- killed --------------------------------------------------------------------------------------


async def broken_soon(
    factory: ConnectionFactory, conn: Connection, *work: asyncio.Task[Any]
) -> None:
    """Check that the connection breaks, and that every error names the likely cause."""
    results = await asyncio.gather(*work, return_exceptions=True)
    await conn.wait_closed()
    # The kernel may release the killed peer's memory before its queue pair. The peer's device then
    # rejects the operation in flight, which also ends the connection.
    refused = [result for result in results if isinstance(result, WorkCompletionError)]
    assert len(refused) <= (factory.device != EMBEDDED), refused
    others = [result for result in results if result not in refused]
    assert {type(result) for result in others} <= {type(None), int, ConnectionBrokenError}
    broken: list[BaseException] = [
        result for result in results if isinstance(result, ConnectionBrokenError)
    ]
    assert broken
    for call in (conn.recv, lambda: conn.send(b"x"), conn.recv_region):
        broken.append(await ends(call(), ConnectionBrokenError))
    for error in broken:
        check_diagnosis(factory, error)


def check_diagnosis(factory: ConnectionFactory, error: BaseException) -> None:
    """Check that the error names the likely cause."""
    if factory.device == EMBEDDED:
        assert "broke: the peer " in str(error)
        assert ": its process" in str(error)
    told_once(error)


async def wait(conn: Connection) -> list[asyncio.Task[Any]]:
    waiting = [asyncio.create_task(conn.recv()) for _ in range(2)]
    await yield_loop(2)
    return waiting


async def send(conn: Connection) -> list[asyncio.Task[Any]]:
    """Start sends to a peer that receives nothing. Only those with credits complete."""
    sizes = (10, 10, 10, 10, 10, 500_000, 500_000)
    sends = [asyncio.create_task(conn.send(pattern(size))) for size in sizes]
    await asyncio.gather(*sends[: SMALL.data_receives])
    return sends


async def send_long(conn: Connection) -> list[asyncio.Task[Any]]:
    sends = [asyncio.create_task(conn.send(bytes(8 << 20))) for _ in range(8)]
    await sends[0]
    return sends


async def receive(conn: Connection) -> list[asyncio.Task[Any]]:
    async def receive_all() -> None:
        async for message in conn:
            message.release()

    for _ in range(4):
        (await conn.recv()).release()
    return [asyncio.create_task(receive_all())]


async def use_its_memory(conn: Connection) -> list[asyncio.Task[Any]]:
    remote = await conn.recv_region()
    memory = bytearray(1 << 20)
    work: list[asyncio.Task[Any]] = [
        asyncio.create_task(call)
        for call in (
            *(conn.write(memory, remote) for _ in range(100)),
            *(conn.read(remote, memory) for _ in range(100)),
            *(conn.fetch_and_add(remote[:8], 1) for _ in range(100)),
        )
    ]
    await work[0]
    return work


@pytest.mark.parametrize(
    ("role", "begin"),
    [
        ("echo", wait),
        ("deaf", send),
        ("echo", send_long),
        ("talk", receive),
        ("share", use_its_memory),
    ],
    ids=lambda it: getattr(it, "__name__", it),
)
async def test_killed_peer_breaks_the_connection_and_frees_memory(
    factory: ConnectionFactory,
    role: str,
    begin: Callable[[Connection], Awaitable[list[asyncio.Task[Any]]]],
) -> None:
    async with factory.witness() as witness:
        await at_rest(witness.client, witness.server)
        before = pool_statistics(witness.client)
        async with Child.connected(factory, role) as child:
            with child.conn.alloc(100) as buffer:
                share = await child.conn.send_region(buffer)
                work = await begin(child.conn)
                child.signal(signal.SIGKILL)
                await broken_soon(factory, child.conn, *work)
                assert share.revoked
        await witness.check()
        await at_rest(witness.client, witness.server)
        after = pool_statistics(witness.client)
        assert (after.leases, after.regions) == (before.leases, before.regions)


@one_loop
async def test_connect_raises_rdma_error_when_the_listener_is_killed(
    factory: ConnectionFactory,
) -> None:
    """The listener may be killed at any moment before it has answered."""
    async with factory.witness():
        for count in (0, 1, 2, 4, 8, 16):
            child = Child(factory, "echo")
            try:
                port = int(await child.line())
                connecting = asyncio.create_task(factory.connect(port))
                await yield_loop(count)
                child.signal(signal.SIGKILL)
                await asyncio.wait([connecting])
                error = connecting.exception()
                # The exception, if any, depends on when the process was killed.
                assert isinstance(error, RDMAError | None)
                if error is None:
                    await ends(connecting.result().recv(), ConnectionBrokenError)
                    await connecting.result().wait_closed()
            finally:
                child.end()


@one_loop
async def test_listener_survives_a_client_killed_during_the_handshake(
    factory: ConnectionFactory,
) -> None:
    """The client may be killed at any moment after the listener has heard from it."""
    async with factory.witness() as witness, await factory.listen() as listener:
        for count in (0, 1, 2, 4, 8, 16):
            child = Child(factory, "dial", str(listener.port))
            try:
                while not (listener._acceptor.handshakes or listener._ready):
                    await yield_loop(1)
                await yield_loop(count)
            finally:
                child.end()
            while listener._acceptor.handshakes:
                await yield_loop(1)
            if listener._ready:
                conn = await listener.accept()
                await ends(conn.recv(), ConnectionBrokenError)
                await conn.wait_closed()
            await witness.check()


@one_loop
async def test_connection_survives_a_stopped_and_resumed_peer(factory: ConnectionFactory) -> None:
    """A stopped peer is not dead, so waiting for it ends only at the caller's timeout."""
    async with factory.witness() as witness, Child.connected(factory, "echo") as child:
        conn = child.conn
        await conn.send(b"before")
        assert bytes(await conn.recv()) == b"before"
        child.signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await conn.request_region(8)
        await witness.check()
        child.signal(signal.SIGCONT)
        await conn.send(b"after")
        assert bytes(await conn.recv()) == b"after"
        await ends(conn.request_region(1 << 40), RequestRefusedError)
