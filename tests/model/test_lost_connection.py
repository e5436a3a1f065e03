"""Both ends of a connection from the pure parts alone, on a wire that is lost at any step.

Two `End`s talk in real frames: credits decide what may be sent, blocks come from slabs, and what is
under way stands in a table, which is native in earnest and the shortest there is here.  A device in
between delivers in order, asks for a receive that is posted, and completes.  Then the wire breaks:
what was posted is flushed, or never heard of again, and each end notices when it does.  Whatever
the order: every message that was reported as sent has arrived, in order and once; every waiter
hears of its end exactly once; every slot, entry and byte comes back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma._core import protocol
from aiordma._core.frames import HEADER_SIZE, FrameKind
from aiordma._core.handshake import Hello
from aiordma._core.operations import OperationKind
from aiordma._core.protocol import MIN_RECEIVE
from aiordma._core.slabs import SlabAllocator

from .credits import Credits
from .frames import pack_header, unpack_header

SEND, RECV = OperationKind.SEND, OperationKind.RECV
DATA, CONTROL, CREDIT = FrameKind.DATA, FrameKind.CONTROL, FrameKind.CREDIT
Place = tuple[int, int]


@dataclass
class Sent:
    """One frame on its way, and how its waiter's wait ended."""

    frame: bytes
    place: Place
    number: int | None
    ends: list[str] = field(default_factory=list)
    cancelled: bool = False

    def end(self, how: str) -> None:
        self.ends.append("cancelled" if self.cancelled else how)


@dataclass
class Slot:
    """Something under way."""

    wr_id: int
    kind: OperationKind
    memory: Sent | Place


@dataclass
class Device:
    """What one end has posted, in order, and completions that have not been polled yet."""

    sends: deque[tuple[int, bytes]] = field(default_factory=deque)
    receives: deque[int] = field(default_factory=deque)
    completions: deque[tuple[int, bytes | None, bool]] = field(default_factory=deque)

    def flush(self) -> None:
        """The queue pair has failed: all that was posted completes, with an error."""
        posted = [wr_id for wr_id, _ in self.sends] + list(self.receives)
        self.completions += [(wr_id, None, False) for wr_id in posted]
        self.sends.clear()
        self.receives.clear()


class End:
    def __init__(self, ours: Hello, theirs: Hello, capacity: int) -> None:
        self.credits = Credits(
            data_receives=ours.data_receives,
            control_receives=ours.control_receives,
            peer_data_receives=theirs.data_receives,
            peer_control_receives=theirs.control_receives,
        )
        self.table: dict[int, Slot] = {}
        self.posted = 0
        self.capacity = capacity
        self.slabs = SlabAllocator(1 << 16, smallest=1024)
        self.device = Device()
        self.all_sent: list[Sent] = []
        self.arrived: deque[tuple[int, Place]] = deque()
        self.taken: list[int] = []
        self.pongs = 0
        self.numbers = 0
        self.failed = False
        for _ in range(ours.data_receives + ours.control_receives):
            self.post_receive(self.block())

    def block(self) -> Place:
        while (place := self.slabs.allocate(MIN_RECEIVE)) is None:
            self.slabs.add_slab()
        return place

    def post_receive(self, place: Place) -> None:
        slot = self.under_way(RECV, place)
        self.device.receives.append(slot.wr_id)

    def under_way(self, kind: OperationKind, memory: Sent | Place) -> Slot:
        self.posted += 1
        slot = self.table[self.posted] = Slot(self.posted, kind, memory)
        return slot

    @property
    def sends(self) -> list[Slot]:
        return [slot for slot in self.table.values() if slot.kind is SEND]

    @property
    def room(self) -> int:
        return self.capacity - len(self.sends)

    # ---- what may happen; the answer is whether it could -------------------------------------

    def send(self) -> bool:
        if self.failed or not self.credits.data_credits or not self.room:
            return False
        content = self.numbers.to_bytes(4, "little")
        self._post(DATA, content, self.credits.spend_data(), self.numbers)
        self.numbers += 1
        return True

    def ping(self) -> bool:
        if self.failed or not self.credits.control_credits or not self.room:
            return False
        content = protocol.encode(protocol.Ping(1))
        self._post(CONTROL, content, self.credits.spend_control(), None)
        return True

    def give_back(self) -> bool:
        if self.failed or not self.credits.credit_frame_due or not self.room:
            return False
        self._post(CREDIT, b"", self.credits.spend_credit(), None)
        return True

    def _post(
        self, kind: FrameKind, content: bytes, credits: tuple[int, int], number: int | None
    ) -> None:
        frame = bytearray(HEADER_SIZE) + content
        pack_header(frame, 0, kind, *credits)
        sent = Sent(bytes(frame), self.block(), number)
        slot = self.under_way(SEND, sent)
        self.device.sends.append((slot.wr_id, sent.frame))
        self.all_sent.append(sent)

    def cancel(self) -> bool:
        """The oldest waiter gives up; what was posted goes its way."""
        for slot in self.sends:
            assert isinstance(slot.memory, Sent)
            if not slot.memory.cancelled:
                slot.memory.cancelled = True
                return True
        return False

    def take(self) -> bool:
        """The user receives a message, and its receive is posted again."""
        if not self.arrived:
            return False
        number, place = self.arrived.popleft()
        self.taken.append(number)
        if self.failed:
            self.slabs.free(*place)
        else:
            self.post_receive(place)
            self.credits.reposted_data()
        return True

    def poll(self) -> bool:
        if not self.device.completions:
            return False
        wr_id, frame, good = self.device.completions.popleft()
        slot = self.table.pop(wr_id, None)
        if slot is None:
            assert self.failed  # it came after the end
        elif slot.kind is RECV:
            place = slot.memory
            assert isinstance(place, tuple)
            if frame is None or self.failed:
                self.slabs.free(*place)
            else:
                self._received(frame, place)
        else:
            self._finish(slot, "sent" if good else "failed")
            if not good:
                self.fail()
        return True

    def _received(self, frame: bytes, place: Place) -> None:
        kind, control, data, _ = unpack_header(frame)
        self.credits.received(kind, control, data)
        if kind is DATA:
            self.arrived.append((int.from_bytes(frame[HEADER_SIZE:], "little"), place))
            return
        self.post_receive(place)
        self.credits.reposted_control()
        if kind is CONTROL:
            assert protocol.decode(frame[HEADER_SIZE:]) == protocol.Ping(1)
            self.pongs += 1

    def _finish(self, slot: Slot, how: str) -> None:
        """Its completion is in, or the queue pair is gone: the memory comes back."""
        sent = slot.memory
        assert isinstance(sent, Sent)
        if not self.failed:
            sent.end(how)
        self.slabs.free(*sent.place)

    def fail(self) -> bool:
        """The end is noticed: all waiters are told at once, memory waits for the device."""
        if self.failed:
            return False
        for slot in self.sends:
            assert isinstance(slot.memory, Sent)
            slot.memory.end("failed")
        self.failed = True
        return True

    def destroy(self) -> None:
        """The queue pair is gone, and with it every claim on the memory."""
        self.fail()
        for slot in self.table.values():
            if isinstance(slot.memory, Sent):
                self._finish(slot, "failed")
            else:
                self.slabs.free(*slot.memory)
        self.table.clear()


class Wire:
    """Two ends; `lost` once it is broken."""

    def __init__(self, sizes: tuple[int, int, int, int], capacity: int) -> None:
        hellos = [
            Hello.unpack(
                Hello(
                    eager_size=MIN_RECEIVE,
                    data_receives=data,
                    control_receives=control,
                    max_message=1,
                    lend_quota=0,
                ).pack()
            )
            for data, control in (sizes[:2], sizes[2:])
        ]
        first, second = hellos
        self.ends = End(first, second, capacity), End(second, first, capacity)
        self.lost = False

    def deliver(self, number: int) -> bool:
        """The next frame of one end reaches the other, which must have a receive for it."""
        sender, receiver = self.ends[number], self.ends[1 - number]
        if self.lost or not sender.device.sends:
            return False
        wr_id, frame = sender.device.sends.popleft()
        assert receiver.device.receives, "a frame without a receive"
        receiver.device.completions.append((receiver.device.receives.popleft(), frame, True))
        sender.device.completions.append((wr_id, None, True))
        return True

    def step(self, name: str, number: int) -> bool:
        end = self.ends[number]
        match name:
            case "send":
                return end.send()
            case "deliver":
                return self.deliver(number)
            case "ping" | "give_back" | "cancel" | "take" | "poll":
                done: bool = getattr(end, name)()
                return done
            case "notice" if self.lost:  # by a disconnect: what has arrived is looked at first
                while end.poll():
                    pass
                return end.fail()
        return False

    def lose(self, flushes: tuple[bool, bool]) -> None:
        """A device may complete what was posted, or never say a word of it again."""
        self.lost = True
        for end, flush in zip(self.ends, flushes, strict=True):
            if flush:
                end.device.flush()

    def settle(self) -> None:
        """Until nothing more can happen by itself, users taking what comes."""
        names = ("poll", "deliver", "take", "give_back")
        while any(self.step(name, number) for name in names for number in (0, 1)):
            pass

    def finish(self) -> None:
        """The end of both; then everything must be back, and every report true."""
        for end in self.ends:
            while end.poll():
                pass
            end.destroy()
            while end.take():
                pass
        for end, peer in (self.ends, self.ends[::-1]):
            assert not len(end.table)
            end.slabs.check()
            assert not end.slabs.statistics().used_bytes
            assert [len(sent.ends) for sent in end.all_sent] == [1] * len(end.all_sent)
            assert peer.taken == list(range(len(peer.taken)))  # in order, none twice, none missing
            for sent in end.all_sent:
                if sent.number is not None and sent.ends == ["sent"]:
                    assert sent.number < len(peer.taken), "reported as sent, and never arrived"


STEPS = ("send", "ping", "give_back", "deliver", "poll", "take", "cancel")
sizes = st.tuples(*(st.integers(1, 4), st.integers(4, 6)) * 2)
steps = st.tuples(st.sampled_from((*STEPS, "notice")), st.integers(0, 1))
flushes = st.tuples(st.booleans(), st.booleans())
runs = st.lists(steps, max_size=60)


@settings(max_examples=200)
@given(sizes, st.integers(1, 5), runs, st.lists(steps, max_size=15), flushes)
def test_random_runs(
    sizes: tuple[int, int, int, int],
    capacity: int,
    before: list[tuple[str, int]],
    after: list[tuple[str, int]],
    flushes: tuple[bool, bool],
) -> None:
    wire = Wire(sizes, capacity)
    for step in before:
        wire.step(*step)
    wire.lose(flushes)
    for step in after:  # not noticed yet, or by one side only
        wire.step(*step)
    wire.finish()


@settings(max_examples=100)
@given(sizes, st.integers(1, 5), runs)
def test_without_a_loss_everything_arrives(
    sizes: tuple[int, int, int, int], capacity: int, run: list[tuple[str, int]]
) -> None:
    wire = Wire(sizes, capacity)
    for step in run:
        wire.step(*step)
    wire.settle()
    for end, peer in (wire.ends, wire.ends[::-1]):
        assert peer.taken == list(range(end.numbers))
        assert peer.pongs == sum(sent.frame[0] == CONTROL for sent in end.all_sent)
        assert end.credits.data_credits, "nothing is under way, and yet nothing can be sent"
        assert end.credits.control_credits
    wire.finish()


ROUND = [
    (name, number)
    for name in ("send", "ping", "deliver", "poll", "take", "give_back",
                 "send", "cancel", "deliver", "deliver", "poll", "poll", "take", "give_back")
    for number in (0, 1)
]  # fmt: skip


@pytest.mark.parametrize("flushes", [(True, True), (True, False), (False, False)])
def test_loss_at_every_step(flushes: tuple[bool, bool]) -> None:
    """Of three rounds of everything, with the smallest sizes there are."""
    run = ROUND * 3
    arrived = set()
    for length in range(len(run) + 1):
        wire = Wire((1, 4, 2, 4), 3)
        for step in run[:length]:
            wire.step(*step)
        wire.lose(flushes)
        for step in run[length:]:
            wire.step(*step)
        wire.finish()
        arrived.add(len(wire.ends[0].taken))
    assert len(arrived) > 2  # the loss came before, between and after messages
