"""Plain queue pairs of the verbs in place of aiordma's connections: RC, UC and UD.

Both ends of a measured queue pair are here. Each part of a measurement has queue pairs and memory
of its own; the parts' tokens are their endpoints, with the memory that the peer may reach.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Awaitable, Coroutine
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from aiordma import verbs
from aiordma.async_queue_pair import AsyncQueuePair, Completed, ReceiveRing
from aiordma.errors import LimitError, ProtocolError

from . import wire
from .client_ends import U32, Run
from .contents import SERVER, contents, difference
from .server_ends import Tally

MEMORY = struct.Struct("!QI")
"""The address and the key of the memory that the peer reaches, behind the endpoint of a token."""

# Receives of each end, as many as fit into this memory, but two at least.
RECEIVES, RECEIVE_MEMORY, LEAST_RECEIVES = 1024, 64 << 20, 2

LOST_AFTER = 2.0
"""Seconds without an answer after which a message counts as lost."""

# Rights of the memory that the peer reaches, and of a queue pair of each type that has such rights.
RIGHTS = {
    "send": verbs.AccessFlags.LOCAL_WRITE,
    "write": verbs.AccessFlags.LOCAL_WRITE | verbs.AccessFlags.REMOTE_WRITE,
    "read": verbs.AccessFlags.LOCAL_WRITE | verbs.AccessFlags.REMOTE_READ,
}


class QueuePairEnd:
    """The queue pair and the memory of one end."""

    def __init__(self, device: str, opened: wire.Open) -> None:
        self._device = device
        self._opened = opened
        self._stack = ExitStack()
        self._to: verbs.Destination | None = None
        self._inline = False
        self.lossy: bool = opened.qp != "rc"
        """Whether a message may be lost."""
        self.expected: bytes = b""

    def open(self, size: int, sent: bytes, expected: bytes) -> bytes:
        """Make the queue pair and the memory; returns the token."""
        opened = self._opened
        self.expected = expected
        messages = 1 if opened.operation == "write" else size  # immediate data take a receive
        self._header = verbs.GRH_SIZE if opened.qp == "ud" else 0
        room = self._header + max(messages, 1)
        count = max(LEAST_RECEIVES, min(RECEIVES, 2 * opened.depth, RECEIVE_MEMORY // room))
        context = self._stack.enter_context(verbs.open_device(self._device))
        pd = context.alloc_pd()
        capabilities = verbs.QPCapabilities(
            2 * opened.depth, count, max_inline_data=min(opened.inline, size)
        )
        qp_type = verbs.QPType[opened.qp.upper()]
        self.queue: AsyncQueuePair = AsyncQueuePair(pd, capabilities, qp_type=qp_type)
        self._stack.callback(self.queue.close)
        self.outbox: verbs.MemoryRegion = pd.reg_mr(max(size, 1), RIGHTS[opened.operation])
        self.inbox: verbs.MemoryRegion = pd.reg_mr(max(size, 1), RIGHTS[opened.operation])
        self.outbox.buf[:size] = sent
        self._piece = verbs.ScatterGatherElement(self.outbox.addr, size, self.outbox.lkey)
        self._target = verbs.ScatterGatherElement(self.inbox.addr, size, self.inbox.lkey)
        self._inline = 0 < size <= opened.inline
        self._receives = count, room
        self._endpoint = self.queue.qp.endpoint()
        most = verbs.MTU(self._endpoint.mtu).bytes
        if opened.qp == "ud" and size > most:
            raise LimitError(
                f"a datagram is one packet, of at most {most} bytes on {self._device}, not {size}"
            )
        reached = self.outbox if opened.operation == "read" else self.inbox
        return self._endpoint.pack() + MEMORY.pack(reached.addr, reached.rkey)

    def connect(self, token: bytes) -> None:
        """Connect to the queue pair of the peer's token."""
        endpoint, memory = token[: -MEMORY.size], token[-MEMORY.size :]
        if len(memory) != MEMORY.size:
            raise ProtocolError(f"the peer sent a token of {len(token)} bytes for a queue pair")
        remote = verbs.Endpoint.unpack(endpoint)
        self._remote = MEMORY.unpack(memory)
        qp = self.queue.qp
        if qp.qp_type is verbs.QPType.UD:
            qp.start(self._endpoint)
            self._to = qp.destination(self._endpoint, remote)
        else:
            access = RIGHTS[self._opened.operation] & ~verbs.AccessFlags.LOCAL_WRITE
            qp.connect(self._endpoint, remote, access=access)
        self._ring: ReceiveRing = self.queue.receives(*self._receives)

    def post(self, first: int, *, heard: bool, count: int = 1) -> list[Completed]:
        """Operations with one doorbell, of which the last one alone makes a completion.

        `heard`: the peer's program notices them, by their immediate data.
        """
        requests: list[verbs.SendWorkRequest] = []
        with verbs.SendBatch(requests.extend) as batch:
            for number in range(first, first + count):
                imm = number & U32 if heard else None
                signaled = number == first + count - 1
                match self._opened.operation:
                    case "send":
                        batch.send(
                            [self._piece],
                            to=self._to,
                            imm=imm,
                            signaled=signaled,
                            inline=self._inline,
                        )
                    case "write":
                        batch.write(
                            [self._piece],
                            *self._remote,
                            imm=imm,
                            signaled=signaled,
                            inline=self._inline,
                        )
                    case _:
                        batch.read([self._target], *self._remote, signaled=signaled)
        return self.queue.submit_nowait(requests)

    def receive(self) -> Awaitable[tuple[verbs.WorkCompletion, memoryview]]:
        return self._ring.get()

    def wrong(
        self, arrived: tuple[verbs.WorkCompletion, memoryview], number: int | None, compared: bool
    ) -> str:
        """A text for an error in an arrival, or "". With `number` None it has no immediate data."""
        completion, view = arrived
        imm = completion.imm_data
        if number is not None and imm != number & U32:
            return f"immediate data {imm} instead of {number & U32}"
        payload = view[self._header :]
        if self._opened.operation == "send" and (compared or len(payload) != len(self.expected)):
            return difference(payload, self.expected)
        return ""

    def arrived(self) -> str:
        """The first error in memory that the peer has written, or that was read."""
        return difference(self.inbox.buf[: len(self.expected)], self.expected)

    def release(self) -> None:
        self._stack.close()


class ClientQueuePair(QueuePairEnd):
    """The client's end."""

    def prepare(self, seed: int, size: int) -> bytes:
        self._mismatch = ""
        return self.open(size, contents(seed, size), contents(seed + SERVER, size))

    def use(self, token: bytes) -> None:
        self.connect(token)

    async def ping(self, run: Run) -> None:
        async def there_and_back() -> None:
            while run.done < run.limit:
                start = perf_counter()
                (sent,) = self.post(run.done, heard=self._heard(run))
                await self._answer(run)
                await sent
                run.times.append(perf_counter() - start)
                run.done += 1

        await self._watched(run, there_and_back())

    async def alone(self, run: Run) -> None:
        while run.done < run.limit:
            start = perf_counter()
            (sent,) = self.post(run.done, heard=run.imm)
            await sent
            run.times.append(perf_counter() - start)
            run.done += 1

    async def flood(self, run: Run) -> None:
        """Every `moderation`-th operation makes a completion, and the last one."""
        waiting = deque[Completed]()
        while run.started < run.limit:
            count = min(self._opened.moderation, run.limit - run.started)
            while len(waiting) + count > run.depth:
                await waiting.popleft()
                run.done += 1
            waiting += self.post(run.started, heard=run.imm, count=count)
            run.started += count
        for future in waiting:
            await future
            run.done += 1

    async def both(self, run: Run) -> None:
        async def keep_under_way() -> None:
            under_way = deque[Completed]()

            def begin() -> None:
                under_way.extend(self.post(run.started, heard=self._heard(run)))
                run.started += 1

            for _ in range(min(run.depth, run.limit)):
                begin()
            while run.done < run.started:
                await self._answer(run)
                await under_way.popleft()
                run.done += 1
                if run.started < run.limit:
                    begin()

        await self._watched(run, keep_under_way())

    def _heard(self, run: Run) -> bool:
        return run.imm or self._opened.operation == "write"

    async def _answer(self, run: Run) -> None:
        number = run.done if self._heard(run) else None
        wrong = self.wrong(await self.receive(), number, run.verify_all or not run.done)
        if wrong and not self._mismatch:
            self._mismatch = f"answer {run.done}: {wrong}"

    async def _watched(self, run: Run, work: Coroutine[Any, Any, None]) -> None:
        """The work; TimeoutError when there is no answer for too long."""
        working = asyncio.ensure_future(work)
        before = -1
        try:
            while not (await asyncio.wait({working}, timeout=LOST_AFTER))[0]:
                if run.done == before:
                    raise TimeoutError(f"message {run.done} or its answer was lost")
                before = run.done
            await working
        finally:
            working.cancel()

    def verify(self, run: Run) -> str:
        if self._mismatch or not run.done or self._opened.operation == "send":
            return self._mismatch
        return self.arrived() if run.answered or self._opened.operation == "read" else ""


class ServerQueuePair(QueuePairEnd):
    """The server's end."""

    @property
    def hears(self) -> bool:
        return self._opened.operation == "send" or self._opened.imm

    def prepare(self, seed: int, size: int, token: bytes) -> bytes:
        own = self.open(size, contents(seed + SERVER, size), contents(seed, size))
        self.connect(token)
        return own

    def took(self, arrived: tuple[verbs.WorkCompletion, memoryview], tally: Tally) -> int | None:
        """Check and count what has arrived; the number with which it is answered, if any."""
        heard = self._opened.imm or (tally.answered and self._opened.operation == "write")
        # Behind a message that was lost, the numbers are others.
        number = tally.count if heard and not self.lossy else None
        tally.add(self.wrong(arrived, number, tally.verify_all or not tally.count))
        return tally.count - 1 if heard else None

    def reply(self, imm: int | None) -> Completed:
        (replied,) = self.post(imm or 0, heard=imm is not None)
        return replied

    def verify(self, count: int) -> str:
        return self.arrived() if count and self._opened.operation == "write" else ""
