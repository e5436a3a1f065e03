"""Messages in both directions, some cancelled; each arrives once, in order, unchanged."""

from __future__ import annotations

import asyncio
import json
from collections import deque

from aiordma import Message, MessageTooLongError

from .cutting import cut_short
from .part import Part
from .pattern import Wrong

# Immediate data of the last message, which lists cancelled messages; others have their number.
LAST = 0xFFFFFFFF
# Messages that are held while others arrive.
HELD = 3


class Messages(Part):
    """The part of one end."""

    def __post_init__(self) -> None:
        self._seen: set[int] = set()
        self._last = -1

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send())
            tasks.create_task(self._receive())

    def _count(self, side: str) -> int:
        return self.plan.chance("count", side).randint(0, self.plan.count)

    # ---- sending -------------------------------------------------------------------------

    def _data(self, number: int) -> memoryview:
        plan, side = self.plan, self.side
        return self.patterns.of(plan.number(side, number), plan.size(side, number))

    async def _send(self) -> None:
        chance = self.plan.chance("send", self.side)
        conn, count = self.conn, self._count(self.side)
        uncertain = []
        number = 0
        while number < count:
            if chance.random() < 0.15:
                data = self._data(number)

                async def send(data: memoryview = data, imm: int = number) -> bool:
                    await conn.send(data, imm=imm)
                    return True

                if not await cut_short(chance, send):
                    uncertain.append(number)
                number += 1
                continue
            numbers = range(number, min(count, number + chance.choice((1, 1, 1, 4, 16))))
            number = numbers.stop
            under_way = [conn.send_nowait(self._data(one), imm=one) for one in numbers]
            results = await asyncio.gather(*under_way, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        await conn.send(json.dumps(uncertain).encode(), imm=LAST)

    # ---- receiving -----------------------------------------------------------------------

    async def _receive(self) -> None:
        chance = self.plan.chance("receive", self.side)
        held: deque[tuple[int, Message]] = deque()
        try:
            while True:
                if chance.random() < 0.1:
                    await asyncio.sleep(chance.random() * 1e-3)  # a slow reader
                if chance.random() < 0.4:
                    last = await self._receive_into(chance.random(), chance.random())
                    if last is not None:
                        break
                    continue
                if chance.random() < 0.2:
                    got = await cut_short(chance, self.conn.recv)
                    if not got:
                        continue
                    message = got[0]
                else:
                    message = await self.conn.recv()
                if message.imm == LAST:
                    with message:
                        last = bytes(message)
                    break
                held.append((self._arrived(message.imm, len(message)), message))
                if len(held) > chance.randint(0, HELD):
                    self._release(*held.popleft())
        finally:
            for one in held:
                self._release(*one)
        missing = set(range(self._count(self.peer))) - self._seen
        if lost := missing - set(json.loads(last)):
            raise Wrong(f"messages {sorted(lost)} were sent, and are not here")

    def _arrived(self, number: int | None, length: int) -> int:
        if number is None or not self._last < number < self._count(self.peer):
            raise Wrong(f"message {number} after {self._last}")
        expected = self.plan.size(self.peer, number)
        if length != expected:
            raise Wrong(f"message {number} of {length} bytes had {expected}")
        self._last = number
        self._seen.add(number)
        return number

    def _release(self, number: int, message: Message) -> None:
        """Check that a held message is unchanged by later ones."""
        with message:
            self._check("message", number, message.data)

    def _check(self, what: str, number: int, data: memoryview) -> None:
        self.patterns.check(f"{what} {number}", self.plan.number(self.peer, number), data)

    async def _receive_into(self, kind: float, cut: float) -> bytes | None:
        """Receive the next message into own memory; return the bytes of the last message at the
        end."""
        conn = self.conn
        length = self.plan.size(self.peer, self._last + 1)
        while True:
            memory = bytearray(length)
            try:
                if kind < 0.3 and not conn.closed:
                    with conn.register(memory or bytearray(1)) as region:
                        found = await conn.recv_into(region)
                elif cut < 0.3:
                    chance = self.plan.chance("into", self.side, self._last, cut)

                    async def receive(memory: bytearray = memory) -> tuple[int, int | None]:
                        return await conn.recv_into(memory)

                    got = await cut_short(chance, receive)
                    if not got:
                        return None
                    found = got[0]  # type: ignore[assignment]
                else:
                    found = await conn.recv_into(memory)
            except MessageTooLongError as error:
                length = error.amount  # earlier messages were cancelled
                continue
            break
        size, imm = found
        if imm == LAST:
            return bytes(memory[:size])
        number = self._arrived(imm, size)
        self._check("message into memory", number, memoryview(memory)[:size])
        return None
