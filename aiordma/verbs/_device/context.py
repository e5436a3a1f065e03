"""An open device: what it can do, its ports and addresses, and the resources made on it."""

from __future__ import annotations

import errno
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from aiordma._core.arguments import I32_MAX, U32_MAX, instance, integer
from aiordma._native import Library, explained, failure, ffi, lib
from aiordma._native import handles as h
from aiordma.errors import DeviceEventError, UnsupportedError, VerbsError

from .._cq.completion import CompletionChannel, CompletionQueue
from .._cq.create_cq import create_cq as create_cq_on
from .._cq.create_cq import most_fields
from .._memory.device_memory import DeviceMemory
from .._qp.queue_pair import QueuePair
from .._qp.shared_receive_queue import SharedReceiveQueue
from .._qp.xrc import open_xrcd as open_xrcd_on
from .address import GID, GIDEntry, IPAddress, best
from .attributes import DeviceAttributes, PortAttributes
from .capabilities import ExtendedDeviceAttributes
from .domains import ParentDomain, ThreadDomain
from .enums import EventType, WCFields, WCStatus
from .protection_domain import ProtectionDomain
from .resource import Node, Resource
from .route_lookup import better_gid
from .statistics import DeviceStatistics, count_open

# Which member of ibv_async_event's union an event fills (ibv_get_async_event(3)).
_MEMBERS = {
    EventType[name]: member
    for member, names in {
        "qp": "QP_FATAL QP_REQ_ERR QP_ACCESS_ERR COMM_EST SQ_DRAINED PATH_MIG PATH_MIG_ERR "
        "QP_LAST_WQE_REACHED",
        "cq": "CQ_ERR",
        "srq": "SRQ_ERR SRQ_LIMIT_REACHED",
        "port_num": "PORT_ACTIVE PORT_ERR LID_CHANGE PKEY_CHANGE SM_CHANGE CLIENT_REREGISTER "
        "GID_CHANGE",
    }.items()
    for name in names.split()
}

_ENTRY_SIZE = ffi.sizeof("struct ibv_gid_entry")

# For memory that a call fills and that is read only as far as it was filled.
_unset = ffi.new_allocator(should_clear_after_alloc=False)


class AsyncEvent(NamedTuple):
    """Something happened to a device, a port or a resource; see ibv_get_async_event(3).

    ``element`` is the queue pair, completion queue or shared receive queue concerned, None for
    others or when its object is gone; ``port_num`` is the port of a port event.
    """

    type: EventType
    element: QueuePair | CompletionQueue | SharedReceiveQueue | None = None
    port_num: int | None = None


def event_error(event: AsyncEvent, context: Context) -> DeviceEventError:
    """The error of an event after which nothing works any more."""
    about = repr(event.element) if event.element is not None else ""
    return DeviceEventError(event.type.name, device=context.name, element=about)


# For each pointer those that were made, the first of which is the one: threads may come together,
# and under a lock a destructor could keep them from each other for ever.
_borrowed: dict[tuple[str, int], list[weakref.ref[Context]]] = {}


def _first_borrowed(made: list[weakref.ref[Context]]) -> Context | None:
    for ref in tuple(made):
        if (context := ref()) is not None and not context.closed:
            return context
        with suppress(ValueError):  # another thread has removed it
            made.remove(ref)
    return None


class Context(Resource[h.ibv_context]):
    """An open device: made by :meth:`Device.open`, or borrowed from the connection manager.

    ``name`` is that of the device; ``num_comp_vectors`` is how many completion vectors it has.
    Queries and making children may be called from any thread. Its children keep it alive;
    closing it closes them.
    """

    def __init__(
        self, library: Library, pointer: h.ibv_context, name: str, *, borrowed: bool = False
    ) -> None:
        self.library = library
        self.name = name
        self.borrowed = borrowed
        self.num_comp_vectors: int = pointer.num_comp_vectors
        destroy = (lambda _: None) if borrowed else library.calls.ibv_close_device
        super().__init__(Node("Context", pointer, destroy, counted=not borrowed))
        self._attributes: DeviceAttributes | None = None
        self._extended: ExtendedDeviceAttributes | None = None
        self._gid_table: tuple[bytes, tuple[GIDEntry, ...]] = b"", ()
        """The table as it was last, in C and as objects."""
        self._cq_fields: tuple[WCFields | None] | None = None
        self._failures: Counter[int] = Counter()
        """Failed completions by status, see :meth:`statistics`."""
        self._event_counts: Counter[str] = Counter()
        # The resource that an asynchronous event concerns, by the address of its C structure.
        self._elements: weakref.WeakValueDictionary[int, Resource[Any]] = (
            weakref.WeakValueDictionary()
        )

    @property
    def async_fd(self) -> int:
        """Readable when there are asynchronous events.

        Of a borrowed context it is another one when the connection manager has closed the device
        in between and opened it again, which leaves the pointer as it was.
        """
        return int(self.pointer.async_fd)

    @classmethod
    def borrow(cls, library: Library, pointer: h.ibv_context) -> Context:
        """The context of a device that librdmacm opened and will close, ``rdma_cm_id.verbs``.

        There is one object for each pointer as long as anything uses it. Its ``close()`` closes
        what was made from it and leaves the device open.
        """
        key = (library.name, int(ffi.cast("uintptr_t", pointer)))
        made = _borrowed.setdefault(key, [])
        if (context := _first_borrowed(made)) is not None:
            return context
        raw = library.calls.ibv_get_device_name(pointer.device)
        name = ffi.string(raw).decode(errors="replace")
        own = cls(library, pointer, name, borrowed=True)
        made.append(weakref.ref(own))
        context = _first_borrowed(made)
        assert context is not None
        return context

    # --- what there is ---------------------------------------------------------------------

    def query_device(self) -> DeviceAttributes:
        """Limits and capabilities, asked once."""
        if self._attributes is None:
            attr = ffi.new("struct ibv_device_attr *")
            self.library.calls.ibv_query_device(self.pointer, attr)
            self._attributes = DeviceAttributes.read(attr)
        return self._attributes

    def query_device_ex(self) -> ExtendedDeviceAttributes:
        """Limits and capabilities with those beyond the basics, asked once.

        Of a library or device that cannot be asked so, all that is beyond them is zero.
        """
        if self._extended is None:
            from .capabilities import ExtendedDeviceAttributes  # noqa: PLC0415 - not all need it

            attr = ffi.new("struct ibv_device_attr_ex *")
            calls = self.library.calls
            try:
                calls.ibv_query_device_ex(self.pointer, attr)
            except UnsupportedError:
                calls.ibv_query_device(self.pointer, ffi.addressof(attr, "orig_attr"))
            self._extended = ExtendedDeviceAttributes.read(attr)
        return self._extended

    def query_rt_values_ex(self) -> int:
        """The device's clock, as completion timestamps read it: ibv_query_rt_values_ex(3).

        Ticks of ``hca_core_clock``, the number of which ``completion_timestamp_mask`` bounds.
        UnsupportedError where the clock cannot be read.
        """
        values = ffi.new("struct ibv_values_ex *")
        values.comp_mask = lib.IBV_VALUES_MASK_RAW_CLOCK
        with self._offering("reading its clock"):
            self.library.calls.ibv_query_rt_values_ex(self.pointer, values)
        if not values.comp_mask & lib.IBV_VALUES_MASK_RAW_CLOCK:
            raise self._lacking("reading its clock", "ibv_query_rt_values_ex")
        return values.raw_clock.tv_sec * 1_000_000_000 + values.raw_clock.tv_nsec

    @contextmanager
    def _offering(
        self, capability: str, about: Callable[[VerbsError], str] | None = None
    ) -> Iterator[None]:
        """An UnsupportedError inside the ``with`` becomes one that names device and capability.

        With ``about``, any other failure gets that text.
        """
        try:
            yield
        except UnsupportedError as error:
            raise self._lacking(capability, error.verb, error.errno or 0) from None
        except VerbsError as error:
            if about is None:
                raise
            raise explained(error, about(error)) from None

    def _lacking(
        self, capability: str, verb: str, code: int = errno.EOPNOTSUPP
    ) -> UnsupportedError:
        return UnsupportedError(capability, device=self.name, verb=verb, errno=code)

    # --- ports, which count from 1; GIDs ---------------------------------------------------

    def query_port(self, port_num: int = 1) -> PortAttributes:
        """State and limits of a port, as they are now."""
        return PortAttributes.read(port_num, self.ask_port(port_num))

    def ask_port(self, port_num: int) -> h.ibv_port_attr:
        """As :meth:`query_port`, as the C structure: for reading a field or two quickly."""
        port_num = _port(port_num)
        attr = ffi.new("struct ibv_port_attr *")
        pointer, calls = self.pointer, self.library.calls
        try:
            code = lib.aiordma_query_port(pointer, port_num, attr)
            if code == errno.EOPNOTSUPP:  # an older library: without port_cap_flags2
                compat = ffi.cast("struct _compat_ibv_port_attr *", attr)
                calls.ibv_query_port(pointer, port_num, compat)
            elif code:
                raise failure("ibv_query_port", abs(code))
        except VerbsError as error:
            raise explained(error, f"port {port_num} of {self.name}") from None
        return attr

    def query_gid_table(self) -> list[GIDEntry]:
        """The GIDs of all ports, empty entries left out.

        Each is the same object as before, with the name of its interface, until the table changes.
        """
        ports = range(1, self.query_device().phys_port_cnt + 1)
        room = max(1, sum(self.ask_port(port).gid_tbl_len for port in ports))
        entries = _unset("struct ibv_gid_entry[]", room)
        calls, pointer = self.library.calls, self.pointer
        count = calls._ibv_query_gid_table(pointer, entries, room, 0, _ENTRY_SIZE)
        there = ffi.buffer(entries, count * _ENTRY_SIZE)
        known, table = self._gid_table
        if there != known:
            table = tuple(GIDEntry.read(entries[index]) for index in range(count))
            self._gid_table = there[:], table
        return list(table)

    def query_gid(self, index: int, port_num: int = 1) -> GIDEntry:
        """One entry of a port's GID table. VerbsError (ENODATA) when the entry is empty."""
        index, port_num = integer("index", index, 0, I32_MAX), _port(port_num)
        entry = ffi.new("struct ibv_gid_entry *")
        try:
            self.library.calls._ibv_query_gid_ex(
                self.pointer, port_num, index, entry, 0, _ENTRY_SIZE
            )
        except VerbsError as error:
            where = f"GID index {index} of port {port_num} of {self.name}"
            raise explained(error, where) from None
        return GIDEntry.read(entry)

    def find_gid(self, ip: str | IPAddress, port_num: int | None = None) -> GIDEntry:
        """The entry of a local IP address, RoCE v2 before others. ValueError if there is none."""
        raw = GID.from_ip(ip).raw
        table = self.query_gid_table()
        if port_num is not None:
            table = [entry for entry in table if entry.port_num == port_num]
        found = [entry for entry in table if entry.gid.raw == raw]
        if not found:
            there = ", ".join(str(entry.gid) for entry in table) or "none"
            raise ValueError(f"{self.name} has no GID for {ip}; its GIDs: {there}")
        return best(found)

    def choose_gid(self, port_num: int = 1, to: GID | None = None) -> GIDEntry:
        """The best entry of a port: routable RoCE v2 first, loopback and link-local last.

        With ``to``, the best to reach that GID: one that cannot comes last. ValueError when the
        port has no GID.
        """
        port_num = _port(port_num)
        if to is not None:
            instance("to", to, GID, "a GID, as GID(raw) or GID.from_ip(text)")
        table = [e for e in self.query_gid_table() if e.port_num == port_num]
        if not table:
            raise ValueError(f"port {port_num} of {self.name} has no GID")
        return min(table, key=lambda entry: (bool(entry.problem(to)), entry.preference()))

    def explain_gid(self, entry: GIDEntry, to: GID | None = None) -> str:
        """Why ``entry`` is a bad choice, to reach ``to`` or at all; empty when it is none.

        The text names the index, the GID, what is wrong with it, and the better one.
        """
        problem = entry.problem(to)
        if not problem:
            return ""
        return f"{entry} of {self.name} {problem}; {better_gid(self, entry.port_num, to)}"

    # --- P_Keys ----------------------------------------------------------------------------

    def query_pkey(self, index: int, port_num: int = 1) -> int:
        """One entry of a port's P_Key table; bit 15 is full membership (IBTA clause 10.9.1)."""
        index, port_num = integer("index", index, 0, I32_MAX), _port(port_num)
        pkey = ffi.new("uint16_t *")
        try:
            self.library.calls.ibv_query_pkey(self.pointer, port_num, index, pkey)
        except VerbsError as error:
            where = f"P_Key index {index} of port {port_num} of {self.name}"
            raise explained(error, where) from None
        return int.from_bytes(ffi.buffer(pkey)[:], "big")

    def query_pkey_table(self, port_num: int = 1) -> dict[int, int]:
        """The P_Keys of a port by index, empty entries (0) left out."""
        keys = {
            index: self.query_pkey(index, port_num)
            for index in range(self.query_port(port_num).pkey_tbl_len)
        }
        return {index: pkey for index, pkey in keys.items() if pkey}

    def find_pkey(self, pkey: int, port_num: int = 1) -> int:
        """The index of a P_Key, full membership before limited.

        ValueError, which lists what there is, when the port is not in that partition.
        """
        pkey, port_num = integer("pkey", pkey, 0, 0xFFFF), _port(port_num)
        table = self.query_pkey_table(port_num)
        for wanted in (pkey, pkey | 0x8000):
            for index, found in table.items():
                if found == wanted:
                    return index
        there = ", ".join(f"{found:#06x}" for found in table.values()) or "none"
        raise ValueError(f"port {port_num} of {self.name} has no P_Key {pkey:#06x}: {there}")

    # --- what is made here -----------------------------------------------------------------

    def alloc_pd(self) -> ProtectionDomain:
        """Make a protection domain, in which memory and queue pairs belong together."""
        return ProtectionDomain(self, self.library.calls.ibv_alloc_pd(self.pointer))

    def alloc_td(self) -> ThreadDomain:
        """Make a thread domain: ibv_alloc_td(3). UnsupportedError where there are none."""
        return ThreadDomain(self)

    def alloc_parent_domain(
        self, pd: ProtectionDomain, td: ThreadDomain | None = None
    ) -> ParentDomain:
        """Make a protection domain beside ``pd`` whose objects are used in ``td`` alone.

        UnsupportedError where there are none. Source: ibv_alloc_parent_domain(3).
        """
        return ParentDomain(pd, td)

    def alloc_dm(self, length: int, log_align_req: int = 0) -> DeviceMemory:
        """Allocate memory of the device itself, aligned to ``2 ** log_align_req``: ibv_alloc_dm(3).

        ValueError beyond what the device has (``max_dm_size``), UnsupportedError where it has
        none.
        """
        length = integer("length", length, None)
        log_align_req = integer("log_align_req", log_align_req, 0, U32_MAX)
        most = self.query_device_ex().max_dm_size
        capability = "memory of its own (device memory)"
        if not most:
            raise self._lacking(capability, "ibv_alloc_dm")
        if not 0 < length <= most:
            raise ValueError(f"{length} bytes of device memory; {self.name} has 1 to {most}")
        attr = ffi.new("struct ibv_alloc_dm_attr *")
        attr.length = length
        attr.log_align_req = log_align_req
        with self._offering(capability):
            pointer = self.library.calls.ibv_alloc_dm(self.pointer, attr)
        return DeviceMemory(self, pointer, length)

    create_cq: Final = create_cq_on
    open_xrcd: Final = open_xrcd_on

    def create_comp_channel(self) -> CompletionChannel:
        """Make a completion channel; its ``fd`` does not block."""
        return CompletionChannel(self, self.library.calls.ibv_create_comp_channel(self.pointer))

    @property
    def cq_fields(self) -> WCFields | None:
        """The fields of the device's extended completion queues; None where there are none."""
        if self._cq_fields is None:
            self._cq_fields = (most_fields(self),)
        return self._cq_fields[0]

    # --- asynchronous events ---------------------------------------------------------------

    def async_events(self) -> list[AsyncEvent]:
        """Take and acknowledge the events that are there; never waits.

        ``async_fd`` is readable when there are some, and may be when there are none yet; the
        first call makes it non-blocking. A borrowed context is shared: this takes the events
        of all its users.
        """
        code = lib.aiordma_set_nonblocking(self.library.table, self.async_fd)
        if code:
            raise failure("fcntl", code, f"the asynchronous event fd of {self.name}")
        calls, pointer = self.library.calls, self.pointer
        raw = ffi.new("struct ibv_async_event *")
        events = []
        while calls.ibv_get_async_event(pointer, raw):
            events.append(event := _read_event(raw, self._elements))
            self._event_counts[event.type.name] += 1
            calls.ibv_ack_async_event(raw)
        return events

    def statistics(self) -> DeviceStatistics:
        """Counts of what is open on this context, and of what has failed there."""
        return DeviceStatistics(
            self.name,
            count_open(self.node),
            {WCStatus(status).name: count for status, count in sorted(self._failures.items())},
            dict(sorted(self._event_counts.items())),
        )

    def _label(self) -> str:
        return f"Context {self.name}"

    def _details(self) -> str:
        return f"({self.library.name}){' borrowed' if self.borrowed else ''}"


def _read_event(raw: h.ibv_async_event, elements: Mapping[int, Any]) -> AsyncEvent:
    kind = EventType(raw.event_type)
    member = _MEMBERS.get(kind)
    if member is None:
        return AsyncEvent(kind)
    value = getattr(raw.element, member)
    if member == "port_num":
        return AsyncEvent(kind, port_num=value)
    return AsyncEvent(kind, elements.get(int(ffi.cast("uintptr_t", value))))


def _port(port_num: int) -> int:
    return integer("port_num", port_num, 0, 0xFF)
