"""Create the tests' connections, on one device and address and with one connection method.

`ConnectionFactory.pair` yields two connections of this process that are connected to each other.
`witness` yields another pair, and checks that the failures in a test do not affect it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from aiordma import Buffer, Config, Connection, Listener, RegionToken, RemoteRegion, Rights, Share
from aiordma._core.handshake_layout import Hello
from aiordma.config import Encrypt
from aiordma.errors import QuotaError
from aiordma.mr_pool import LocalMemory, PoolStatistics
from aiordma.transport import Via, connect, listen

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

ALL = Rights.READ | Rights.WRITE | Rights.ATOMIC

# A time limit in seconds that no test reaches. Tests of time limits call `limits_pass` instead.
NEVER = 1e6

# No call times out, so no result depends on whether a busy machine meets a time limit.
UNTIMED = Config(connect_timeout=NEVER, handshake_timeout=NEVER, close_timeout=NEVER, lease=None)

# Small limits save resources and are reached quickly. The time limits remain disabled.
SMALL = replace(
    UNTIMED,
    eager_size=1024,
    max_eager_size=1024,
    data_receives=4,
    control_receives=4,
    send_queue=16,
    fetch_ahead=64 << 10,
    lend_quota=1 << 20,
    max_regions=8,
)

KEY = b"sixteen or more random bytes"

BUSY = 30
"""The permitted slowdown on a busy machine."""

ALONE = 600
"""The size of a message that leaves no room for another one in a frame of SMALL."""


def pattern(size: int, seed: int = 0) -> bytes:
    """Return bytes that depend on the seed and size, so that misplaced data is detected."""
    return hashlib.shake_128(b"%d %d" % (seed, size)).digest(size)


async def yield_loop(count: int) -> None:
    """Run `count` iterations of the loop without waiting for anything."""
    for _ in range(count):
        await asyncio.sleep(0)


async def lease_over(share: Share) -> None:
    """Wait in real time until a share's lease has ended and the loop has noticed it."""
    while not share._ended:  # noqa: ASYNC110 - a lease has no event, on purpose
        await asyncio.sleep(0.001)


def no_more_threads(_: object) -> None:
    """Replace `threading.Thread.start` in a process that has reached its thread limit."""
    raise RuntimeError("can't start new thread")


def limits_pass() -> None:
    """Fire the timers of all time limits of SMALL. This works only on asyncio's own loop.

    A test of a time limit first waits for its precondition, however long that takes, and then calls
    this function instead of waiting for the limit.
    """
    loop = asyncio.get_running_loop()
    far = loop.time() + NEVER / 10  # the limit of silent sockets is NEVER / 5
    for timer in list(loop._scheduled):  # type: ignore[attr-defined]
        if timer.when() > far and not timer.cancelled():
            timer._run()
            timer.cancel()


async def when_limits_pass(awaitable: Awaitable[T]) -> T:
    """Await an operation, and fire every time limit as soon as it starts."""
    task = asyncio.ensure_future(awaitable)
    while not task.done():
        limits_pass()
        await yield_loop(1)
    return await task


@dataclass(frozen=True)
class ConnectionFactory:
    """A factory for connections. `slow` scales time limits, and is 1 for embedded devices."""

    device: str
    host: str
    via: Via
    slow: float
    auth: bytes | None = None
    encrypt: Encrypt = False
    listens_on: str = ""

    @property
    def there(self) -> dict[str, Any]:
        """The options of `listen` and similar functions, except for the configuration."""
        return {**self.where, "device": self.listens_on or self.device}

    @property
    def where(self) -> dict[str, Any]:
        """The options of `connect`. They also suit `listen` if both ends use the same device."""
        where: dict[str, Any] = {"device": self.device, "via": self.via}
        if self.auth is not None:
            where.update(auth=self.auth, encrypt=self.encrypt)
        return where

    async def listen(self, config: Config = SMALL, *, host: str | None = None) -> Listener:
        where = self.host if host is None else host
        return await listen(where, 0, config=config, **self.there)

    async def connect(self, port: int, config: Config = SMALL) -> Connection:
        return await connect(self.host, port, config=config, **self.where)

    @property
    def loses_work(self) -> bool:
        """Whether a connection may lose operations and still continue."""
        return False

    @property
    def cancel_points(self) -> list[int]:
        """Numbers of loop iterations after which tests cancel an operation."""
        return [0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 40] if self.slow == 1 else [0, 1, 3, 8, 20]

    def within(self, seconds: float) -> asyncio.Timeout:
        """Return a timeout of `BUSY * seconds`, or longer on a slow device."""
        return asyncio.timeout(seconds * self.slow * BUSY)

    async def rest(self, *conns: Connection) -> None:
        """Let both sides become idle. Subclasses may also check their state."""
        await yield_loop(1)

    async def both(
        self, listener: Listener, config: Config = SMALL
    ) -> tuple[Connection, Connection]:
        """Connect to a listener of this process. Return the client and the server.

        Connections that the listener accepted earlier and whose peers are gone are closed.
        """
        client = await self.connect(listener.port, config)
        while (server := await listener.accept()).peer_address != client.local_address:
            await server.close()
        return client, server

    async def works(self, listener: Listener, config: Config = SMALL) -> None:
        """Check that a new connection to a listener of this process can be established and used."""
        client, server = await self.both(listener, config)
        async with client, server:
            await check_alive(client, server)

    @asynccontextmanager
    async def sharing(
        self, size: int, access: Rights = ALL, *, config: Config = SMALL
    ) -> AsyncIterator[tuple[Connection, Connection, Buffer, RemoteRegion]]:
        """Provide a pair, and memory of the server as a buffer and as a remote region."""
        async with (
            self.pair(config) as (client, server),
            shared(server, client, size, access) as (there, remote),
        ):
            yield client, server, there, remote

    @asynccontextmanager
    async def pair(
        self, config: Config = SMALL, *, server: Config | None = None
    ) -> AsyncIterator[tuple[Connection, Connection]]:
        """Provide both ends of a new connection: the client and the server."""
        async with await self.listen(server or config) as listener:
            ends = await self.both(listener, config)
        async with ends[0], ends[1]:
            yield ends

    @asynccontextmanager
    async def witness(self) -> AsyncIterator[Witness]:
        """Provide a second pair, and check that the test does not affect it."""
        async with self.pair() as (client, server):
            witness = Witness(self, client, server)
            await witness.check()
            yield witness
            await witness.check()


class Witness:
    """A pair of connections that the test must not affect."""

    def __init__(self, factory: ConnectionFactory, client: Connection, server: Connection) -> None:
        self._factory = factory
        self.client = client
        self.server = server
        self._checks = 0

    async def check(self) -> None:
        """Check that short and long messages still arrive in both directions."""
        self._checks += 1
        await check_alive(self.client, self.server, seed=self._checks)


async def check_alive(client: Connection, server: Connection, seed: int = 0) -> None:
    """Check that a short and a long message arrive in each direction."""
    for sender, receiver in ((client, server), (server, client)):
        for size in (100, 5000):
            await exchange(sender, receiver, pattern(size, seed))


async def echo(conn: Connection) -> None:
    """Send every message back."""
    async for message in conn:
        with message:
            await conn.send(message)


async def exchange(sender: Connection, receiver: Connection, data: bytes) -> None:
    """Send a message, and check the received data."""
    receiving = asyncio.create_task(receiver.recv())
    try:
        await sender.send(data)
        with await receiving as message:
            assert message == data
    finally:
        receiving.cancel()


async def barrier(conn: Connection) -> None:
    """Wait until the peer has processed all frames sent to it so far.

    Frames stay in order, so the response to a request follows everything sent before it.
    """
    region = await conn.request_region(8)
    await region.release()


async def at_rest(*conns: Connection) -> None:
    """Wait until no work is outstanding, because frames in flight hold pool blocks."""
    while any(conn._queue.outstanding for conn in conns):
        await yield_loop(1)


async def give(
    owner: Connection,
    user: Connection,
    memory: LocalMemory,
    access: Rights = ALL,
    lease: float | None = None,
) -> tuple[Share, RemoteRegion]:
    """Share the owner's memory with the user."""
    share = await owner.send_region(memory, access=access, lease=lease)
    remote = await user.recv_region()
    return share, remote


def forged(conn: Connection, token: RegionToken) -> RemoteRegion:
    """Open a region without checking its token, so that only the peer's device can reject it."""
    return conn._sharing.remote_regions.track(
        RemoteRegion(conn._sharing, token, lent=False), granted=False
    )


async def write_as_it_ends(conn: Connection, region: RemoteRegion, data: bytes) -> None:
    """Queue a write in a batch, and reclaim the region before the batch is posted."""
    async with conn.batch() as batch:
        batch.write(data, region[: len(data)])
        region._on_revoked()


@asynccontextmanager
async def shared(
    owner: Connection, user: Connection, size: int, access: Rights = ALL, lease: float | None = None
) -> AsyncIterator[tuple[Buffer, RemoteRegion]]:
    """Provide zeroed pool memory of `owner` and the `user`'s view of it."""
    with owner.alloc(size) as buffer:
        buffer.view[:] = bytes(size)
        share, remote = await give(owner, user, buffer, access, lease)
        with share:
            yield buffer, remote


@contextmanager
def closed_port(host: str) -> Iterator[int]:
    """Provide a port without a listener. Only this process can listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]


def pool_statistics(conn: Connection) -> PoolStatistics:
    """Return the statistics of the pool that serves the connection's loop and device."""
    return conn._endpoint.driver.pool.statistics()


def take_all(conn: Connection) -> list[Buffer]:
    """Allocate all remaining pool memory."""
    held = []
    for size in (1 << 20, 1 << 16, 1 << 12, 256):
        with suppress(QuotaError):
            while True:
                held.append(conn.alloc(size))
    return held


async def leases(*conns: Connection) -> int:
    """Return the number of leased blocks in the shared pool, once no frames are in flight."""
    await at_rest(*conns)
    return pool_statistics(conns[0]).leases


def hello(config: Config = SMALL) -> Hello:
    """Return the hello that a peer with this configuration sends in the handshake."""
    return Hello(
        eager_size=config.eager_size,
        data_receives=config.data_receives,
        control_receives=config.control_receives,
        max_message=config.max_message,
        lend_quota=config.lend_quota,
        max_rd_atomic=4,
        max_dest_rd_atomic=4,
    )


async def ends(awaitable: Awaitable[object], *kinds: type[E]) -> E:
    """Await an operation that must raise one of `kinds`, and return the exception."""
    try:
        result = await awaitable
    except kinds as error:
        return error
    raise AssertionError(f"it returned {result!r}")


def told_once(error: BaseException) -> None:
    """Check that no sentence occurs twice in the messages of an error and its causes."""
    sentences: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        sentences += re.split("[:;] ", str(cause))
        cause = cause.__cause__
    assert len(set(sentences)) == len(sentences), sentences


async def cancelled_after(count: int, make: Callable[[], Coroutine[Any, Any, T]]) -> list[T]:
    """Cancel a coroutine after `count` loop iterations.

    If the coroutine finished earlier, return a list that contains its result. Otherwise, return an
    empty list. All exceptions except for CancelledError propagate.
    """
    task = asyncio.create_task(make())
    await yield_loop(count)
    task.cancel()
    try:
        return [await task]
    except asyncio.CancelledError:
        return []
