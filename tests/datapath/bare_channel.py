"""A message channel over a real queue pair, without a connection: the test is its peer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest

from aiordma import Message, verbs
from aiordma._core import protocol
from aiordma._core.frames import HEADER_SIZE, FrameKind
from aiordma._datapath.keys import ReadKeys
from aiordma._datapath.memory import MACHINE
from aiordma._datapath.rail import SendQueue
from aiordma._datapath.session import MessageMethods, Session
from aiordma._datapath.work_queue import WorkRequestTable
from aiordma._memory.registration_cache import RegistrationCache
from aiordma._transport.memory import Memory
from aiordma.config import LoopConfig
from aiordma.mr_pool import MemoryPool
from tests.model.frames import pack_header, unpack_header

SLOT = 4096  # bytes per receive of the peer
DEPTH = 64  # number of the peer's receives
CAPABILITIES = verbs.QPCapabilities(max_send_wr=DEPTH, max_recv_wr=1024)
OWN = DEPTH * SLOT  # offset of the peer's own memory
SIGNALED = verbs.SendFlags.SIGNALED
RIGHTS = (
    verbs.AccessFlags.LOCAL_WRITE
    | verbs.AccessFlags.REMOTE_READ
    | verbs.AccessFlags.REMOTE_WRITE
    | verbs.AccessFlags.REMOTE_ATOMIC
)
PATIENCE = 100  # seconds


@dataclass(frozen=True)
class Room:
    """The settings of one side of a channel."""

    data_receives: int = 32
    control_receives: int = 8
    eager_size: int = 256
    max_eager_size: int = 0
    max_message: int = 1 << 40
    send_queue: int = 64
    fetch_ahead: int = 0


class Driver:
    """The part of an event loop's driver that a SendQueue uses."""

    def __init__(self, pool: MemoryPool, loop: asyncio.AbstractEventLoop) -> None:
        self.pool = pool
        self.table = WorkRequestTable(loop, MACHINE)
        self.reported: list[Exception] = []

    def attach(self, qp: verbs.QueuePair, sink: SendQueue) -> None:
        qp.untrack()

    def detach(self, qp: verbs.QueuePair) -> None:
        pass

    def take_device_events(self) -> None:
        pass

    def poll(self) -> bool:
        return False

    def report(self, sink: SendQueue, error: Exception) -> None:
        self.reported.append(error)
        sink.connection_broke(error)


class Owner:
    """A stand-in for a connection that records calls from queues and channels."""

    on_early: Callable[[], object] | None = None
    peer_name = name = "the peer"

    def __init__(self) -> None:
        self.controls: list[protocol.Message] = []
        self.errors: list[BaseException] = []
        self.failures: list[BaseException] = []
        self.control, self.violated = self.controls.append, self.errors.append
        self.broken = self.failures.append

    def error_for(self, cause: BaseException, text: str = "") -> BaseException:
        return cause

    def nothing(self) -> None:
        pass

    early = emptied = check = check_loop = nothing


class Wire:
    """Two connected queue pairs: one for this side's channel, and one for a simulated peer."""

    def __init__(
        self, context: verbs.Context, kind: type[SendQueue] = SendQueue, lead: Wire | None = None
    ) -> None:
        """Connect the queue pairs. A wire with a `lead` is another rail of the lead's channels."""
        self.lead = lead
        self.loop: asyncio.AbstractEventLoop = lead.loop if lead else asyncio.new_event_loop()
        self.pd = pd = context.alloc_pd()
        self.pool = MemoryPool(pd, limit=1 << 28)
        self.driver = Driver(self.pool, self.loop)
        self.table = self.driver.table
        self.events = context.create_comp_channel()
        self.cqs = [context.create_cq(2048, self.events, extended=False), context.create_cq(256)]
        self.cqs[0].req_notify()
        self.qp, self.peer = (pd.create_qp(cq, cq, CAPABILITIES) for cq in self.cqs)
        ends = self.qp.endpoint(), self.peer.endpoint()
        self.qp.connect(*ends, access=RIGHTS)
        self.peer.connect(*ends[::-1], access=RIGHTS)
        self.mr = pd.reg_mr(OWN + 2 * SLOT, RIGHTS)
        self._arrived: list[tuple[FrameKind, int | None, bytes]] = []
        self._ended: list[verbs.WCStatus] = []
        for slot in range(DEPTH):
            self._peer_receives(slot)
        self.owner = Owner()
        self.queue = kind(self.driver, self.qp, self.owner)
        self.registrations = self.loop.run_until_complete(self._registrations())

    async def _registrations(self) -> RegistrationCache:
        return RegistrationCache(self.pd, LoopConfig().cached_registrations)

    def _peer_receives(self, slot: int) -> None:
        self.peer.post_recv_one(slot, self.mr.addr + slot * SLOT, SLOT, self.mr.lkey)

    def drain(self) -> bool:
        """Handle this side's completions. Return whether there were any."""
        return self.events._drain_to(self.table, 128, False)[0]

    def turn(self) -> None:
        """Run one iteration of the event loop."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def until(self, done: Callable[[], object]) -> None:
        """Handle completions on both sides until `done` returns true."""
        deadline = time.monotonic() + PATIENCE
        while not done():
            self.drain()
            for wc in self.cqs[1].poll(DEPTH):
                if wc.wr_id == DEPTH:
                    self._ended.append(wc.status)
                elif wc.status is verbs.WCStatus.SUCCESS:
                    data = self.mr.buf[wc.wr_id * SLOT :][: wc.byte_len].tobytes()
                    kind, _, _, imm = unpack_header(data)
                    self._arrived.append((kind, imm, data[HEADER_SIZE:]))
                    self._peer_receives(wc.wr_id)
            assert time.monotonic() < deadline

    def peer_posts(
        self, opcode: verbs.WROpcode, length: int, address: int = 0, rkey: int = 0
    ) -> verbs.WCStatus:
        """Post a work request of the peer, using memory after its receives. Return the status."""
        self.peer.post_send_one(
            DEPTH, opcode, SIGNALED, self.mr.addr + OWN, length, self.mr.lkey, address, rkey
        )
        self.until(lambda: self._ended)
        return self._ended.pop()

    def peer_sends(self, frame: bytes) -> None:
        """Send a frame from the peer and wait until this side has handled it."""
        before = self.queue.completions
        self.mr.buf[OWN : OWN + len(frame)] = frame
        assert self.peer_posts(verbs.WROpcode.SEND, len(frame)) is verbs.WCStatus.SUCCESS
        self.until(lambda: self.queue.completions > before)

    def peer_reads(self, address: int, length: int, rkey: int) -> bytes | verbs.WCStatus:
        """Read this side's memory from the peer. Return the bytes or the error status."""
        status = self.peer_posts(verbs.WROpcode.RDMA_READ, length, address, rkey)
        if status is not verbs.WCStatus.SUCCESS:
            return status
        return self.mr.buf[OWN : OWN + length].tobytes()

    def peer_got(self, count: int) -> list[tuple[FrameKind, int | None, bytes]]:
        """Return the next frames that the peer receives: kind, immediate data and content."""
        self.until(lambda: len(self._arrived) >= count and self.queue.free == self.queue.capacity)
        found, self._arrived = self._arrived[:count], self._arrived[count:]
        return found

    def peer_has(self) -> list[tuple[FrameKind, int | None, bytes]]:
        """Return all frames that have been sent but not yet fetched from the peer."""
        self.until(lambda: self.queue.free == self.queue.capacity)
        self.until(self.drain_nothing)
        return self.peer_got(len(self._arrived))

    def drain_nothing(self) -> bool:
        return not self.drain()

    def close(self) -> None:
        self.queue.close()
        self.peer.close()
        for cq in self.cqs:
            cq.close()
        self.events.close()
        self.registrations.clear()
        self.mr.close()
        assert self.pool.leases == 0
        self.pool.close()
        self.pd.close()
        if self.lead is None:
            self.loop.close()


class BareChannel:
    """A channel on a wire, and an owner that records the channel's calls."""

    def __init__(
        self,
        wire: Wire,
        room: Room | None = None,
        peer: Room | None = None,
        dereg_mr: int | None = None,
        rails: bool = False,
    ) -> None:
        room = room or Room()
        self.wire = wire
        self.owner = Owner()
        library = wire.pd.context.library
        real, library.dereg_mr = library.dereg_mr, dereg_mr or library.dereg_mr
        wire.pool.has_windows = dereg_mr is None  # otherwise each message is a region
        wire.queue.keys = ReadKeys(wire.pool)
        library.dereg_mr = real
        self.channel = Session(
            queue=wire.queue,
            memory=Memory(cast(Any, wire), self.owner.error_for),
            config=room,
            owner=self.owner,
        )
        wire.queue.frame_handler = self.channel
        if len(wire.table) < room.data_receives:  # unless another channel has left some
            self.channel.post_receives()
        self.channel.start(peer or Room(), rails=rails)
        self.methods = MessageMethods()
        self.methods._set_session(self.channel)

    def send(self, data: Any, imm: int | None = None) -> asyncio.Future[None]:
        return self.methods.send_nowait(data, imm=imm)

    def received(self) -> list[Message]:
        """Receive the messages that have arrived."""
        found = []
        while self.channel.figures()["arrived"] > self.channel.figures()["unread"]:
            try:
                self.methods.recv().send(None)
            except StopIteration as taken:
                found.append(taken.value)
        return found

    def close(self) -> None:
        self.channel.end(ConnectionError("the test is over"))
        self.channel.close()
        self.wire.queue.frame_handler = None


@pytest.fixture
def wire(context: verbs.Context) -> Iterator[Wire]:
    wire = Wire(context)
    yield wire
    wire.close()


def frame(
    kind: int, content: bytes = b"", *, control: int = 0, data: int = 0, imm: int | None = None
) -> bytes:
    """Build a frame as the transport does. Unknown kinds are allowed too."""
    header = bytearray(HEADER_SIZE)
    pack_header(header, 0, FrameKind.DATA, control, data, imm=imm)
    header[0] = kind | header[0] & 0x80
    return bytes(header) + content
