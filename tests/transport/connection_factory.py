"""Makes the tests' connections, on one device and address and with one connection method.

`ConnectionFactory.pair` is two connections of this process with each other; `witness` such a pair
that is expected to go on undisturbed while something bad happens beside it.
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
from aiordma._core.handshake import Hello
from aiordma.config import Encrypt
from aiordma.errors import QuotaError
from aiordma.mr_pool import LocalMemory, PoolStatistics
from aiordma.transport import Via, connect, listen

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

ALL = Rights.READ | Rights.WRITE | Rights.ATOMIC

# Seconds: more than any test waits for anything, on the slowest machine (see `limits_pass`).
NEVER = 1e6

# No call ends because of its time: no verdict depends on whether a busy machine keeps a limit, and
# none is that one has passed.
UNTIMED = Config(connect_timeout=NEVER, handshake_timeout=NEVER, close_timeout=NEVER, lease=None)

# A connection that costs little, and whose every limit is soon reached, but for those of time.
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
"""How many times longer anything may take on a machine that has other things to do."""

ALONE = 600
"""The bytes of a message that leaves no room for another in a frame of SMALL."""


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes that are found in no other place: a wrong offset, length or message shows."""
    return hashlib.shake_128(b"%d %d" % (seed, size)).digest(size)


async def yield_loop(count: int) -> None:
    """Lets the loop run `count` turns; waits for nothing."""
    for _ in range(count):
        await asyncio.sleep(0)


async def lease_over(share: Share) -> None:
    """Until the lease of a share has ended, and the loop knows: this is about time itself."""
    while not share._ended:  # noqa: ASYNC110 - a lease has no event, on purpose
        await asyncio.sleep(0.001)


def no_more_threads(_: object) -> None:
    """In place of `threading.Thread.start`: the process has as many as it can."""
    raise RuntimeError("can't start new thread")


def limits_pass() -> None:
    """Whatever has a time limit of SMALL is too late now: for tests on asyncio's own loop.

    So a test of a limit waits for what it is about, however long that takes, and then for nothing.
    """
    loop = asyncio.get_running_loop()
    far = loop.time() + NEVER / 10  # silent sockets have a fifth
    for timer in list(loop._scheduled):  # type: ignore[attr-defined]
        if timer.when() > far and not timer.cancelled():
            timer._run()
            timer.cancel()


async def when_limits_pass(awaitable: Awaitable[T]) -> T:
    """What ends because of a time limit, or of its own accord, whenever that limit begins."""
    task = asyncio.ensure_future(awaitable)
    while not task.done():
        limits_pass()
        await yield_loop(1)
    return await task


@dataclass(frozen=True)
class ConnectionFactory:
    """`slow` is how many times slower than the embedded device all of it may be."""

    device: str
    host: str
    via: Via
    slow: float
    auth: bytes | None = None
    encrypt: Encrypt = False
    listens_on: str = ""

    @property
    def there(self) -> dict[str, Any]:
        """The options of `listen` and its like, but for the configuration."""
        return {**self.where, "device": self.listens_on or self.device}

    @property
    def where(self) -> dict[str, Any]:
        """Those of `connect`; also of `listen` in tests whose two ends are on one device."""
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
        """Whether a connection goes on without having done what was asked for."""
        return False

    @property
    def cancel_points(self) -> list[int]:
        """Iterations of the loop before a cancellation: from "not even begun" to "long done"."""
        return [0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 40] if self.slow == 1 else [0, 1, 3, 8, 20]

    def within(self, seconds: float) -> asyncio.Timeout:
        """TimeoutError after `BUSY` times this long, on a device that is not slow."""
        return asyncio.timeout(seconds * self.slow * BUSY)

    async def rest(self, *conns: Connection) -> None:
        """Lets both sides of a pair come to rest, and looks whether they are, where that can be
        known."""
        await yield_loop(1)

    async def both(
        self, listener: Listener, config: Config = SMALL
    ) -> tuple[Connection, Connection]:
        """A new connection with a listener of this process: client and server.

        Others that the listener has accepted before, whose peers are gone, are closed.
        """
        client = await self.connect(listener.port, config)
        while (server := await listener.accept()).peer_address != client.local_address:
            await server.close()
        return client, server

    async def works(self, listener: Listener, config: Config = SMALL) -> None:
        """A new connection with a listener of this process comes about, and is good."""
        client, server = await self.both(listener, config)
        async with client, server:
            await check_alive(client, server)

    @asynccontextmanager
    async def sharing(
        self, size: int, access: Rights = ALL, *, config: Config = SMALL
    ) -> AsyncIterator[tuple[Connection, Connection, Buffer, RemoteRegion]]:
        """A pair, and memory of the server as it and the client see it."""
        async with (
            self.pair(config) as (client, server),
            shared(server, client, size, access) as (there, remote),
        ):
            yield client, server, there, remote

    @asynccontextmanager
    async def pair(
        self, config: Config = SMALL, *, server: Config | None = None
    ) -> AsyncIterator[tuple[Connection, Connection]]:
        """Two connections with each other: client and server."""
        async with await self.listen(server or config) as listener:
            ends = await self.both(listener, config)
        async with ends[0], ends[1]:
            yield ends

    @asynccontextmanager
    async def witness(self) -> AsyncIterator[Witness]:
        """A pair beside the one that is tested, which must not notice anything."""
        async with self.pair() as (client, server):
            witness = Witness(self, client, server)
            await witness.check()
            yield witness
            await witness.check()


class Witness:
    """Two connections that nothing happens to."""

    def __init__(self, factory: ConnectionFactory, client: Connection, server: Connection) -> None:
        self._factory = factory
        self.client = client
        self.server = server
        self._checks = 0

    async def check(self) -> None:
        """Messages of both kinds still arrive in both directions."""
        self._checks += 1
        await check_alive(self.client, self.server, seed=self._checks)


async def check_alive(client: Connection, server: Connection, seed: int = 0) -> None:
    """A short and a long message in each direction."""
    for sender, receiver in ((client, server), (server, client)):
        for size in (100, 5000):
            await exchange(sender, receiver, pattern(size, seed))


async def echo(conn: Connection) -> None:
    """A handler that sends everything back."""
    async for message in conn:
        with message:
            await conn.send(message)


async def exchange(sender: Connection, receiver: Connection, data: bytes) -> None:
    """One message there, and checked."""
    receiving = asyncio.create_task(receiver.recv())
    try:
        await sender.send(data)
        with await receiving as message:
            assert message == data
    finally:
        receiving.cancel()


async def barrier(conn: Connection) -> None:
    """Until the peer has dealt with all that this side has told it so far.

    Frames keep their order, so the answer to a request comes after what was said before it.
    """
    region = await conn.request_region(8)
    await region.release()


async def at_rest(*conns: Connection) -> None:
    """Until nothing of theirs is under way: each frame holds a block for as long as it is."""
    while any(conn._queue.outstanding for conn in conns):
        await yield_loop(1)


async def give(
    owner: Connection,
    user: Connection,
    memory: LocalMemory,
    access: Rights = ALL,
    lease: float | None = None,
) -> tuple[Share, RemoteRegion]:
    """Shares memory of one side with the other."""
    share = await owner.send_region(memory, access=access, lease=lease)
    remote = await user.recv_region()
    return share, remote


def forged(conn: Connection, token: RegionToken) -> RemoteRegion:
    """A region by a token that `open_region` would refuse: the peer's device has to."""
    return conn._sharing.regions.use(RemoteRegion(conn._sharing, token, lent=False), granted=False)


async def write_as_it_ends(conn: Connection, region: RemoteRegion, data: bytes) -> None:
    """In a batch, to a region whose owner takes it back meanwhile."""
    async with conn.batch() as batch:
        batch.write(data, region[: len(data)])
        region._on_revoked()


@asynccontextmanager
async def shared(
    owner: Connection, user: Connection, size: int, access: Rights = ALL, lease: float | None = None
) -> AsyncIterator[tuple[Buffer, RemoteRegion]]:
    """Pool memory of `owner`, zeroed, as `user` sees it."""
    with owner.alloc(size) as buffer:
        buffer.view[:] = bytes(size)
        share, remote = await give(owner, user, buffer, access, lease)
        with share:
            yield buffer, remote


@contextmanager
def closed_port(host: str) -> Iterator[int]:
    """A port without a listener. No other process gets it; this one may listen there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]


def pool_statistics(conn: Connection) -> PoolStatistics:
    """Of the pool that all connections of this loop and device share."""
    return conn._endpoint.driver.pool.statistics()


def take_all(conn: Connection) -> list[Buffer]:
    """All that is left of the pool."""
    held = []
    for size in (1 << 20, 1 << 16, 1 << 12, 256):
        with suppress(QuotaError):
            while True:
                held.append(conn.alloc(size))
    return held


async def leases(*conns: Connection) -> int:
    """Leased blocks of the pool that they share, but for the frames under way."""
    await at_rest(*conns)
    return pool_statistics(conns[0]).leases


def hello(config: Config = SMALL) -> Hello:
    """What a peer with this configuration says in the handshake."""
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
    """What an await ends with; an assertion fails unless it is one of `kinds`."""
    try:
        result = await awaitable
    except kinds as error:
        return error
    raise AssertionError(f"it returned {result!r}")


def told_once(error: BaseException) -> None:
    """A traceback of it has no sentence twice."""
    sentences: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        sentences += re.split("[:;] ", str(cause))
        cause = cause.__cause__
    assert len(set(sentences)) == len(sentences), sentences


async def cancelled_after(count: int, make: Callable[[], Coroutine[Any, Any, T]]) -> list[T]:
    """Starts it, cancels it after `count` iterations of the loop; its result, if it was quicker.

    Any other end than a result or the cancellation is raised.
    """
    task = asyncio.create_task(make())
    await yield_loop(count)
    task.cancel()
    try:
        return [await task]
    except asyncio.CancelledError:
        return []
