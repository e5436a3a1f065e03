"""A client's connection to one server, and the transfer of blocks over it."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiordma
from aiordma import rpc

from .arena import ALIGNMENT, TRAILER_SIZE, pack_trailer, trailer_offset
from .common import MAX_ENCRYPTED_BLOCK

MAX_TRANSFERS = 4
"""Maximum number of concurrent transfers to a server."""

MAX_BLOCKS = 256
"""Maximum number of blocks per transfer.

If they are not adjacent, the server creates a memory key for each one.
"""

MAX_BYTES = 64 << 20
"""Maximum number of bytes per transfer of several blocks."""


@dataclass(slots=True, eq=False)
class Lock:
    """A lock that this client has on a block."""

    session: ServerSession
    offset: int
    size: int
    generation: int
    # Client's loop time, measured from before the call, so it ends before the server's deadline.
    deadline: float


@dataclass(slots=True)
class _Transfer:
    """Blocks that are transferred with one read or write."""

    region_index: int
    memory: Any
    local_offset: int | None  # in the registered memory
    starts: list[int] = field(default_factory=list)  # offset of each block in the region
    end: int = 0


@dataclass(slots=True, eq=False)
class ServerSession:
    """An open connection to a server.

    If a method raises an exception, the caller must close the connection. This releases what the
    server has reserved or locked, and ends the access to the buffers.
    """

    server: str
    conn: aiordma.Connection
    calls: rpc.Client
    arena: aiordma.RemoteRegion | None  # None if the connection is encrypted
    memory: aiordma.Region | None
    has_failed: bool = False
    slots: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, MAX_TRANSFERS))

    def batch_size(self, length: int) -> int:
        """Return how many blocks of this length are transferred at a time.

        Concurrent transfers reserve at most half of the arena, which is the server's limit.
        """
        size = MAX_BYTES
        if self.arena is not None:
            size = min(size, trailer_offset(len(self.arena), 0) // (2 * MAX_TRANSFERS))
        return max(1, min(MAX_BLOCKS, size // (-(-length // ALIGNMENT) * ALIGNMENT)))

    def _transfers(self, blocks: Iterable[tuple[int, int, memoryview]]) -> list[_Transfer]:
        """Return how to transfer blocks, given by the region, the offset in it and their memory.

        Successive blocks that are adjacent on both sides are transferred together.
        """
        transfers: list[_Transfer] = []
        expected_next = None
        for region_index, start, view in blocks:
            offset = self._registered_offset(view)
            if expected_next != (region_index, start, offset):
                transfers.append(_Transfer(region_index, view, offset))
            transfer = transfers[-1]
            transfer.starts.append(start)
            transfer.end = start + len(view)
            if offset is not None:
                expected_next = (region_index, transfer.end, offset + len(view))
        for transfer in transfers:
            if (offset := transfer.local_offset) is not None and self.memory is not None:
                length = transfer.end - transfer.starts[0]
                transfer.memory = self.memory[offset : offset + length]
        return transfers

    def _registered_offset(self, view: memoryview) -> int | None:
        """Return the offset of a buffer in the registered memory, or None if it is elsewhere."""
        if self.memory is None or view.readonly:
            return None
        offset = ctypes.addressof(ctypes.c_char.from_buffer(view)) - self.memory.address
        return offset if 0 <= offset <= len(self.memory) - len(view) else None

    async def put(self, blocks: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """Store blocks. Returns whether each one is stored."""
        if self.arena is None:
            return [
                len(view) <= MAX_ENCRYPTED_BLOCK and await self.calls.call("store", (key, view))
                for key, view in blocks
            ]
        reply = await self.calls.call("reserve", [(key, len(view)) for key, view in blocks])
        places, tokens = list[Any](reply["places"]), reply["tokens"]
        if len(tokens) > len(blocks):
            raise ValueError(f"got {len(tokens)} tokens for {len(blocks)} blocks")
        regions = [self.conn.open_region(token) for token in tokens]
        written = [i for i, place in enumerate(places) if isinstance(place, list)]
        if written:
            async with self.conn.batch() as batch:
                for each in self._transfers((*places[i][:2], blocks[i][1]) for i in written):
                    batch.write(each.memory, regions[each.region_index][each.starts[0] : each.end])
            committed = await self.calls.call("commit", [places[i][2] for i in written])
            for i, is_stored in zip(written, committed, strict=True):
                places[i] = is_stored
        return places

    async def get(self, blocks: Sequence[tuple[bytes, Lock, memoryview]]) -> list[bool]:
        """Read locked blocks. Returns whether the data is what was located."""
        if self.arena is None:
            return [await self._load(lock, view) for _, lock, view in blocks]
        transfers = self._transfers((0, lock.offset, view) for _, lock, view in blocks)
        find_trailer = partial(trailer_offset, len(self.arena))
        spans = [
            (find_trailer(it.starts[0]), find_trailer(it.starts[-1]) + TRAILER_SIZE)
            for it in transfers
        ]
        buffer_offset, positions = 0, list[int]()
        with await self.conn.lease(sum(end - start for start, end in spans)) as trailers:
            async with self.conn.batch() as batch:
                for each, (start, end) in zip(transfers, spans, strict=True):
                    batch.read(self.arena[each.starts[0] : each.end], each.memory)
                    target = trailers[buffer_offset : buffer_offset + end - start]
                    batch.read(self.arena[start:end], target)
                    positions += [buffer_offset + find_trailer(it) - start for it in each.starts]
                    buffer_offset += end - start
            now, found = asyncio.get_running_loop().time(), bytes(trailers.view)
        return [
            now < lock.deadline
            and found[position : position + TRAILER_SIZE]
            == pack_trailer(key, lock.size, lock.generation)
            for (key, lock, _), position in zip(blocks, positions, strict=True)
        ]

    async def _load(self, lock: Lock, view: memoryview) -> bool:
        data = await self.calls.call("load", lock.generation)
        if data is None or len(data) != len(view):
            return False
        view[:] = data
        return True
