"""One end uses memory of the other one; its writes and sums are verified.

The region is divided into lanes, one for each task of the user, so that each knows what its part
holds: a counter, and bytes. What was cancelled may have been done or not, but not later than what
was asked for after it.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from aiordma import Connection, RemoteRegion, RequestRefusedError, Rights
from aiordma._core import protocol
from aiordma.mr_pool import LocalMemory

from .cutting import cut_short
from .messages import LAST
from .part import Part
from .pattern import Wrong
from .plan import CLIENT, SERVER, Plan

ALL = Rights.READ | Rights.WRITE | Rights.ATOMIC
COUNTER = 8
LANES = 4
Steps = dict[Callable[[int], Coroutine[Any, Any, None]], int]  # with their weights
LENT = 1 << 20  # the largest request, within every quota


def parts(plan: Plan) -> tuple[int, int, int]:
    """The number of lanes, the bytes of a lane, and of the region."""
    lanes = plan.chance("lanes").randint(1, LANES)
    part = max(4096, plan.largest // lanes // COUNTER * COUNTER)
    return lanes, part, LANES * COUNTER + lanes * part


def stretch(plan: Plan, lane: int, step: int) -> tuple[int, int, int]:
    """The offset, length and pattern number of a step of a lane."""
    _, part, _ = parts(plan)
    chance = plan.chance("stretch", lane, step)
    length = min(part, plan.size("stretch", lane, step))
    begin = LANES * COUNTER + lane * part + chance.randint(0, part - length)
    return begin, length, plan.number("stretch", lane, step)


class Memory(Part):
    """The part of one end."""

    def __post_init__(self) -> None:
        self._talking = asyncio.Lock()  # one request to the owner's program at a time

    async def run(self) -> None:
        owner = self.plan.chance("owner").choice((CLIENT, SERVER))
        if self.side == owner:
            await self._own()
        else:
            await self._use()

    # ---- the owner of the memory ------------------------------------------------------------

    async def _own(self) -> None:
        conn, plan = self.conn, self.plan
        lanes, _, size = parts(plan)
        with some_memory(conn, plan.chance("memory"), size) as memory:
            view = memory.view
            view[: LANES * COUNTER] = bytes(LANES * COUNTER)
            share = await conn.send_region(memory, access=ALL, lease=3600)
            with share:
                while True:
                    with await conn.recv() as message:
                        if message.imm == LAST:
                            self._check_counters(view, json.loads(bytes(message)), lanes)
                            break
                        if message.imm is None:
                            await self._handed_over(json.loads(bytes(message)))
                        else:
                            self._woken(view, *divmod(message.imm, 1 << 16))
                    await conn.send(b"")
                await conn.send(b"", imm=LAST)
                # The user's last message; only then is the share revoked.
                with await conn.recv() as message:
                    if message.imm != LAST:
                        raise Wrong(f"message {message.imm} after the last")

    def _woken(self, view: memoryview, lane: int, step: int) -> None:
        begin, length, number = stretch(self.plan, lane, step)
        what = f"write {step} of lane {lane} that woke its owner"
        self.patterns.check(what, number, view[begin : begin + length])

    def _check_counters(self, view: memoryview, bounds: list[list[int]], lanes: int) -> None:
        found = view[: lanes * COUNTER].cast("Q").tolist()
        for value, (least, most) in zip(found, bounds, strict=True):
            if not least <= value <= most:
                raise Wrong(f"a counter of {value}, which is not {least} to {most}")

    async def _handed_over(self, what: list[int]) -> None:
        size, number = what
        with await self.conn.recv_buffer() as buffer:
            if len(buffer) != size:
                raise Wrong(f"{size} bytes were handed over, {len(buffer)} came")
            self.patterns.check("handed over memory", number, buffer.view)

    # ---- the user of the memory ------------------------------------------------------------

    async def _use(self) -> None:
        conn, plan = self.conn, self.plan
        lanes, _, size = parts(plan)
        remote = await conn.recv_region()
        if len(remote) != size:
            raise Wrong(f"{size} bytes were to be shared, not {remote!r}")
        async with asyncio.TaskGroup() as tasks:
            users = [
                tasks.create_task(Lane(self, remote, lane, plan.chance("lane", lane)).run())
                for lane in range(lanes)
            ]
        await conn.send(json.dumps([user.result() for user in users]).encode(), imm=LAST)
        with await conn.recv() as message:
            if message.imm != LAST:
                raise Wrong(f"message {message.imm} instead of the last")
        await conn.send(b"", imm=LAST)


class Lane:
    """A task that uses a lane of the region."""

    def __init__(
        self, memory: Memory, remote: RemoteRegion, lane: int, chance: random.Random
    ) -> None:
        self._memory = memory
        self._conn, self._plan = memory.conn, memory.plan
        self._patterns = memory.patterns
        self._remote = remote
        self._lane = lane
        self._chance = chance
        self._counter = remote[lane * COUNTER : (lane + 1) * COUNTER]
        self._least = self._most = 0

    async def run(self) -> list[int]:
        """The bounds of the lane's counter."""
        steps: Steps = {
            self._write_and_read: 5,
            self._batch: 2,
            self._add: 3,
            self._swap: 2,
            self._wake: 2,
            self._borrow: 1,
            self._cancelled: 4,
        }
        for step in range(self._chance.randint(1, self._plan.count)):
            (some,) = self._chance.choices(list(steps), list(steps.values()))
            await some(step)
        return [self._least, self._most]

    def _source(self, stack: ExitStack, data: memoryview) -> LocalMemory | memoryview:
        kind = self._chance.random()
        if kind < 0.5 or not len(data):
            return data
        if kind < 0.75:
            return stack.enter_context(self._conn.register(data))
        buffer = stack.enter_context(self._conn.alloc(len(data)))
        buffer.view[:] = data
        return buffer

    def _target(self, stack: ExitStack, length: int) -> tuple[LocalMemory | bytearray, memoryview]:
        kind = self._chance.random()
        if kind < 0.5 or not length:
            memory = bytearray(length)
            return memory, memoryview(memory)
        with_registration = stack.enter_context(some_memory(self._conn, self._chance, length))
        return with_registration, with_registration.view

    async def _write_and_read(self, step: int) -> None:
        begin, length, number = stretch(self._plan, self._lane, step)
        place = self._remote[begin : begin + length]
        heard: list[int] = []
        progress = heard.append if self._chance.random() < 0.3 else None
        with ExitStack() as stack:
            source = self._source(stack, self._patterns.of(number, length))
            await self._conn.write(source, place, progress=progress)
        if progress and length and (heard != sorted(heard) or heard[-1] != length):
            raise Wrong(f"progress of {length} bytes: {heard}")
        with ExitStack() as stack:
            target, view = self._target(stack, length)
            await self._conn.read(place, target)
            self._patterns.check(f"read {step} of lane {self._lane}", number, view)
            del view

    async def _batch(self, step: int) -> None:
        _, part, _ = parts(self._plan)
        pieces = self._chance.randint(1, 24)
        length = min(part // pieces, self._plan.size("stretch", self._lane, step))
        base = LANES * COUNTER + self._lane * part
        places = [
            self._remote[base + at * length : base + (at + 1) * length] for at in range(pieces)
        ]
        number = self._plan.number("batch", self._lane, step)
        async with self._conn.batch() as batch:
            for at, place in enumerate(places):
                batch.write(self._patterns.of(number + at, length), place)
            adding = batch.fetch_and_add(self._counter, 1)
        self._added(adding.result())
        targets = [bytearray(length) for _ in places]
        async with self._conn.batch() as batch:
            for place, target in zip(places, targets, strict=True):
                batch.read(place, target)
        for at, target in enumerate(targets):
            self._patterns.check(f"read {at} of a batch", number + at, memoryview(target))

    def _added(self, old: int) -> None:
        """One has been added: that was there before, so now it is known."""
        if not self._least <= old <= self._most:
            raise Wrong(f"a counter was {old}, which is not {self._least} to {self._most}")
        self._least = self._most = old + 1

    async def _add(self, step: int) -> None:
        self._added(await self._conn.fetch_and_add(self._counter, 1))

    async def _swap(self, step: int) -> None:
        await self._add(step)
        now = self._least
        wrong = await self._conn.compare_and_swap(self._counter, now + 1, 0)
        right = await self._conn.compare_and_swap(self._counter, now, now + 3)
        if (wrong, right) != (now, now):
            raise Wrong(f"a counter of {now} was {wrong} and {right} when it was to be swapped")
        self._least = self._most = now + 3

    async def _wake(self, step: int) -> None:
        begin, length, number = stretch(self._plan, self._lane, step)
        async with self._memory._talking:
            # It takes its turn among the messages, and so may pass a write that was cancelled
            # while it waited for room: not before that has been done.
            self._added(await self._conn.fetch_and_add(self._counter, 1))
            await self._conn.write(
                self._patterns.of(number, length),
                self._remote[begin : begin + length],
                imm=self._lane << 16 | step,
            )
            (await self._conn.recv()).release()  # the bytes must not change before

    async def _borrow(self, step: int) -> None:
        size = max(1, min(LENT, self._plan.size("borrowed", self._lane, step)))
        number = self._plan.number("borrowed", self._lane, step)
        if self._chance.random() < 0.2:
            got = await cut_short(self._chance, lambda: self._request(size))
            for region in got:
                if region is not None:
                    await region.release()
        async with self._memory._talking:
            lent = await self._request(size)
            if lent is None:
                return
            await self._conn.write(self._patterns.of(number, size), lent)
            back = bytearray(size)
            await self._conn.read(lent, back)
            self._patterns.check("borrowed memory", number, memoryview(back))
            if self._chance.random() < 0.5:
                await self._conn.hand_over(lent)
                await self._conn.send(json.dumps([size, number]).encode())
                (await self._conn.recv()).release()
            else:
                await lent.release()

    async def _request(self, size: int) -> RemoteRegion | None:
        """A loan; None if the quota is used up, since a loan counts until it is returned."""
        try:
            return await self._conn.request_region(size)
        except RequestRefusedError as error:
            if error.code != protocol.ErrorCode.QUOTA:
                raise
            return None

    async def _cancelled(self, step: int) -> None:
        begin, length, number = stretch(self._plan, self._lane, step)
        place = self._remote[begin : begin + length]
        data, conn = self._patterns.of(number, length), self._conn
        kind = self._chance.randrange(3)
        if kind == 0:
            await cut_short(self._chance, lambda: conn.write(data, place))
        elif kind == 1:
            await cut_short(self._chance, lambda: conn.read(place, bytearray(length)))
        elif not await cut_short(self._chance, lambda: conn.fetch_and_add(self._counter, 1)):
            self._most += 1
        else:
            self._least += 1
            self._most += 1


@contextmanager
def some_memory(conn: Connection, chance: random.Random, size: int) -> Iterator[LocalMemory]:
    """Registered memory of a random kind."""
    kind = chance.randrange(4)
    if kind == 0:
        with conn.alloc(size) as buffer:
            yield buffer
        return
    own = (bytearray(size), np.empty(size, np.uint8), mmap.mmap(-1, size))[kind - 1]
    with conn.register(own) as region:
        yield region
