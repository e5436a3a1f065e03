"""Devices without threads behind the verbs: random numbers order their work.

A provider takes the place of the embedded device in a table of calls, with its limits and
addresses. Work waits where it was posted until `step` does the next piece: it carries out the first
request of a queue pair at its peer, or acknowledges it. The provider implements what the transport
relies on: order, keys with their domains and ranges, one receive for each send, and flushes.

A `Break` ends a rail, which is all queue pairs of one device of a side and its partner.
"""

from __future__ import annotations

import errno
import os
import random
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from aiordma import verbs
from aiordma._native import Library, embedded, lib
from aiordma._native import ffi as native_ffi
from aiordma.verbs import WCStatus
from aiordma.verbs._qp.qp_attributes import MASK_OF_FIELD

ffi: Any = native_ffi

CALLS = (
    "_ibv_query_gid_table",
    "ibv_ack_async_event",
    "ibv_ack_cq_events",
    "ibv_alloc_pd",
    "ibv_close_device",
    "ibv_create_comp_channel",
    "ibv_create_cq",
    "ibv_create_qp",
    "ibv_dealloc_pd",
    "ibv_dereg_mr",
    "ibv_destroy_comp_channel",
    "ibv_destroy_cq",
    "ibv_destroy_qp",
    "ibv_free_device_list",
    "ibv_get_async_event",
    "ibv_get_cq_event",
    "ibv_get_device_list",
    "ibv_modify_qp",
    "ibv_open_device",
    "ibv_query_device",
    "ibv_query_qp",
    "ibv_reg_mr",
)
OPS = ("alloc_mw", "dealloc_mw", "poll_cq", "post_recv", "post_send", "req_notify_cq")
SENDS = (lib.IBV_WR_SEND, lib.IBV_WR_SEND_WITH_IMM, lib.IBV_WR_SEND_WITH_INV)
WRITES = (lib.IBV_WR_RDMA_WRITE, lib.IBV_WR_RDMA_WRITE_WITH_IMM)
ATOMICS = (lib.IBV_WR_ATOMIC_CMP_AND_SWP, lib.IBV_WR_ATOMIC_FETCH_AND_ADD)
WITH_IMM = (lib.IBV_WR_SEND_WITH_IMM, lib.IBV_WR_RDMA_WRITE_WITH_IMM)
TOLD = {
    **dict.fromkeys(SENDS, lib.IBV_WC_SEND),
    **dict.fromkeys(WRITES, lib.IBV_WC_RDMA_WRITE),
    lib.IBV_WR_RDMA_READ: lib.IBV_WC_RDMA_READ,
    lib.IBV_WR_ATOMIC_CMP_AND_SWP: lib.IBV_WC_COMP_SWAP,
    lib.IBV_WR_ATOMIC_FETCH_AND_ADD: lib.IBV_WC_FETCH_ADD,
    lib.IBV_WR_BIND_MW: lib.IBV_WC_BIND_MW,
    lib.IBV_WR_LOCAL_INV: lib.IBV_WC_LOCAL_INV,
}
NOTHING = (0, 0, 0, 0)
TAKE_RECEIVE = {*SENDS, *WITH_IMM}
RIGHT = {
    **dict.fromkeys(WRITES, lib.IBV_ACCESS_REMOTE_WRITE),
    **dict.fromkeys(ATOMICS, lib.IBV_ACCESS_REMOTE_ATOMIC),
    lib.IBV_WR_RDMA_READ: lib.IBV_ACCESS_REMOTE_READ,
}
FIELDS = [(name, int(bit)) for name, bit in MASK_OF_FIELD.items()]
TAKES_IN = (verbs.QPState.RTR, verbs.QPState.RTS)
GID_SIZE = ffi.sizeof("struct ibv_gid_entry")
EVENT_FLAGS = os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC
PORT = 1
RAILS = 3  # maximum, and the number of devices per side

Pieces = list[tuple[int, int, int]]  # address, length, key


def pieces_of(request: Any) -> Pieces:
    sges = request.sg_list
    return [(sges[i].addr, sges[i].length, sges[i].lkey) for i in range(request.num_sge)]


def copy(to: int, data: bytes) -> None:
    ffi.memmove(ffi.cast("char *", to), data, len(data))


def bytes_at(address: int, length: int) -> bytes:
    return bytes(ffi.buffer(ffi.cast("char *", address), length))


class How(Enum):
    """The way in which a rail breaks."""

    CUT = auto()  # nothing gets through, so posted work exhausts its retries
    PORT = auto()  # as CUT, and the device of one side reports it
    FLUSH = auto()  # a queue pair suddenly enters ERR
    QP_FATAL = auto()  # as FLUSH, with an event
    SILENT = auto()  # as QP_FATAL, but nothing is flushed
    DEVICE = auto()  # as SILENT for a whole device, whose completions are lost


class When(Enum):
    """When a rail breaks, relative to the work request that is being executed."""

    BEFORE = auto()
    WITHIN = auto()  # after part of its data has arrived
    IN = auto()  # after its execution, before its acknowledgment
    BEHIND = auto()  # after its acknowledgment


@dataclass(slots=True, eq=False)
class Break:
    """A failure of `rail` after `left` more work requests on it, or on any rail if `of_all`."""

    rail: int
    side: int  # of the device that fails
    how: How
    when: When
    left: int
    of_all: bool = False

    @classmethod
    def drawn(cls, chance: random.Random, rail: int) -> Break:
        left, how = chance.randrange(chance.choice((3, 30, 200))), chance.choice(list(How))
        when, of_all = chance.choice(list(When)), chance.random() < 0.2
        return cls(rail, chance.randrange(2), how, when, left, of_all)


@dataclass(slots=True, eq=False)
class Key:
    """The memory that a key gives access to, which is a region or a window bound to `qp`."""

    native: Any
    address: int
    length: int
    access: int
    qp: Queue | None = None

    def covers(self, address: int, length: int, right: int) -> bool:
        inside = self.address <= address and address + length <= self.address + self.length
        return inside and self.access & right == right


@dataclass(slots=True, eq=False)
class Work:
    """A work request in a send queue, and its result."""

    wr_id: int
    opcode: int
    signaled: bool
    pieces: Pieces
    imm: int  # or a key to invalidate
    address: int
    rkey: int
    operands: tuple[int, int] = (0, 0)
    bind: tuple[Any, ...] = ()
    data: bytes = b""
    status: WCStatus = WCStatus.SUCCESS

    @classmethod
    def of(cls, wr: Any) -> Work:
        work = cls(
            wr.wr_id,
            wr.opcode,
            bool(wr.send_flags & lib.IBV_SEND_SIGNALED),
            pieces_of(wr),
            wr.invalidate_rkey,
            wr.wr.rdma.remote_addr,
            wr.wr.rdma.rkey,
        )
        if work.opcode in ATOMICS:
            atomic = wr.wr.atomic
            work.rkey, work.operands = atomic.rkey, (atomic.compare_add, atomic.swap)
        elif work.opcode == lib.IBV_WR_BIND_MW:
            info = wr.bind_mw.bind_info
            work.rkey = wr.bind_mw.rkey
            work.bind = (wr.bind_mw.mw, info.mr.rkey, info.addr, info.length, info.mw_access_flags)
        return work


@dataclass(slots=True, eq=False)
class Completions:
    """A completion queue."""

    native: Any
    found: deque[tuple[int, ...]] = field(default_factory=deque)
    armed: bool = False


@dataclass(slots=True, eq=False)
class Queue:
    """A queue pair."""

    native: Any
    send_cq: Completions
    recv_cq: Completions
    room: tuple[int, int]
    attributes: Any
    sends: deque[Work] = field(default_factory=deque)
    done: deque[Work] = field(default_factory=deque)  # executed but not yet acknowledged
    receives: deque[tuple[int, Pieces]] = field(default_factory=deque)
    refused: bool = False  # whether the last request in `done` failed
    silent: bool = False  # whether it no longer reports completions
    stopped: bool = False  # whether its side neither sends nor responds; set by tests
    side: int = 0
    rail: int = 0

    @property
    def can_go_on(self) -> bool:
        return self.native.state == verbs.QPState.RTS and not self.refused and bool(self.sends)


class Provider:
    """A provider of simulated devices and queue pairs. `begin` discards all queue pairs."""

    def __init__(self) -> None:
        self._kept: list[object] = []
        found = verbs.find_device("embedded0")
        with found.open() as context:
            self._limits, self._port = ffi.new("struct ibv_device_attr *"), context.ask_port(1)
            context.library.calls.ibv_query_device(context.pointer, self._limits)
            self._gids = ffi.new("struct ibv_gid_entry[]", self._port.gid_tbl_len)
            self._gid_count = context.library.calls._ibv_query_gid_table(
                context.pointer, self._gids, len(self._gids), 0, GID_SIZE
            )
            self._natives_of_devices = ffi.new("struct ibv_device[]", 2 * RAILS)
            self._list = ffi.new("struct ibv_device *[]", 2 * RAILS + 1)
            for i in range(2 * RAILS):
                self._list[i] = ffi.addressof(self._natives_of_devices, i)
                self._list[i][0] = context.pointer.device[0]
                self._list[i].name = f"embedded{i}".encode()
        real = embedded().table
        self.table = ffi.new("struct aiordma_calls *")
        ffi.memmove(self.table, real, ffi.sizeof("struct aiordma_calls"))
        self.table.device = self._keep(ffi.new("struct aiordma_device_calls *"))  # as for a card
        for name in CALLS:
            setattr(self.table, name, self._callback(real, name))
        self._ops = ffi.new("struct ibv_context_ops *")
        for name in OPS:
            setattr(self._ops, name, self._callback(self._ops, name))
        self._query = self._callback(ffi.new("struct verbs_context *"), "query_port")
        self.library = Library("pair", self.table)
        self.devices = [
            replace(found, name=f"embedded{i}", library=self.library) for i in range(2 * RAILS)
        ]
        """The devices of one side, followed by those of the other."""
        self.device = self.devices[0]
        self.begin(random.Random(0))

    def _keep(self, thing: Any) -> Any:
        self._kept.append(thing)
        return thing

    def _callback(self, table: Any, name: str) -> Any:
        kind = ffi.typeof(getattr(table, name))
        method = getattr(self, "_" + name.removeprefix("_").removeprefix("ibv_"))
        failed = {"pointer": ffi.NULL, "primitive": -1, "void": None}[kind.result.kind]
        return self._keep(ffi.callback(kind, method, failed, self._raised))

    def _raised(self, _: object, error: BaseException, frames: Any) -> None:
        traceback.print_exception(error)
        self.errors.append(error)

    def begin(self, chance: random.Random) -> None:
        """Reset the provider. It then draws its random numbers from `chance`."""
        self.random = chance
        self.errors: list[BaseException] = []
        self.keys: dict[int, Key] = {}
        self.queues: dict[int, Queue] = {}
        self.completions: dict[int, Completions] = {}
        self.mail: list[Callable[[], object]] = []
        """Actions outside of the queue pairs that may happen at any time."""
        self.breaks: list[Break] = []
        """The breaks that are still to come."""
        self._cut: set[int] = set()  # rails on which nothing gets through
        self._numbers = 0
        self._channels: dict[int, deque[Completions]] = {}
        self._events: dict[int, deque[tuple[int, Any]]] = {}  # by the context's async_fd
        self._natives: dict[Any, Any] = {}  # keeps alive the structures that the verbs point to

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    # ---- what happens ------------------------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """Return whether no step is possible and all completions have been polled."""
        return not self._able() and not any(cq.found for cq in self.completions.values())

    def _able(self) -> list[tuple[Callable[[Any], object], Any]]:
        """Return the steps that can be executed next, each as a method and its argument."""
        able: list[tuple[Callable[[Any], object], Any]] = []
        for queue in self.queues.values():
            if queue.stopped:
                continue
            if queue.can_go_on and self._is_answered(queue):
                able.append((self._carry_out, queue))
            if queue.done:
                able.append((self._acknowledge, queue))
        # Deliver messages only when no acknowledgment is pending. As in a network whose paths have
        # equal delays, earlier work arrives first.
        if not any(queue.done for queue in self.queues.values()):
            able += [(self._deliver, it) for it in self.mail]
        return able

    def step(self) -> bool:
        """Execute a randomly chosen step. Return False if none is possible."""
        able = self._able()
        if not able:
            return False
        act, queue = able[int(self.random.random() * len(able))]
        act(queue)
        return True

    def _deliver(self, message: Callable[[], object]) -> None:
        self.mail.remove(message)
        message()

    def _peer(self, queue: Queue) -> Queue | None:
        peer = self.queues.get(queue.attributes.dest_qp_num)
        if peer is None or peer.native.state not in TAKES_IN:
            return None
        return None if self._cut & {queue.rail, peer.rail} else peer

    def _is_answered(self, queue: Queue) -> bool:
        work, peer = queue.sends[0], self._peer(queue)
        if peer is None or peer.stopped or work.opcode not in TAKE_RECEIVE:
            return peer is None or not peer.stopped
        return bool(peer.receives)

    def _carry_out(self, queue: Queue) -> None:
        due = self.breaks and self._due(queue)
        if not due:
            self._carry_out_first(queue)
            return
        if due.when is When.WITHIN:
            self._carry_out_partly(queue)
        elif due.when is not When.BEFORE:
            self._carry_out_first(queue)
        while due.when is When.BEHIND and queue.done:
            self._acknowledge(queue)
        self._break(due)

    def _due(self, queue: Queue) -> Break | None:
        """Count the next work request of a queue. Remove and return the break now due, if any."""
        due = None
        for each in self.breaks:
            if each.of_all or each.rail == queue.rail:
                each.left -= 1
                if each.left < 0:
                    due = each
        if due is not None:
            self.breaks.remove(due)
        return due

    def _break(self, it: Break) -> None:
        queues = [queue for queue in self.queues.values() if queue.rail == it.rail]
        failing = [queue for queue in queues if queue.side == it.side]
        if it.how in (How.CUT, How.PORT):
            self._cut.add(it.rail)
            for queue in queues:
                if queue.done and it.when is not When.BEHIND:
                    queue.done[0].status, queue.done[0].data = WCStatus.RETRY_EXC_ERR, b""
                    queue.refused = True
            if it.how is How.PORT and failing:
                self._event(verbs.EventType.PORT_ERR, failing[0], PORT)
            return
        for queue in failing:
            if it.how in (How.QP_FATAL, How.SILENT):
                self._event(verbs.EventType.QP_FATAL, queue)
            queue.silent = it.how in (How.SILENT, How.DEVICE)
            self._to_error(queue)
        if it.how is How.DEVICE and failing:
            for cq in {id(cq): cq for it in failing for cq in (it.send_cq, it.recv_cq)}.values():
                cq.found.clear()
            self._event(verbs.EventType.DEVICE_FATAL, failing[0], ffi.NULL)

    def _carry_out_partly(self, queue: Queue) -> None:
        """Transfer only part of the work request's data."""
        work, peer = queue.sends[0], self._peer(queue)
        length = sum(length for _, length, _ in work.pieces)
        part, data = int(self.random.random() * length), self._gather(queue, work.pieces)
        if peer is None or not part or data is None:
            return
        if work.opcode in SENDS:
            self._scatter(peer, peer.receives[0][1], data[:part])
        elif work.opcode in RIGHT and self._opens(peer, work, length):
            if work.opcode in WRITES:
                copy(work.address, data[:part])
            elif work.opcode not in ATOMICS:
                self._scatter(queue, work.pieces, bytes_at(work.address, part))

    def _carry_out_first(self, queue: Queue) -> None:
        work = queue.sends.popleft()
        queue.done.append(work)
        if work.opcode == lib.IBV_WR_BIND_MW:
            work.status = self._bind(queue, work)
        elif work.opcode == lib.IBV_WR_LOCAL_INV:
            work.status = self._invalidate(queue, work.imm)
        elif (peer := self._peer(queue)) is None:
            work.status = WCStatus.RETRY_EXC_ERR
        else:
            work.status = self._at_peer(queue, work, peer)
        queue.refused = work.status is not WCStatus.SUCCESS

    def _at_peer(self, queue: Queue, work: Work, peer: Queue) -> WCStatus:
        inwards = work.opcode in SENDS or work.opcode in WRITES
        data = self._gather(queue, work.pieces) if inwards else b""
        if data is None:
            return WCStatus.LOC_PROT_ERR
        if work.opcode in RIGHT:
            length = sum(length for _, length, _ in work.pieces)
            if length and not self._opens(peer, work, length):
                self._event(verbs.EventType.QP_ACCESS_ERR, peer)
                self._to_error(peer)
                return WCStatus.REM_ACCESS_ERR
            if work.opcode in WRITES:
                copy(work.address, data)
            else:
                work.data = bytes_at(work.address, length)
            if work.opcode in ATOMICS:
                self._change(work)
        if work.opcode in TAKE_RECEIVE:
            return self._receive(work, peer, data)
        return WCStatus.SUCCESS

    def _change(self, work: Work) -> None:
        old, (first, second) = int.from_bytes(work.data, "little"), work.operands
        if work.opcode == lib.IBV_WR_ATOMIC_FETCH_AND_ADD:
            new = (old + first) % (1 << 64)
        else:
            new = second if old == first else old
        copy(work.address, new.to_bytes(8, "little"))

    def _receive(self, work: Work, peer: Queue, data: bytes) -> WCStatus:
        wr_id, pieces = peer.receives.popleft()
        flags, number = 0, 0
        if work.opcode in SENDS and not self._scatter(peer, pieces, data):
            self._complete(peer.recv_cq, wr_id, WCStatus.LOC_LEN_ERR)
            self._to_error(peer)
            return WCStatus.REM_INV_REQ_ERR
        if work.opcode in WITH_IMM:
            flags, number = lib.IBV_WC_WITH_IMM, work.imm
        elif work.opcode == lib.IBV_WR_SEND_WITH_INV:
            flags, number = lib.IBV_WC_WITH_INV, work.imm
            if self._invalidate(peer, work.imm) is not WCStatus.SUCCESS:
                self._event(verbs.EventType.QP_ACCESS_ERR, peer)
                self._complete(peer.recv_cq, wr_id, WCStatus.LOC_ACCESS_ERR)
                self._to_error(peer)
                return WCStatus.REM_ACCESS_ERR
        told = lib.IBV_WC_RECV if work.opcode in SENDS else lib.IBV_WC_RECV_RDMA_WITH_IMM
        self._complete(peer.recv_cq, wr_id, WCStatus.SUCCESS, told, len(data), number, flags)
        return WCStatus.SUCCESS

    def _acknowledge(self, queue: Queue) -> None:
        work = queue.done.popleft()
        if work.data and not self._scatter(queue, work.pieces, work.data):
            work.status = WCStatus.LOC_PROT_ERR
        if work.status is WCStatus.SUCCESS:
            if work.signaled:
                self._complete(
                    queue.send_cq, work.wr_id, work.status, TOLD[work.opcode], len(work.data), 0, 0
                )
            return
        self._complete(queue.send_cq, work.wr_id, work.status)
        self._to_error(queue)

    def _to_error(self, queue: Queue) -> None:
        if queue.native.state in (verbs.QPState.ERR, verbs.QPState.RESET):
            return
        queue.native.state = verbs.QPState.ERR
        self._flush(queue)

    def _flush(self, queue: Queue) -> None:
        found = [(queue.send_cq, work.wr_id) for work in (*queue.done, *queue.sends)]
        found += [(queue.recv_cq, wr_id) for wr_id, _ in queue.receives]
        for cq, wr_id in found if not queue.silent else ():
            self._complete(cq, wr_id, WCStatus.WR_FLUSH_ERR)
        for each in (queue.done, queue.sends, queue.receives):
            each.clear()

    def _complete(self, cq: Completions, wr_id: int, status: int, *rest: int) -> None:
        """Add a completion.

        For a successful one, `rest` contains the opcode, the length, the immediate data or key, and
        the flags.
        """
        cq.found.append((wr_id, status, *(rest or NOTHING)))
        if cq.armed:
            cq.armed = False
            fd = cq.native.channel.fd
            self._channels[fd].append(cq)
            os.eventfd_write(fd, 1)

    def _event(self, event: verbs.EventType, queue: Queue, of: Any = None) -> None:
        """Report an event.

        `of` is the port, NULL for the device, or None for the queue pair.
        """
        fd = queue.native.context.async_fd
        self._events[fd].append((event, queue.native if of is None else of))
        os.eventfd_write(fd, 1)

    # ---- memory ------------------------------------------------------------------------------

    def _key(self, number: int, queue: Queue) -> Key | None:
        """Return the key if it belongs to the queue pair's protection domain, else None."""
        key = self.keys.get(number)
        return key if key is not None and key.native.pd == queue.native.pd else None

    def _gather(self, queue: Queue, pieces: Pieces) -> bytes | None:
        if not all(self._is_local(queue, piece, 0) for piece in pieces):
            return None
        return b"".join(bytes_at(address, length) for address, length, _ in pieces)

    def _scatter(self, queue: Queue, pieces: Pieces, data: bytes) -> bool:
        if sum(length for _, length, _ in pieces) < len(data):
            return False
        for piece in pieces:
            address, length, _ = piece
            if not self._is_local(queue, piece, lib.IBV_ACCESS_LOCAL_WRITE):
                return False
            copy(address, data[:length])
            data = data[length:]
        return True

    def _is_local(self, queue: Queue, piece: tuple[int, int, int], right: int) -> bool:
        address, length, lkey = piece
        key = self._key(lkey, queue)
        return not length or (
            key is not None and key.qp is None and key.covers(address, length, right)
        )

    def _opens(self, peer: Queue, work: Work, length: int) -> bool:
        key, right = self._key(work.rkey, peer), RIGHT[work.opcode]
        return (
            key is not None
            and key.qp in (None, peer)
            and bool(right & peer.attributes.qp_access_flags)
            and key.covers(work.address, length, right)
        )

    def _bind(self, queue: Queue, work: Work) -> WCStatus:
        window, region, address, length, access = work.bind
        key = self._key(region, queue)
        if key is None or not key.covers(address, length, lib.IBV_ACCESS_MW_BIND):
            return WCStatus.MW_BIND_ERR
        self._unbind(window)
        self.keys[work.rkey] = Key(window, address, length, access, queue)
        return WCStatus.SUCCESS

    def _unbind(self, window: Any) -> None:
        for rkey, key in list(self.keys.items()):
            if key.native == window:
                del self.keys[rkey]

    def _invalidate(self, queue: Queue, rkey: int) -> WCStatus:
        key = self.keys.get(rkey)
        if key is None or key.qp is not queue:
            return WCStatus.LOC_PROT_ERR
        del self.keys[rkey]
        return WCStatus.SUCCESS

    # ---- the calls ---------------------------------------------------------------------------

    def _open_device(self, device: Any) -> Any:
        extended = ffi.new("struct verbs_context *")
        extended.sz, extended.query_port = ffi.sizeof("struct verbs_context"), self._query
        context = ffi.addressof(extended, "context")
        context.device, context.ops, context.num_comp_vectors = device, self._ops[0], 1
        context.abi_compat = ffi.cast("void *", -1)
        context.async_fd = os.eventfd(0, EVENT_FLAGS)
        self._events[context.async_fd] = deque()
        self._natives[context] = extended
        return context

    def _get_device_list(self, count: Any) -> Any:
        count[0] = 2 * RAILS
        return self._list

    def _free_device_list(self, devices: Any) -> None:
        pass

    def _close_device(self, context: Any) -> int:
        del self._events[context.async_fd]
        os.close(context.async_fd)
        del self._natives[context]
        return 0

    def _query_device(self, context: Any, attributes: Any) -> int:
        attributes[0] = self._limits[0]
        return 0

    def _query_port(self, context: Any, number: int, attributes: Any, size: int) -> int:
        ffi.memmove(attributes, self._port, size)
        return 0

    def _query_gid_table(self, context: Any, to: Any, room: int, flags: int, size: int) -> int:
        ffi.memmove(to, self._gids, self._gid_count * size)
        return int(self._gid_count)

    def _alloc_pd(self, context: Any) -> Any:
        pd = ffi.new("struct ibv_pd *", (context,))
        self._natives[pd] = pd
        return pd

    def _dealloc_pd(self, pd: Any) -> int:
        del self._natives[pd]
        return 0

    def _get_async_event(self, context: Any, event: Any) -> int:
        waiting = self._events[context.async_fd]
        if not waiting:
            ffi.errno = errno.EAGAIN
            return -1
        os.eventfd_read(context.async_fd)
        event.event_type, of = waiting.popleft()
        setattr(event.element, "port_num" if of == PORT else "qp", of)
        return 0

    def _ack_async_event(self, event: Any) -> None:
        pass

    def _reg_mr(self, pd: Any, address: Any, length: int, access: int) -> Any:
        key = self._number() << 8
        mr = ffi.new("struct ibv_mr *", (pd.context, pd, address, length, 0, key, key))
        where = int(ffi.cast("uintptr_t", address))
        self.keys[key] = Key(mr, where, length, access)
        return mr

    def _dereg_mr(self, mr: Any) -> int:
        del self.keys[mr.rkey]
        return 0

    def _alloc_mw(self, pd: Any, kind: int) -> Any:
        window = ffi.new("struct ibv_mw *", (pd.context, pd, self._number() << 8, 0, kind))
        self._natives[window] = window
        return window

    def _dealloc_mw(self, window: Any) -> int:
        self._unbind(window)
        del self._natives[window]
        return 0

    def _create_comp_channel(self, context: Any) -> Any:
        channel = ffi.new("struct ibv_comp_channel *", (context, os.eventfd(0, EVENT_FLAGS), 0))
        self._natives[channel] = channel
        self._channels[channel.fd] = deque()
        return channel

    def _destroy_comp_channel(self, channel: Any) -> int:
        del self._channels[channel.fd], self._natives[channel]
        os.close(channel.fd)
        return 0

    def _get_cq_event(self, channel: Any, cq: Any, context: Any) -> int:
        waiting = self._channels[channel.fd]
        if not waiting:
            ffi.errno = errno.EAGAIN
            return -1
        os.eventfd_read(channel.fd)
        cq[0] = waiting.popleft().native
        return 0

    def _ack_cq_events(self, cq: Any, count: int) -> None:
        pass

    def _create_cq(self, context: Any, entries: int, own: Any, channel: Any, vector: int) -> Any:
        native = ffi.new("struct ibv_cq *")
        native.context, native.channel, native.cq_context = context, channel, own
        native.handle, native.cqe = self._number(), entries
        self.completions[native.handle] = Completions(native)
        if channel:
            channel.refcnt += 1
        return native

    def _destroy_cq(self, native: Any) -> int:
        cq = self.completions.pop(native.handle)
        if native.channel:
            native.channel.refcnt -= 1
            waiting = self._channels[native.channel.fd]
            while cq in waiting:
                waiting.remove(cq)
                os.eventfd_read(native.channel.fd)
        return 0

    def _req_notify_cq(self, native: Any, solicited: int) -> int:
        self.completions[native.handle].armed = True
        return 0

    def _poll_cq(self, native: Any, count: int, to: Any) -> int:
        found = self.completions[native.handle].found
        count = min(count, len(found))
        for i in range(count):
            wc = to[i]
            wc.wr_id, wc.status, wc.opcode, wc.byte_len, wc.imm_data, wc.wc_flags = found.popleft()
            wc.vendor_err = wc.qp_num = 0
        return count

    def _create_qp(self, pd: Any, attr: Any) -> Any:
        native = ffi.new("struct ibv_qp *")
        native.context, native.pd, native.qp_type = pd.context, pd, attr.qp_type
        native.send_cq, native.recv_cq = attr.send_cq, attr.recv_cq
        native.qp_num = self._number()
        to, at = (self.completions[cq.handle] for cq in (attr.send_cq, attr.recv_cq))
        room = attr.cap.max_send_wr, attr.cap.max_recv_wr
        attributes = ffi.new("struct ibv_qp_attr *")
        attributes.cap = attr.cap
        number = native.context.device - self._list[0]
        queue = Queue(native, to, at, room, attributes)
        queue.side, queue.rail = divmod(number, RAILS)
        self.queues[native.qp_num] = queue
        return native

    def _destroy_qp(self, native: Any) -> int:
        del self.queues[native.qp_num]
        return 0

    def _modify_qp(self, native: Any, attr: Any, mask: int) -> int:
        queue = self.queues[native.qp_num]
        for name, bit in FIELDS:
            if mask & bit:
                setattr(queue.attributes, name, getattr(attr, name))
        if mask & lib.IBV_QP_STATE:
            if attr.qp_state == verbs.QPState.ERR:
                self._to_error(queue)
            native.state = attr.qp_state
        return 0

    def _query_qp(self, native: Any, attr: Any, mask: int, init: Any) -> int:
        ffi.memmove(attr, self.queues[native.qp_num].attributes, ffi.sizeof("struct ibv_qp_attr"))
        attr.qp_state = attr.cur_qp_state = native.state
        return 0

    def _post_send(self, native: Any, wr: Any, bad: Any) -> int:
        queue = self.queues[native.qp_num]
        while wr:
            if len(queue.sends) + len(queue.done) >= queue.room[0]:
                bad[0] = wr
                return errno.ENOMEM
            queue.sends.append(Work.of(wr))
            wr = wr.next
        if native.state == verbs.QPState.ERR:
            self._flush(queue)
        return 0

    def _post_recv(self, native: Any, wr: Any, bad: Any) -> int:
        queue = self.queues[native.qp_num]
        while wr:
            if len(queue.receives) >= queue.room[1]:
                bad[0] = wr
                return errno.ENOMEM
            queue.receives.append((wr.wr_id, pieces_of(wr)))
            wr = wr.next
        if native.state == verbs.QPState.ERR:
            self._flush(queue)
        return 0
