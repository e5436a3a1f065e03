"""The client's end of one connection for one-sided operations: write, read, atomic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Protocol

import aiordma
from aiordma import Batch, Buffer, Message, RemoteRegion, Rights, Share
from aiordma.mr_pool import LocalMemory

from .client_ends import U32, Run, task_group, time_each, together
from .contents import SERVER, contents, difference


class Place(Protocol):
    """Memory of this side for one part."""

    @property
    def local(self) -> LocalMemory: ...
    def fill(self, data: bytes) -> None: ...
    def contents(self) -> bytes | memoryview: ...
    def release(self) -> None: ...


Take = Callable[[aiordma.Connection, int], Place]


class HostMemory:
    """A block of the connection's pool."""

    def __init__(self, conn: aiordma.Connection, size: int) -> None:
        self.local: Buffer = conn.alloc(size)

    def fill(self, data: bytes) -> None:
        self.local.view[:] = data

    def contents(self) -> memoryview:
        return self.local.view

    def release(self) -> None:
        self.local.release()


class OneSided(ABC):
    """The common part of the three.  All operations of a part use the same bytes."""

    def __init__(self, conn: aiordma.Connection, take: Take = HostMemory) -> None:
        self._conn = conn
        self._take = take
        self._place: Place | None = None
        self._remote: RemoteRegion | None = None

    def use(self, token: bytes) -> None:
        self._remote = self._conn.open_region(token)

    @property
    def remote(self) -> RemoteRegion:
        assert self._remote is not None
        return self._remote

    @property
    def place(self) -> Place:
        assert self._place is not None
        return self._place

    @abstractmethod
    def operate(self, run: Run) -> Awaitable[object]:
        """Start one operation."""

    @abstractmethod
    def collect(self, batch: Batch, count: int) -> None:
        """Add so many operations to a batch."""

    async def alone(self, run: Run) -> None:
        await time_each(lambda: self.operate(run), run)

    async def flood(self, run: Run) -> None:
        work = self._singly if run.batch == 1 else self._in_batches
        await together(work(run) for _ in range(run.depth // run.batch))

    async def _singly(self, run: Run) -> None:
        while run.started < run.limit:
            operation = self.operate(run)
            run.started += 1
            await operation
            run.done += 1

    async def _in_batches(self, run: Run) -> None:
        while run.started < run.limit:
            count = min(run.batch, run.limit - run.started)
            run.started += count
            async with self._conn.batch() as batch:
                self.collect(batch, count)
            run.done += count

    def verify(self, run: Run) -> str:
        return ""

    def release(self) -> None:
        self._remote = None
        if self._place is not None:
            self._place.release()
            self._place = None


class Writes(OneSided):
    """Writes; the peer answers with a write with immediate data to memory of this side."""

    def __init__(self, conn: aiordma.Connection, take: Take = HostMemory) -> None:
        super().__init__(conn, take)
        self._inbox: Buffer | None = None
        self._share: Share | None = None
        self._expected = b""
        self._mismatch = ""

    def prepare(self, seed: int, size: int) -> bytes:
        self._place = self._take(self._conn, size)
        self._place.fill(contents(seed, size))
        self._expected = contents(seed + SERVER, size)
        self._mismatch = ""
        self._inbox = self._conn.alloc(size)
        self._share = self._conn.share(self._inbox, access=Rights.WRITE, lease=None)
        return self._share.token.pack()

    def operate(self, run: Run) -> Awaitable[object]:
        imm = run.started & U32 if run.imm else None
        return self._conn.write(self.place.local, self.remote, imm=imm)

    def collect(self, batch: Batch, count: int) -> None:
        memory, remote = self.place.local, self.remote
        for _ in range(count):
            batch.write(memory, remote)

    async def alone(self, run: Run) -> None:
        conn, memory, remote = self._conn, self.place.local, self.remote
        if run.imm:
            await time_each(lambda: conn.write(memory, remote, imm=run.done & U32), run)
            return
        times = run.times  # a function for each would take as long as a hundredth of a write
        while run.done < run.limit:
            start = perf_counter()
            await conn.write(memory, remote)
            times.append(perf_counter() - start)
            run.done += 1

    async def ping(self, run: Run) -> None:
        conn, memory, remote = self._conn, self.place.local, self.remote

        async def there_and_back() -> None:
            await conn.write(memory, remote, imm=run.done & U32)
            self._check(run, await conn.recv())

        await time_each(there_and_back, run)

    async def both(self, run: Run) -> None:
        conn, memory, remote = self._conn, self.place.local, self.remote

        async with task_group() as group:

            def begin() -> None:
                group.create_task(conn.write(memory, remote, imm=run.started & U32))
                run.started += 1

            for _ in range(min(run.depth, run.limit)):
                begin()
            while run.done < run.started:
                self._check(run, await conn.recv())
                run.done += 1
                if run.started < run.limit:
                    begin()

    def _check(self, run: Run, message: Message) -> None:
        with message:
            if message.imm != run.done & U32:
                self._mismatch = f"answer {run.done} came with number {message.imm}"

    def verify(self, run: Run) -> str:
        # Without answers the server has written nothing.
        if self._mismatch or not run.answered or not run.done or self._inbox is None:
            return self._mismatch
        return difference(self._inbox.view, self._expected)

    def release(self) -> None:
        super().release()
        if self._share is not None:
            self._share.revoke()
            self._share = None
        if self._inbox is not None:
            self._inbox.release()
            self._inbox = None


class Reads(OneSided):
    def __init__(self, conn: aiordma.Connection, take: Take = HostMemory) -> None:
        super().__init__(conn, take)
        self._expected = b""

    def prepare(self, seed: int, size: int) -> bytes:
        self._place = self._take(self._conn, size)
        self._place.fill(bytes(size))
        self._expected = contents(seed + SERVER, size)
        return b""

    def operate(self, run: Run) -> Awaitable[object]:
        return self._conn.read(self.remote, self.place.local)

    def collect(self, batch: Batch, count: int) -> None:
        memory, remote = self.place.local, self.remote
        for _ in range(count):
            batch.read(remote, memory)

    def verify(self, run: Run) -> str:
        return difference(self.place.contents(), self._expected) if run.done else ""


class Atomics(OneSided):
    """Each operation adds one; the server compares the sum with the number of operations."""

    def prepare(self, seed: int, size: int) -> bytes:
        return b""

    def operate(self, run: Run) -> Awaitable[object]:
        return self._conn.fetch_and_add(self.remote, 1)

    def collect(self, batch: Batch, count: int) -> None:
        for _ in range(count):
            batch.fetch_and_add(self.remote, 1)
