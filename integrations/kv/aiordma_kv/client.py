"""The client for asyncio. A lost, slow or full server never raises an exception.

Its blocks count as misses until the client has reconnected in the background.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from hashlib import blake2b
from typing import Any, Self, TypeVar

import aiordma
from aiordma import rpc
from aiordma.reconnecting import is_temporary

from .arena import LOCK_SECONDS
from .common import (
    MAX_KEYS,
    MAX_SIZE,
    RegisteredMemory,
    check_keys,
    make_config,
    max_calls,
    parse_address,
)
from .session import Lock, ServerSession

T = TypeVar("T")
Memory = Any
"""An object that supports the buffer protocol."""

HOLD_SECONDS = LOCK_SECONDS - 5
"""Seconds after which the client releases a lock.

Shorter than LOCK_SECONDS, so that the server does not end the connection.
"""

# The time between two attempts to reconnect, in seconds. It doubles after each failure.
FIRST_DELAY = 0.1
MAX_DELAY = 1.0

logger = logging.getLogger("aiordma_kv.client")


def _check_blocks(
    keys: Sequence[bytes], memory: Sequence[Memory], *, target: bool
) -> list[tuple[bytes, memoryview]]:
    if len(keys) != len(memory):
        raise ValueError(f"got {len(keys)} keys but {len(memory)} buffers")
    views = [_check_memory(each, target=target) for each in memory]
    return list(zip(check_keys(keys), views, strict=True))


def _check_memory(memory: Memory, *, target: bool) -> memoryview:
    view = memoryview(memory).cast("B")
    if not view or (target and view.readonly):
        raise ValueError("invalid buffer: it is empty, or a read-only target")
    return view


class Client:
    """A client for asyncio. Keys are distributed over the servers by rendezvous hashing.

    If a server is lost, its keys move to the other servers. Methods return a result for each key.
    They raise an exception only for invalid arguments, and outside of `async with`.

    If you cancel a call, it still waits until nothing accesses the given buffers any more.

    Args:
        servers: The servers, each as "HOST:PORT". Use the same text in all clients, because keys
            are distributed by it.
        memory: Writable memory to register once, such as the engine's arena. Blocks in it are
            transferred without a copy. Other buffers can be used too.
        auth: The pre-shared key of the servers.
        encrypt: Whether to encrypt the data. The servers must use the same setting.
        device: The name of the RDMA device, as for `aiordma.connect`.
        timeout: The time after which a server counts as lost, in seconds. It applies to each call
            and to each part of a transfer, but not to waiting for other transfers of this client.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        memory: Memory = None,
        auth: bytes | None = None,
        encrypt: bool = False,
        device: str | None = None,
        timeout: float = 5.0,
    ) -> None:
        if isinstance(servers, str):
            raise TypeError("servers must be a list of HOST:PORT, not a string")
        self._addresses = {name: parse_address(name) for name in servers}
        if not self._addresses:
            raise ValueError("no servers given")
        if len(set(self._addresses.values())) < len(servers):
            raise ValueError(f"duplicate server in {servers}")
        if not 0 < timeout < math.inf:
            raise ValueError(f"invalid timeout {timeout}: expected a finite number of seconds")
        if memory is not None:
            _check_memory(memory, target=True)
        self._memory = None if memory is None else RegisteredMemory(memory)
        self._timeout = timeout
        config = make_config(encrypt, send_queue=512, connect_timeout=timeout)
        self._options: dict[str, Any] = {
            "auth": auth, "encrypt": encrypt, "device": device, "config": config
        }  # fmt: skip
        self._sessions: dict[str, ServerSession] = {}
        self._locks: dict[bytes, list[Lock]] = {}  # the earliest lock of each key first
        self._expiry: asyncio.TimerHandle | None = None
        self._operations: set[asyncio.Future[Any]] = set()
        self._connect_tasks: list[asyncio.Task[None]] = []  # while the client is in use

    @property
    def connected(self) -> dict[str, bool]:
        """Whether each server is connected now."""
        return {name: name in self._sessions for name in self._addresses}

    async def __aenter__(self) -> Self:
        """Connect to the servers. A server that is lost is tried again in the background.

        Raises:
            AuthenticationError: A server has a different key or setting of `encrypt`.
            Exception: Any other error of the first attempt that trying again does not fix.
        """
        loop = asyncio.get_running_loop()
        attempts = {name: loop.create_future() for name in self._addresses}
        self._connect_tasks = [loop.create_task(self._connect(*it)) for it in attempts.items()]
        try:
            done, _ = await asyncio.wait(attempts.values(), timeout=self._timeout)
            for error in [attempt.result() for attempt in done]:
                if error is not None:
                    raise error
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections, which releases all locks."""
        for task in self._connect_tasks:
            task.cancel()
        await asyncio.gather(*self._connect_tasks, return_exceptions=True)
        while self._operations:
            await asyncio.wait(self._operations)
        self._connect_tasks.clear()
        if self._expiry is not None:
            self._expiry.cancel()
        if self._memory is not None:
            self._memory.close()

    async def put(self, keys: Sequence[bytes], sources: Sequence[Memory]) -> list[bool]:
        """Store blocks. If a key occurs several times, the first block is stored.

        Returns:
            Whether each block is stored, possibly by another client. False also while another
            client is writing this key.
        """
        blocks: dict[bytes, memoryview] = {}
        for key, view in _check_blocks(keys, sources, target=False):
            blocks.setdefault(key, view)
        work = [self._route(key, (key, view)) for key, view in blocks.items()]
        stored = await self._run(work, ServerSession.put, _max_length(blocks.values()))
        results = dict(zip(blocks, stored, strict=True))
        return [results[key] for key in keys]

    async def locate(self, keys: Sequence[bytes]) -> list[bool]:
        """Find blocks and lock them, so that `get` can read them.

        Every success needs an `unlock`. A lock ends after HOLD_SECONDS, and `get` then misses.
        """
        locked_keys: list[bytes] = []

        async def locate(session: ServerSession, keys: list[bytes]) -> list[bool]:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + HOLD_SECONDS
            places = await session.calls.call("locate", keys)
            for key, place in zip(keys, places, strict=True):
                if place is not None:
                    offset, size, generation = place
                    lock = Lock(session, offset, size, generation, deadline)
                    self._locks.setdefault(key, []).append(lock)
                    locked_keys.append(key)
            if self._expiry is None:
                self._expiry = loop.call_at(deadline, self._unlock_expired)
            return [place is not None for place in places]

        try:
            return await self._run([self._route(key, key) for key in check_keys(keys)], locate)
        except asyncio.CancelledError:
            if self._connect_tasks:
                self._track(asyncio.create_task(self.unlock(locked_keys)))
            raise

    async def get(self, keys: Sequence[bytes], targets: Sequence[Memory]) -> list[bool]:
        """Read located blocks. A target must have exactly the size of its block.

        Returns:
            Whether each target now contains its block. If not, its contents are undefined.
        """
        blocks = _check_blocks(keys, targets, target=True)
        work = [
            (lock.session, (key, lock, view)) if (lock := self._find_lock(key, len(view))) else None
            for key, view in blocks
        ]
        return await self._run(work, ServerSession.get, _max_length(view for _, view in blocks))

    async def unlock(self, keys: Sequence[bytes]) -> list[bool]:
        """Release one lock of each key. Returns whether there was a lock."""
        work = [
            (lock.session, lock.generation) if (lock := self._pop_lock(key)) else None
            for key in check_keys(keys)
        ]
        return await self._run(
            work, lambda session, generations: session.calls.call("unlock", generations)
        )

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove blocks from all connected servers. Returns whether each key was stored."""
        keys = check_keys(keys)
        work = [(session, key) for session in self._sessions.values() for key in keys]
        found = await self._run(work, lambda session, keys: session.calls.call("delete", keys))
        return [any(found[i :: len(keys)]) for i in range(len(keys))]

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether each key is stored, without locking it."""
        work = [self._route(key, key) for key in check_keys(keys)]
        return await self._run(work, lambda session, keys: session.calls.call("contains", keys))

    async def stats(self) -> dict[str, dict[str, Any] | None]:
        """Return the counters of each server, or None for a server that is lost."""
        found: dict[str, dict[str, Any] | None] = dict.fromkeys(self._addresses)

        async def stats(session: ServerSession, _: list[None]) -> list[bool]:
            reply = dict(await session.calls.call("stats"))
            if type(reply["size"]) is not int or not 0 <= reply["size"] <= MAX_SIZE:
                raise ValueError(f"invalid size {reply['size']!r}")
            found[session.server] = reply
            return [True]

        await self._run([(session, None) for session in self._sessions.values()], stats)
        return found

    def _route(self, key: bytes, item: T) -> tuple[ServerSession, T] | None:
        """Return an item and the session with the server that stores this key, if connected."""
        sessions = self._sessions.values()
        if len(sessions) > 1:  # the hash takes time
            return max(sessions, key=lambda session: _weight(session.server, key)), item
        return next(((session, item) for session in sessions), None)

    def _find_lock(self, key: bytes, size: int) -> Lock | None:
        """Return the latest lock of a key if the block has this size."""
        locks = self._locks.get(key)
        return locks[-1] if locks and locks[-1].size == size else None

    def _pop_lock(self, key: bytes) -> Lock | None:
        """Remove and return the earliest lock of a key."""
        locks = self._locks.get(key, [])
        lock = locks.pop(0) if locks else None
        if not locks:
            self._locks.pop(key, None)
        return lock

    async def _run(
        self,
        work: Sequence[tuple[ServerSession, T] | None],
        operate: Callable[[ServerSession, list[T]], Awaitable[list[bool]]],
        max_length: int | None = None,
    ) -> list[bool]:
        """Call `operate` with each session and parts of its items. Items that are None are misses.

        `max_length` is the length of the longest block to transfer. None means that only keys are
        sent.

        Returns whether the result of each item is True. If a session fails or takes too long, its
        connection is closed, and its items are misses. When this returns or raises an exception,
        nothing accesses the memory of the items.
        """
        if not self._connect_tasks:
            raise RuntimeError("the client is not open: use it in `async with`")
        results = [False] * len(work)
        groups: dict[ServerSession, list[tuple[int, T]]] = {}
        for i, pair in enumerate(work):
            if pair is not None:
                groups.setdefault(pair[0], []).append((i, pair[1]))

        async def run(session: ServerSession, group: list[tuple[int, T]]) -> None:
            batch_size = MAX_KEYS if max_length is None else session.batch_size(max_length)
            slot = nullcontext() if max_length is None else session.slots
            try:
                for start in range(0, len(group), batch_size):
                    batch = group[start : start + batch_size]
                    async with slot, asyncio.timeout(self._timeout):
                        found = await operate(session, [item for _, item in batch])
                    for (i, _), result in list(zip(batch, found, strict=True)):
                        results[i] = result is True
            except Exception as error:  # including invalid replies
                if not session.has_failed:
                    session.has_failed = True
                    text = str(error) or type(error).__name__
                    logger.warning("closing the connection to %s: %s", session.server, text)
                self._forget(session)
                session.conn.abort()
                await session.conn.wait_closed()

        running = {self._track(asyncio.create_task(run(*group))) for group in groups.items()}
        cancelled = None
        while running:
            try:
                _, running = await asyncio.wait(running)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return results

    def _track(self, operation: asyncio.Future[T]) -> asyncio.Future[T]:
        """Make `__aexit__` wait for an operation."""
        self._operations.add(operation)
        operation.add_done_callback(self._operations.discard)
        return operation

    def _unlock_expired(self) -> None:
        """Release the locks that have expired, and call this again when the next one expires."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        deadlines = [(lock.deadline, key) for key, locks in self._locks.items() for lock in locks]
        expired = [key for deadline, key in deadlines if deadline <= now]
        self._track(loop.create_task(self.unlock(expired)))
        later = [deadline for deadline, _ in deadlines if deadline > now]
        self._expiry = loop.call_at(min(later), self._unlock_expired) if later else None

    async def _connect(self, name: str, attempt: asyncio.Future[Exception | None]) -> None:
        """Connect to a server, and again whenever the connection ends.

        The result of `attempt` is the error of the first attempt if trying again cannot fix it.
        """
        delay: float = FIRST_DELAY
        warned: type[Exception] | None = None
        while True:
            try:
                conn = await aiordma.connect(*self._addresses[name], **self._options)
                limit = max_calls(self._options["encrypt"])
                async with rpc.Client(conn, max_calls=limit) as calls:
                    token = await calls.call("open", timeout=self._timeout)
                    arena = None if token is None else conn.open_region(token)
                    memory = None
                    if arena is not None and self._memory is not None:
                        memory = self._memory.region(conn)
                    session = ServerSession(name, conn, calls, arena, memory)
                    self._sessions[name] = session
                    if warned is not None:
                        logger.warning("connected to %s", name)
                    delay, warned = FIRST_DELAY, None
                    _settle(attempt, None)
                    try:
                        await conn.wait_closed()
                    finally:
                        self._forget(session)
            except Exception as error:  # including invalid replies
                is_permanent = not is_temporary(error)
                if is_permanent and not attempt.done():
                    error.add_note(f"cannot connect to {name}")  # `__aenter__` raises it
                else:
                    # Warn once about each kind of error, because there can be an attempt a second.
                    level = logging.INFO if warned is type(error) else logging.WARNING
                    logger.log(level, "cannot connect to %s: %s", name, error)
                    warned = type(error)
                _settle(attempt, error if is_permanent else None)
            await asyncio.sleep(delay * random.uniform(0.5, 1))
            delay = min(2 * delay, MAX_DELAY)

    def _forget(self, session: ServerSession) -> None:
        """Stop using a session, and drop its locks, which the server releases."""
        if self._sessions.get(session.server) is session:
            del self._sessions[session.server]
        for key, locks in list(self._locks.items()):
            locks[:] = [lock for lock in locks if lock.session is not session]
            if not locks:
                del self._locks[key]


def _max_length(views: Iterable[memoryview]) -> int:
    return max(map(len, views), default=1)


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _weight(server: str, key: bytes) -> bytes:
    """Return the rank of a server for a key. The server with the highest rank stores the key."""
    return blake2b(server.encode() + key, digest_size=8).digest()
