"""Plain RC, UC and UD queue pairs, which can be measured instead of aiordma's connections.

Each part of a measurement creates new queue pairs and memory. Each side sends the other a token
that contains a queue pair's endpoint and the location of the memory the peer may access.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Awaitable
from contextlib import ExitStack
from time import perf_counter

from aiordma import verbs
from aiordma.async_queue_pair import AsyncQueuePair, Completed, ReceiveRing
from aiordma.errors import LimitError, ProtocolError

from . import wire
from .contents import difference
from .ends import End, Load, Run, imm_mismatch

MEMORY = struct.Struct("!QI")
"""The last part of a token: the address and key of the memory the peer may access."""

# Each end posts at most RECEIVES receives, which use at most RECEIVE_MEMORY bytes in total. It
# posts at least MIN_RECEIVES, even if these need more memory.
RECEIVES, RECEIVE_MEMORY, MIN_RECEIVES = 1024, 64 << 20, 2

# The access flags of registered memory, by operation. Queue pairs use the same flags without
# LOCAL_WRITE.
RIGHTS = {
    "send": verbs.AccessFlags.LOCAL_WRITE,
    "write": verbs.AccessFlags.LOCAL_WRITE | verbs.AccessFlags.REMOTE_WRITE,
    "read": verbs.AccessFlags.LOCAL_WRITE | verbs.AccessFlags.REMOTE_READ,
}

Arrived = tuple[verbs.WorkCompletion, memoryview]


class QueuePair(End):
    """An end that uses a plain queue pair instead of an aiordma connection."""

    def __init__(self, device: str, opened: wire.Open) -> None:
        self._device = device
        self._opened = opened
        self._stack = ExitStack()
        self._destination: verbs.Destination | None = None
        self.lossy: bool = opened.qp != "rc"

    def prepare(self, load: Load) -> bytes:
        """Create a queue pair and registered memory, and return the token for the peer."""
        self._expected = load.expected
        self.set_numbered(load)
        opened, size = self._opened, len(load.sent)
        # A write with immediate data consumes a receive but does not use its memory.
        message_size = 1 if opened.operation == "write" else size
        self._header_size = verbs.GRH_SIZE if opened.qp == "ud" else 0
        receive_size = self._header_size + max(message_size, 1)
        count = max(MIN_RECEIVES, min(RECEIVES, 2 * opened.depth, RECEIVE_MEMORY // receive_size))
        context = self._stack.enter_context(verbs.open_device(self._device))
        pd = context.alloc_pd()
        capabilities = verbs.QPCapabilities(
            2 * opened.depth, count, max_inline_data=min(opened.inline, size)
        )
        qp_type = verbs.QPType[opened.qp.upper()]
        self.queue: AsyncQueuePair = AsyncQueuePair(pd, capabilities, qp_type=qp_type)
        self._stack.callback(self.queue.close)
        self._outbox, self._inbox = (
            pd.reg_mr(max(size, 1), RIGHTS[opened.operation]) for _ in ("outbox", "inbox")
        )
        self._outbox.buf[:size] = load.sent
        self._piece = verbs.ScatterGatherElement(self._outbox.addr, size, self._outbox.lkey)
        self._target = verbs.ScatterGatherElement(self._inbox.addr, size, self._inbox.lkey)
        self._inline = 0 < size <= opened.inline
        self._receives = count, receive_size
        self._endpoint = self.queue.qp.endpoint()
        max_payload = verbs.MTU(self._endpoint.mtu).bytes
        if opened.qp == "ud" and size > max_payload:
            raise LimitError(
                f"a datagram on {self._device} can be at most {max_payload} bytes long (one "
                f"packet), not {size}"
            )
        exposed = self._outbox if opened.operation == "read" else self._inbox
        return self._endpoint.pack() + MEMORY.pack(exposed.addr, exposed.rkey)

    def use(self, token: bytes) -> None:
        """Connect to the peer's queue pair, using the endpoint in `token`."""
        endpoint, memory = token[: -MEMORY.size], token[-MEMORY.size :]
        if len(memory) != MEMORY.size:
            raise ProtocolError(f"the peer's queue pair token is too short: {len(token)} bytes")
        remote = verbs.Endpoint.unpack(endpoint)
        self._remote = MEMORY.unpack(memory)
        qp = self.queue.qp
        if qp.qp_type is verbs.QPType.UD:
            qp.start(self._endpoint)
            self._destination = qp.destination(self._endpoint, remote)
        else:
            access = RIGHTS[self._opened.operation] & ~verbs.AccessFlags.LOCAL_WRITE
            qp.connect(self._endpoint, remote, access=access)
        self._ring: ReceiveRing = self.queue.receives(*self._receives)

    def post(self, numbers: range) -> list[Completed]:
        """Post all operations with one doorbell. Only the last operation generates a completion."""
        requests: list[verbs.SendWorkRequest] = []
        with verbs.SendBatch(requests.extend) as batch:
            for number in numbers:
                signaled = number == numbers[-1]
                imm, inline = self.imm(number), self._inline
                match self._opened.operation:
                    case "send":
                        batch.send(
                            [self._piece],
                            to=self._destination,
                            imm=imm,
                            signaled=signaled,
                            inline=inline,
                        )
                    case "write":
                        batch.write(
                            [self._piece], *self._remote, imm=imm, signaled=signaled, inline=inline
                        )
                    case _:
                        batch.read([self._target], *self._remote, signaled=signaled)
        return self.queue.submit_nowait(requests)

    def begin(self, number: int) -> Completed:
        (completed,) = self.post(range(number, number + 1))
        return completed

    def operate(self, number: int) -> Completed:
        return self.begin(number)

    def receive(self) -> Awaitable[Arrived]:
        return self._ring.get()

    async def ping(self, run: Run) -> None:
        """Run operations one at a time, waiting for the peer's response to each.

        Each operation's completion is awaited only after the response has arrived. An operation
        completes before its response arrives, so awaiting the completion takes no extra time.
        """
        while run.done < run.limit:
            start = perf_counter()
            sent = self.begin(run.done)
            arrived = await self.receive()
            await sent
            run.times.append(perf_counter() - start)
            run.record_response(self, arrived)

    def check(self, arrived: Arrived, number: int | None, compare_payload: bool) -> str:
        completion, view = arrived
        if number is not None and (wrong := imm_mismatch(completion.imm_data, self.imm(number))):
            return wrong
        # The view of a datagram begins with the global routing header.
        payload, expected = view[self._header_size :], self._expected
        if self._opened.operation == "send" and (compare_payload or len(payload) != len(expected)):
            return difference(payload, expected)
        return ""

    async def flood(self, run: Run) -> None:
        """Keep as many operations in flight as the depth allows.

        Only every `moderation`-th operation and the last one generate a completion.
        """
        waiting = deque[Completed]()
        while run.started < run.limit:
            count = min(self._opened.moderation, run.limit - run.started)
            while len(waiting) + count > run.depth:
                await waiting.popleft()
                run.done += 1
            waiting += self.post(range(run.started, run.started + count))
            run.started += count
        for future in waiting:
            await future
            run.done += 1

    def verify(self, own_operations: int, peer_operations: int) -> str:
        """Verify the data that reads or writes have placed in this side's memory.

        Returns a description of the first error, or an empty string.
        """
        done = {"send": 0, "write": peer_operations, "read": own_operations}[self._opened.operation]
        return difference(self._inbox.buf[: len(self._expected)], self._expected) if done else ""

    def release(self) -> None:
        self._stack.close()
