"""Random programs for both ends of a connection, and a simple model of their expected results.

A program is a list of steps, each for one of the two sides. `play` starts them in order, each as
its own task, and the model records each operation and its result. `End.check` then compares order
and bytes, and checks that nothing is lost or duplicated unless it was cancelled. When a message is
received, all data written before it must have arrived.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from aiordma import (
    BufferStateError,
    Config,
    Connection,
    ConnectionBrokenError,
    ConnectionClosedError,
    Message,
    MessageTooLongError,
    OutcomeUnknownError,
    RemoteRegion,
    Rights,
    Share,
)
from aiordma._core.connection_states import ConnectionState
from aiordma._core.frames import HEADER_SIZE
from aiordma.errors import LeaseEndedError, QuotaError, RequestRefusedError, WorkCompletionError
from aiordma.mr_pool import Region

from .connection_factory import ALL, ALONE, SMALL, ConnectionFactory, pattern, take_all, yield_loop
from .inside import figures

EAGER = SMALL.eager_size - HEADER_SIZE
STAGED = 64 << 10
SIZES = (0, 1, 8, 200, EAGER - 1, EAGER, EAGER + 1, 5000, STAGED, STAGED + 1, 200_000)

# The offsets of two atomic words, constant bytes and cells in each side's shared memory. Each cell
# is written at most once.
SUM, WORD, CONSTANT, CELLS = 0, 8, 64, 64 + STAGED + 1
ARENA = 2 << 20
ENDED = (ConnectionClosedError, ConnectionBrokenError)
UNKNOWN = -1
UNCHANGED = pattern(STAGED + 1)
LAST = 0xFFFFFFFF  # immediate data of the last message of each side
SMALL_POOL = 4 << 20

SIDES = (0, 1)
CELL_SIZES = (0, 1, 8, 1000, 5000, STAGED, STAGED + 1)
IMMS = (None, None, 0, 7, 0xFFFFFFFE)
COUNTS = range(100)
PIECES = (100, 5000)  # bytes; the longer ones are read separately
SOURCES = ("bytes", "bytearray", "pool", "registered")
CUT = (
    ("send", 100, None),
    ("send", 200_000, None, "bytearray"),
    ("recv",),
    ("recv_into", 200_000),
    ("recv_with", 200_000),
    ("write", STAGED + 1, False),
    ("write", 1000, True),
    ("read", STAGED + 1),
    ("fetch_and_add",),
    ("borrow", 5000, True),
)
HOLD = ("no", "no", "message", "view", "forgotten")
TURNS = (1, 1, 2, 3, 5, 10, 20)

# The steps, each with the possible values of its arguments. A step listed twice is twice as likely.
# For values wrapped in a list, the argument is a list of up to four of them.
STEPS: tuple[tuple[Any, ...], ...] = (
    ("send", SIZES, IMMS, SOURCES),
    ("send_nowait", SIZES, IMMS),
    ("send_pieces", range(2, 24), PIECES),
    ("recv", HOLD),
    ("take", range(8)),
    ("recv_into", SIZES),
    ("recv_with", SIZES),
    ("forward",),
    ("iterate",),
    ("lease", (1, 5000, 100_000)),
    ("exhaust", TURNS),
    ("release",),
    ("cancel", COUNTS),
    ("cancel", COUNTS),
    ("cut", CUT, TURNS),
    ("cut", CUT, TURNS),
    ("recv_and_cancel", COUNTS),
    ("rest",),
    ("write", CELL_SIZES, (False, False, True)),
    ("read", CELL_SIZES),
    ("fetch_and_add",),
    ("compare_and_swap", COUNTS),
    ("batch", [CELL_SIZES]),
    ("share", (1, 100, 5000)),
    ("borrow", (1, 100, 5000), (False, True)),
    ("recv_region",),
    ("recv_buffer",),
    ("burst", [(0, 1, 100, EAGER, 5000)]),
    ("turns", TURNS),
    ("turns", TURNS),
)
LONG = (700_001, 2 << 20, 3 << 20)
STRIPED: tuple[tuple[Any, ...], ...] = (
    ("send", LONG, IMMS, SOURCES[:2]),
    ("send_nowait", LONG, (None,)),
    ("send_pieces", (3, 20), (100_000,)),
    ("recv_into", LONG),
)
"""Steps with messages that are striped over several rails."""
ENDINGS = (("close",), ("abort",))
Program = list[tuple[Any, ...]]


def drawn(chance: random.Random, most: int, steps: Sequence[tuple[Any, ...]]) -> Program:
    """Return a random program of at most `most` steps, drawn from `steps`."""

    def argument(values: Sequence[Any]) -> Any:
        if isinstance(values, list):
            return [chance.choice(values[0]) for _ in range(chance.randrange(5))]
        return chance.choice(values)

    picked = (chance.choice(steps) for _ in range(chance.randrange(most + 1)))
    return [(name, chance.choice(SIDES), *map(argument, values)) for name, *values in picked]


def crossing(chance: random.Random) -> Program:
    """Return a program in which each side sends, and then borrows and receives concurrently."""
    program: Program = []
    for _ in range(chance.randrange(1, 4)):
        count, taken = chance.choices((1, 4, 6), k=2)
        size, asked = chance.choice((ALONE, 5000)), chance.randrange(4)
        program += [("send_nowait", side, size, None) for side in SIDES for _ in range(count)]
        at_once: Program = [("borrow", side, 1, False) for side in SIDES for _ in range(asked)]
        at_once += [("recv", side, "no") for side in SIDES for _ in range(taken)]
        if chance.random() < 0.5:
            chance.shuffle(at_once)
        program += [("rest", 0), *at_once, ("rest", 0)]
    return program


def racing(chance: random.Random) -> Program:
    """Return a program whose sides send and receive while one or both close."""
    sizes = chance.choice(((1, 100), (100, 3000)))
    program: Program = [("take", side, chance.randrange(20)) for side in SIDES]
    for _ in range(chance.randrange(20)):
        program += [("send_nowait", side, chance.choice(sizes), None) for side in SIDES]
        program += [("turns", 0, chance.randrange(3))]
    return [*program, *(("close", side) for side in chance.choice(((0,), (1,), SIDES)))]


@dataclass(eq=False)
class Sent:
    """The sender's record of a message. `end` is the outcome of the send."""

    data: bytes
    imm: int | None
    written: int | None = None
    end: str = "open"

    def is_seen_as(self, got: list[Got]) -> bool:
        """Return whether the next message that the receiver saw is this one."""
        return bool(got) and got[0] in (
            Got(self.data, self.imm, self.written),
            Got(self.data, self.imm, UNKNOWN),
        )


@dataclass
class Got:
    """A message as the receiver saw it. After `recv_into` or `recv_with`, `written` is UNKNOWN."""

    data: bytes
    imm: int | None
    written: int | None


@dataclass(eq=False)
class Cell:
    """Data that a task of this side wrote into the peer's memory."""

    start: int
    data: bytes
    by: asyncio.Task[Any] | None
    state: str = "open"

    def is_in(self, memory: bytearray) -> bool:
        return memory[self.start : self.start + len(self.data)] == self.data

    @property
    def is_wanted(self) -> bool:
        return self.state not in ("maybe", "unknown") and not (
            self.by is not None and self.by.cancelling()
        )


@dataclass
class Common:
    """The expected results of one side's atomic operations on the peer's memory."""

    numbers: int = 0
    added: list[int] = field(default_factory=list)
    maybe_added: list[int] = field(default_factory=list)
    swaps: list[tuple[int, int, bool]] = field(default_factory=list)  # expected, desired, done
    maybe_swapped: list[int] = field(default_factory=list)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers


class End:
    """One side: its connection, its part of the model, and its tasks."""

    def __init__(self, conn: Connection) -> None:
        self.conn = conn
        self.model = Common()  # expected changes by this side in the peer's memory
        self.arena = bytearray(ARENA)
        self.arena[CONSTANT:CELLS] = UNCHANGED
        self.region: Region | None = None
        self.share: Share | None = None
        self.remote: RemoteRegion | None = None
        self.peer: End = self
        self.sent: list[Sent] = []
        self.got: list[Got] = []
        self.got_last = asyncio.Event()
        self.has_sent_all = False
        self.held: list[tuple[Message | memoryview, bytes]] = []
        config = conn._endpoint.config
        self.is_leased = config.lease is not None
        self.may_wait = config.pool_limit == SMALL_POOL
        """Whether operations may wait for memory, while messages and writes overtake them."""
        self.own: list[bytearray] = []
        """The user's memory, which must not be pinned in the end."""
        self.cells: list[Cell] = []
        self.next_cell = CELLS
        self.behind: dict[tuple[bytes, int | None], int] = {}
        """Number of cells written before each message, or before the first of equal messages."""
        self.seen = 0
        self.handed: set[bytes] = set()
        self.shared: set[bytes] = set()
        self.tasks: list[asyncio.Future[None]] = []
        self.receiving: list[asyncio.Future[None]] = []
        self.steady: set[asyncio.Future[None]] = set()

    async def open(self, peer: End) -> None:
        """Exchange arenas with the peer, which must call this method concurrently."""
        self.peer = peer
        self.region = self.conn.register(self.arena)
        self.share = await self.conn.send_region(self.region, access=ALL)
        remote = await self.conn.recv_region()
        self.remote = remote

    def start(self, step: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(step))

    def start_steady(self, step: Coroutine[Any, Any, None]) -> None:
        """Start a step that must not be cancelled.

        Cancelling a share would revoke it while the peer may still use it, which breaks the
        connection. A cancelled `close` may never have run.
        """
        self.start(step)
        self.steady.add(self.tasks[-1])

    def start_receiving(self, step: Coroutine[Any, Any, None]) -> None:
        """Start a receiving step. `drain` cancels it if the peer sends too few messages."""
        self.start(step)
        self.receiving.append(self.tasks[-1])

    async def empty(self) -> None:
        """Release all memory after the connection ended, including unreceived messages."""
        self.release_all()
        with suppress(*ENDED):
            while True:
                await self.recv()
        with suppress(*ENDED):
            while True:
                (await self.conn.recv_buffer()).release()
        if self.region is not None:
            self.region.close()
        for memory in self.own:
            memory.clear()  # raises BufferError if the memory is still pinned

    # ---- messages --------------------------------------------------------------------------------

    async def send(self, size: int, imm: int | None, source: str = "bytes") -> None:
        data = pattern(size, self.model.number())
        memory: Any = nullcontext(data)
        if source == "bytearray":
            memory = nullcontext(self.lent(data))
        elif source == "registered" and size:
            memory = self.conn.register(self.lent(data))
        elif source == "pool" and size:
            try:
                memory = self.conn.alloc(size)
            except QuotaError:
                return
            memory.view[:] = data
        with memory as it:  # left before the message has been sent
            send = self.conn.send if source in SOURCES[:2] else self.conn.send_nowait
            sending = send(it, imm=imm)
            sent = self._new(data, imm)
        await self._ending(sent, sending)
        if source == "bytearray":
            it.clear()

    def lent(self, data: bytes | int) -> bytearray:
        self.own.append(bytearray(data))
        return self.own[-1]

    def _new(self, data: bytes, imm: int | None, written: int | None = None) -> Sent:
        sent = Sent(data, imm, written)
        self.sent.append(sent)
        self.behind.setdefault((data, imm), len(self.cells))
        return sent

    async def send_pieces(self, count: int, size: int) -> None:
        pieces = [self.lent(pattern(size, self.model.number())) for _ in range(count)]
        sent = self._new(b"".join(pieces), None)
        await self._ending(sent, self.conn.send(pieces))
        for piece in pieces:
            piece.clear()

    def send_nowait(self, size: int, imm: int | None) -> None:
        data = pattern(size, self.model.number())
        try:
            future = self.conn.send_nowait(data, imm=imm)
        except ENDED:
            return
        sent = self._new(data, imm)

        def ended(future: asyncio.Future[None]) -> None:
            failed = not future.cancelled() and future.exception() is not None
            sent.end = "cancelled" if future.cancelled() else "failed" if failed else "sent"

        future.add_done_callback(ended)
        self.tasks.append(future)

    def burst(self, lengths: list[int]) -> None:
        """Send several messages at once, so that some are bundled and others wait for credits."""
        for size in lengths:
            self.send_nowait(size, None)

    async def _ending(self, sent: Sent, awaited: Awaitable[None]) -> None:
        try:
            await awaited
            sent.end = "sent"
        except asyncio.CancelledError:
            sent.end = "cancelled"
            raise
        except (OutcomeUnknownError, BufferStateError):
            sent.end = "unknown"
            raise
        except BaseException:
            sent.end = "failed"
            raise

    def _received(self, got: Got) -> None:
        if not self.is_leased and not self.may_wait:  # otherwise a write may be rejected
            behind = self.peer.behind.get((got.data, got.imm), 0)
            for cell in self.peer.cells[self.seen : behind]:
                assert cell.is_in(self.arena) or not cell.is_wanted, "came before a write"
            self.seen = max(self.seen, behind)
        if got.imm == LAST:
            self.got_last.set()
        else:
            self.got.append(got)

    async def recv(self, hold: str = "no") -> None:
        self._take(await self.conn.recv(), hold)

    async def forward(self) -> None:
        """Send a received message back, and release it before the send completes."""
        with await self.conn.recv() as message:
            data = bytes(message)
            self._received(Got(data, message.imm, message.written))
            if self.has_sent_all:
                return
            sending = self.conn.send_nowait(message)
            sent = self._new(data, None)
        await self._ending(sent, sending)

    async def iterate(self) -> None:
        async for message in self.conn:
            self._take(message, "no")
            return

    def _take(self, message: Message, hold: str) -> None:
        content = bytes(message)
        self._received(Got(content, message.imm, message.written))
        if hold == "message":
            self.held.append((message, content))
            return
        if hold == "view":
            self.held.append((message.data, content))
        if hold != "forgotten":
            message.release()

    async def recv_and_cancel(self, number: int) -> None:
        """Receive a message, then cancel another task that the same arrival may have woken."""
        await self.recv()
        self.cancel(number)

    def cancel(self, number: int) -> None:
        running = [one for one in self.tasks if not (one.done() or one in self.steady)]
        if running:
            running[number % len(running)].cancel()

    async def recv_into(self, size: int) -> None:
        target = self.lent(size)
        try:
            length, imm = await self.conn.recv_into(target)
        except MessageTooLongError:
            return  # the message stays queued
        self._received(Got(bytes(target[:length]), imm, UNKNOWN))

    async def recv_with(self, size: int) -> None:
        def allocate(length: int) -> bytearray:
            if length > size:
                raise LookupError(length)
            return self.lent(length)

        with suppress(LookupError, MessageTooLongError):  # the message stays queued
            target, length, imm = await self.conn.recv_with(allocate)
            self._received(Got(bytes(target[:length]), imm, UNKNOWN))

    async def lease(self, size: int) -> None:
        with await self.conn.lease(size):
            await yield_loop(1)

    async def exhaust(self, turns: int) -> None:
        """Hold all free pool memory for `turns` loop iterations."""
        held = take_all(self.conn) if self.may_wait else []
        try:
            await yield_loop(turns)
        finally:
            for buffer in held:
                buffer.release()

    def release(self) -> None:
        if self.held:
            memory, content = self.held.pop(0)
            assert memory == content, "the memory of a message changed while it was held"
            memory.release()

    def release_all(self) -> None:
        while self.held:
            self.release()

    # ---- the other's memory ----------------------------------------------------------------------

    def cell(self, size: int) -> Cell:
        start = self.next_cell
        self.next_cell = (start + size + 7) & ~7
        data = pattern(size, self.model.number())
        self.cells.append(Cell(start, data, asyncio.current_task()))
        return self.cells[-1]

    @property
    def there(self) -> RemoteRegion:
        assert self.remote is not None
        return self.remote

    async def write(self, size: int, told: bool) -> None:
        cell = self.cell(size)
        target = self.there[cell.start : cell.start + size]
        sure = "maybe"
        try:
            if told and not self.may_wait:
                sent = self._new(b"", self.model.number(), size)
                writing = self.conn.write(self.lent(cell.data), target, imm=sent.imm)
                await self._ending(sent, writing)
            else:
                await self.conn.write(self.lent(cell.data), target)
            sure = "written"
        except OutcomeUnknownError:
            sure = "unknown"
            raise
        finally:
            cell.state = sure

    async def read(self, size: int) -> None:
        target = self.lent(size)
        await self.conn.read(self.there[CONSTANT : CONSTANT + size], target)
        assert target == UNCHANGED[:size]

    async def fetch_and_add(self) -> None:
        bit = 1 << len(self.model.added + self.model.maybe_added)
        self.model.maybe_added.append(bit)
        old = await self.conn.fetch_and_add(self.there[SUM : SUM + 8], bit)
        self._has_added(bit, old)

    def _has_added(self, bit: int, old: int) -> None:
        assert not old & bit, "added twice"
        self.model.maybe_added.remove(bit)
        self.model.added.append(bit)

    async def compare_and_swap(self, guess: int) -> None:
        model = self.model
        known = [0, *(desired for _, desired, done in model.swaps if done)]
        expected, desired = known[-1 - guess % min(3, len(known))], model.number()
        model.maybe_swapped.append(desired)
        old = await self.conn.compare_and_swap(self.there[WORD : WORD + 8], expected, desired)
        model.maybe_swapped.remove(desired)
        model.swaps.append((expected, desired, old == expected))

    async def batch(self, lengths: list[int]) -> None:
        """Execute writes, a read and an addition in a single batch."""
        read = self.lent(100)
        cells = [self.cell(size) for size in lengths]
        bit = 1 << len(self.model.added + self.model.maybe_added)
        self.model.maybe_added.append(bit)
        sure = "maybe"
        try:
            async with self.conn.batch() as batch:
                for cell in cells:
                    batch.write(
                        self.lent(cell.data), self.there[cell.start : cell.start + len(cell.data)]
                    )
                batch.read(self.there[CONSTANT : CONSTANT + 100], read)
                old = batch.fetch_and_add(self.there[SUM : SUM + 8], bit)
            sure = "written"
        except OutcomeUnknownError:
            sure = "unknown"
            raise
        except QuotaError:  # no pool memory for the addition's result
            return
        finally:
            for cell in cells:
                cell.state = sure
        assert read == UNCHANGED[:100]
        self._has_added(bit, old.result())

    # ---- regions ---------------------------------------------------------------------------------

    async def lend(self, size: int) -> None:
        """Share a new buffer with the peer, which may read it after receiving the region."""
        content = pattern(size, self.model.number())
        with suppress(QuotaError), self.conn.alloc(size) as buffer:
            buffer.view[:] = content
            self.shared.add(content)
            await self.conn.send_region(buffer, access=Rights.READ)

    async def borrow(self, size: int, hand_over: bool) -> None:
        """Borrow memory of the peer, write and read it, then release it or hand it over."""
        try:
            region = await self.conn.request_region(size)
        except RequestRefusedError:
            if self.may_wait:
                return
            raise
        content = pattern(size, self.model.number())
        await self.conn.write(content, region[:])
        again = bytearray(size)
        await self.conn.read(region[:], again)
        assert again == content
        if hand_over:
            self.handed.add(content)
            await self.conn.hand_over(region)
        else:
            await region.release()

    async def recv_region(self) -> None:
        region = await self.conn.recv_region()
        target = bytearray(len(region))
        await self.conn.read(region[:], target)
        assert bytes(target) in self.peer.shared
        await region.release()

    async def recv_buffer(self) -> None:
        with await self.conn.recv_buffer() as buffer:
            assert bytes(buffer.view) in self.peer.handed

    # ---- the end ---------------------------------------------------------------------------------

    def check_share(self) -> None:
        """Check that a share without a lease is valid while the connection is open."""
        if self.conn._state is ConnectionState.OPEN and not self.is_leased:
            assert self.share is not None
            assert not self.share.revoked, "a region has ended by itself"

    async def drain(self) -> None:
        """Receive messages up to the peer's last one, then cancel the remaining receiving tasks."""
        while not self.got_last.is_set():
            taking = asyncio.create_task(self.recv())
            last = asyncio.create_task(self.got_last.wait())
            await asyncio.wait([taking, last], return_when=asyncio.FIRST_COMPLETED)
            last.cancel()
            taking.cancel()
            with suppress(asyncio.CancelledError):
                await taking
        for task in self.receiving:
            task.cancel()

    def check(self, *, complete: bool, closed: bool) -> None:
        """Check that the peer received exactly the messages that this side sent.

        `complete` is False if the connection ended early, and `closed` is True if it was not
        aborted. A closed connection must have delivered every message before the first unconfirmed
        one.
        """
        # `received` holds all possible numbers of messages received so far. The number is ambiguous
        # because cancelled messages may be missing, and messages may have equal bytes.
        received = {0}
        for sent in self.sent:
            closed = closed and sent.end == "sent"
            may_be_lost = sent.end in ("cancelled", "unknown") or not (complete or closed)
            skipped = received if may_be_lost else set()
            received = skipped | {
                n + 1 for n in received if sent.is_seen_as(self.peer.got[n : n + 1])
            }
            assert received, f"lost: a message of {len(sent.data)} bytes, {sent.end}"
        assert len(self.peer.got) in received, "received what was not sent, or in another order"
        memory = self.peer.arena
        for cell in self.cells:
            nothing = memory[cell.start : cell.start + len(cell.data)] == bytes(len(cell.data))
            in_part = nothing or cell.state == "unknown" or not complete
            assert cell.is_in(memory) or (cell.state != "written" and in_part)
        total = int.from_bytes(memory[SUM : SUM + 8], "little")
        for bit in self.model.added:
            assert total & bit, "an addition is lost"
            total -= bit
        assert not total & ~sum(self.model.maybe_added), "added what was not asked for"
        done = [(expected, desired) for expected, desired, swapped in self.model.swaps if swapped]
        assert len({expected for expected, _ in done}) == len(done), "swapped twice"
        word = int.from_bytes(memory[WORD : WORD + 8], "little")
        assert word in (0, *(desired for _, desired in done), *self.model.maybe_swapped)


async def cancel_after(turns: int, task: asyncio.Future[None]) -> None:
    await yield_loop(turns)
    task.cancel()


async def play(factory: ConnectionFactory, ends: tuple[End, End], program: Program) -> None:
    """Start the steps in order. Only "turns" and "rest" steps let other tasks run."""
    for name, side, *arguments in program:
        end = ends[side]
        match name:
            case "send_nowait" | "burst" | "release" | "cancel":
                getattr(end, name)(*arguments)
            case "turns":
                await yield_loop(arguments[0])
            case "rest":
                await factory.rest(*(end.conn for end in ends))
            case "take":
                for _ in range(arguments[0]):
                    end.start_receiving(end.recv())
            case name if name.startswith(("recv", "iterate", "forward")):
                end.start_receiving(getattr(end, name)(*arguments))
            case "share":
                end.start_steady(end.lend(*arguments))
            case "cut":
                (kind, *more), turns = arguments
                start = end.start
                if kind.startswith("recv"):
                    start = end.start_receiving
                    end.peer.send_nowait((more or [100])[0], None)
                start(getattr(end, kind)(*more))
                end.start_steady(cancel_after(turns, end.tasks[-1]))
            case "close":
                end.start_steady(end.conn.close())
            case "abort":
                end.conn.abort()
            case _:
                end.start(getattr(end, name)(*arguments))


# Errors that a task may raise once its connection has ended. If a task's own operation failed, for
# example because a key was revoked, the task gets the device's error.
EXPECTED = (*ENDED, WorkCompletionError, LeaseEndedError, RequestRefusedError)


async def run_seed(
    factory: ConnectionFactory, seed: int, more: tuple[tuple[Any, ...], ...] = ()
) -> None:
    """Run a random program with a random configuration, and check the final state.

    The program may end the connection. `more` lists additional steps to draw from.
    """
    chance = random.Random(seed)
    config = replace(
        SMALL,
        max_eager_size=chance.choice((SMALL.eager_size, 8 << 10)),
        data_receives=chance.choice((1, 4, 32)),
        send_queue=chance.choice((8, 16, 64)),
        fetch_ahead=chance.choice((0, 64 << 10)),
        max_regions=64,
        lease=chance.choice((None, None, None, 0.003, 0.03)),
        pool_limit=SMALL.pool_limit if more else chance.choice((SMALL.pool_limit, SMALL_POOL)),
        close_timeout=0.3 * factory.slow,
    )
    server = replace(
        config,
        max_eager_size=chance.choice((SMALL.eager_size, 8 << 10)),
        data_receives=chance.choice((1, 4, 32)),
    )
    # A program with few kinds of steps reaches deeper states than one with all kinds.
    steps = chance.sample(STEPS, chance.choice((4, 6, 8, len(STEPS))))
    steps += more
    program = drawn(chance, 48, steps) if chance.random() < 0.8 else crossing(chance)
    complete = config.lease is None and chance.random() < 0.5
    if not complete:
        ending, *_ = drawn(chance, 1, ENDINGS) or [("close", 0)]
        program += [ending, *drawn(chance, 8, STEPS + ENDINGS)]
    if seed % 8 == 5:
        complete, program, config = False, racing(chance), replace(config, lease=None)
    await run_program(factory, config, program, complete=complete, server=server)


async def run_program(
    factory: ConnectionFactory,
    config: Config,
    program: Program,
    *,
    complete: bool,
    server: Config | None = None,
) -> None:
    async with factory.pair(config, server=server) as conns:
        first, second = ends = End(conns[0]), End(conns[1])
        drivers = {end.conn._endpoint.driver for end in ends}
        await asyncio.gather(first.open(second), second.open(first))
        try:
            async with factory.within(10):
                await play(factory, ends, program)
                await factory.rest(*conns)
                if complete:
                    await settle(first, second)
                if tasks := tasks_of(ends):
                    await asyncio.wait(tasks)
                for end in ends:
                    end.release_all()
                gc.collect()
                await factory.rest(*conns)
                for end in ends:
                    end.check_share()
                if complete:
                    while any(conn._queue.outstanding for conn in conns):
                        await yield_loop(1)  # a threaded device may still be sending credits
                    check_pool(*ends)
        finally:  # if the test fails
            for task in tasks_of(ends):
                task.cancel()
    for ended in tasks_of(ends):
        error = None if ended.cancelled() else ended.exception()
        if isinstance(error, LeaseEndedError) and config.lease is None:
            raise error  # the owner has not reclaimed anything
        if isinstance(error, OutcomeUnknownError | BufferStateError) and factory.loses_work:
            continue
        if error is not None and (complete or not isinstance(error, EXPECTED)):
            raise error
    closed = config.lease is None and all(name != "abort" for name, *_ in program)
    for end in ends:
        await end.empty()
    for end in ends:
        end.check(complete=complete, closed=closed)
    for driver in drivers:
        assert not len(driver.table)
        assert not driver.pool.statistics().leases


def tasks_of(ends: tuple[End, End]) -> list[asyncio.Future[None]]:
    return [task for end in ends for task in end.tasks]


def check_pool(*ends: End) -> None:
    """Check that no pool block has leaked.

    Each connection keeps its receives, their larger replacements, and spare blocks for control
    messages. With several rails, it also keeps the frames in the journal and one receive for each
    rail except the lead. Shares and buffers handed over but not received may keep more blocks.
    """
    names = ("receives", "larger_blocks", "spare_blocks")
    kept = sum(figures(end.conn)[name] for end in ends for name in names)
    for end in ends:
        if (journal := end.conn._messages.outbox.journal).is_enabled:
            assert end.conn._rails is not None
            others = [
                rail for rail in end.conn._rails.rails if rail is not end.conn._rails.lead_rail
            ]
            kept += len(journal) + sum(rail.queue is not None for rail in others)
    pools = {end.conn._endpoint.driver.pool for end in ends}
    pools |= {driver.pool for end in ends for driver in end.conn._memory._held_drivers}
    leases = sum(pool.leases for pool in pools)
    more = any(end.handed or end.conn._sharing.shared > 1 for end in ends)
    assert leases == kept or more, f"{leases}, not {kept}"


async def settle(first: End, second: End) -> None:
    """Send a last message from both sides, and receive everything up to the peer's last message."""
    for end in (first, second):
        end.release_all()
        end.has_sent_all = True
        end.start_steady(end.conn.send(b"", imm=LAST))
    await asyncio.gather(first.drain(), second.drain())
