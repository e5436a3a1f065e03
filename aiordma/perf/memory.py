"""The ends of measured connections for one-sided operations: write, read and atomic.

For writes, both ends run the same code. For reads and atomics, the client performs the operations
on the server's memory. All operations in a part access the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Protocol

import aiordma
from aiordma import Batch, Buffer, Message, RemoteRegion, Rights
from aiordma.mr_pool import LocalMemory

from .contents import difference
from .ends import U32, End, Load, Run, imm_mismatch, run_concurrently


class Place(Protocol):
    """Local memory that operations use during a part."""

    @property
    def local(self) -> LocalMemory: ...
    def fill(self, data: bytes) -> None: ...
    def contents(self) -> bytes | memoryview: ...
    def release(self) -> None: ...


Allocate = Callable[[aiordma.Connection, int], Place]


class HostMemory:
    """Host memory, as opposed to GPU memory. It is leased from the connection's memory pool."""

    def __init__(self, conn: aiordma.Connection, size: int) -> None:
        self.local: Buffer = conn.alloc(size)

    def fill(self, data: bytes) -> None:
        self.local.view[:] = data

    def contents(self) -> memoryview:
        return self.local.view

    def release(self) -> None:
        self.local.release()


class Memory(End):
    """An end that uses memory on this side and on the peer."""

    remote: RemoteRegion

    def __init__(self, conn: aiordma.Connection, allocate: Allocate = HostMemory) -> None:
        self._conn = conn
        self._allocate = allocate
        self._stack = ExitStack()

    def allocate_memory(self, filling: bytes) -> Place:
        """Allocate memory for this side's operations, and copy `filling` into the memory."""
        place = self._allocate(self._conn, len(filling))
        self._stack.callback(place.release)
        place.fill(filling)
        return place

    def share_buffer(self, filling: bytes, rights: Rights) -> tuple[Buffer, bytes]:
        """Allocate memory that the peer may access, and copy `filling` into the memory.

        Returns the memory and the token for the peer.
        """
        buffer = self._conn.alloc(len(filling))
        self._stack.callback(buffer.release)
        buffer.view[:] = filling
        share = self._conn.share(buffer, access=rights, lease=None)
        self._stack.callback(share.revoke)
        return buffer, share.token.pack()

    def release(self) -> None:
        self._stack.close()


class OneSided(Memory):
    """An end that starts one-sided operations, either in concurrent tasks or in batches."""

    def use(self, token: bytes) -> None:
        self.remote: RemoteRegion = self._conn.open_region(token)

    def operation_adder(self, batch: Batch) -> Callable[[], object]:
        """Return a function that adds one operation to `batch`."""
        raise NotImplementedError

    async def flood(self, run: Run) -> None:
        work = self._singly if run.batch == 1 else self._in_batches
        await run_concurrently(work(run) for _ in range(run.depth // run.batch))

    async def _singly(self, run: Run) -> None:
        """Run operations one at a time. `flood` runs several of these tasks concurrently."""
        while run.started < run.limit:
            operation = self.operate(run.started)
            run.started += 1
            await operation
            run.done += 1

    async def _in_batches(self, run: Run) -> None:
        """Run operations in batches of `run.batch`, each posted with one doorbell."""
        while run.started < run.limit:
            count = min(run.batch, run.limit - run.started)
            run.started += count
            async with self._conn.batch() as batch:
                add_operation = self.operation_adder(batch)
                for _ in range(count):
                    add_operation()
            run.done += count


class Writes(OneSided):
    """An end that writes to the peer's memory.

    The peer's responses are also RDMA writes, and carry immediate data.
    """

    def prepare(self, load: Load) -> bytes:
        self._expected = load.expected
        self.set_numbered(load)
        self._outbox = self.allocate_memory(load.sent).local
        self._inbox, token = self.share_buffer(bytes(len(load.expected)), Rights.WRITE)
        return token

    def operate(self, number: int) -> Awaitable[None]:
        return self._conn.write(self._outbox, self.remote, imm=self.imm(number))

    def operation_adder(self, batch: Batch) -> Callable[[], object]:
        return partial(batch.write, self._outbox, self.remote)

    async def alone(self, run: Run) -> None:
        """Time writes to which the peer does not respond, one after the other."""
        if self.numbered:  # each write needs different immediate data
            await super().alone(run)
            return
        conn, memory, remote, times = self._conn, self._outbox, self.remote, run.times
        while run.done < run.limit:  # a function call would add 1 % to each write
            start = perf_counter()
            await conn.write(memory, remote)
            times.append(perf_counter() - start)
            run.done += 1

    def receive(self) -> Awaitable[Message]:
        return self._conn.recv()

    def check(self, arrived: Message, number: int | None, compare_payload: bool) -> str:
        with arrived:
            return imm_mismatch(arrived.imm, None if number is None else number & U32)

    def verify(self, own_operations: int, peer_operations: int) -> str:
        return difference(self._inbox.view, self._expected) if peer_operations else ""


class Reads(OneSided):
    def prepare(self, load: Load) -> bytes:
        self._expected = load.expected
        self._place = self.allocate_memory(bytes(len(load.expected)))
        return b""

    def operate(self, number: int) -> Awaitable[None]:
        return self._conn.read(self.remote, self._place.local)

    def operation_adder(self, batch: Batch) -> Callable[[], object]:
        return partial(batch.read, self.remote, self._place.local)

    def verify(self, own_operations: int, peer_operations: int) -> str:
        return difference(self._place.contents(), self._expected) if own_operations else ""


class Atomics(OneSided):
    """The client's end for atomic operations, which increment a counter in the server's memory."""

    def prepare(self, load: Load) -> bytes:
        return b""

    def operate(self, number: int) -> Awaitable[int]:
        return self._conn.fetch_and_add(self.remote, 1)

    def operation_adder(self, batch: Batch) -> Callable[[], object]:
        return partial(batch.fetch_and_add, self.remote, 1)


class Source(Memory):
    """The server's end for reads. The client reads the server's memory and verifies the data."""

    def prepare(self, load: Load) -> bytes:
        return self.share_buffer(load.sent, Rights.READ)[1]


class Sum(Source):
    """The server's end for atomic operations.

    Each operation increments a counter in the server's memory. At the end of a part, the server
    checks that the counter equals the number of operations.
    """

    def prepare(self, load: Load) -> bytes:
        self._sum, token = self.share_buffer(bytes(8), Rights.ATOMIC)
        return token

    def verify(self, own_operations: int, peer_operations: int) -> str:
        total = int.from_bytes(self._sum.view, sys.byteorder)
        return (
            ""
            if total == peer_operations
            else f"the sum of {peer_operations} additions of 1 is {total}"
        )
