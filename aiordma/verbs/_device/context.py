"""Open devices: their capabilities, ports and addresses, and the objects created on them."""

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
from .._cq.create_cq import supported_fields
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
from .route_lookup import better_gid_hint
from .statistics import DeviceStatistics, count_open

# Maps each event type to the member of struct ibv_async_event's union that is valid for events of
# this type (ibv_get_async_event(3)).
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

_GID_ENTRY_SIZE = ffi.sizeof("struct ibv_gid_entry")

# An allocator that does not zero the memory. Read only the entries that the C function reports as
# written.
_new_uncleared = ffi.new_allocator(should_clear_after_alloc=False)


class AsyncEvent(NamedTuple):
    """An asynchronous event reported by a device. See ibv_get_async_event(3).

    ``element`` is the affected queue pair, completion queue or shared receive queue. It is None if
    the event affects something else, or if the Python object no longer exists. ``port_num`` is the
    affected port, if any.
    """

    type: EventType
    element: QueuePair | CompletionQueue | SharedReceiveQueue | None = None
    port_num: int | None = None


def event_error(event: AsyncEvent, context: Context) -> DeviceEventError:
    """Return the exception for an event that makes a device, or an object on it, unusable."""
    element = repr(event.element) if event.element is not None else ""
    return DeviceEventError(event.type.name, device=context.name, element=element)


# Maps each library and C pointer to the contexts that wrap the pointer. If threads race, several
# contexts are created, but all callers get the first open one. A lock is not an option, because a
# destructor that runs in the thread holding the lock could deadlock.
_borrowed_contexts: dict[tuple[str, int], list[weakref.ref[Context]]] = {}


def _first_open_context(references: list[weakref.ref[Context]]) -> Context | None:
    """Return the first context that is still open, and remove the closed ones before it."""
    for ref in tuple(references):
        if (context := ref()) is not None and not context.closed:
            return context
        with suppress(ValueError):  # already removed by another thread
            references.remove(ref)
    return None


class Context(Resource[h.ibv_context]):
    """An open device, created by :meth:`Device.open` or borrowed from the connection manager.

    ``name`` is the device's name, and ``num_comp_vectors`` is its number of completion vectors. Any
    thread may query the context and create objects on it. These objects keep the context alive.
    Closing the context closes all of them.
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
        """The most recent GID table, as C structures and as GIDEntry objects."""
        self._cq_fields: tuple[WCFields | None] | None = None
        """The result of `supported_fields` in a tuple, or None if it is not known yet."""
        self._failures: Counter[int] = Counter()
        """The number of failed completions, by status. See :meth:`statistics`."""
        self._event_counts: Counter[str] = Counter()
        # Maps the addresses of C structures to their Python objects. Asynchronous events contain
        # these addresses.
        self._objects_by_address: weakref.WeakValueDictionary[int, Resource[Any]] = (
            weakref.WeakValueDictionary()
        )

    @property
    def async_fd(self) -> int:
        """A file descriptor that becomes readable when asynchronous events are pending.

        The descriptor of a borrowed context changes when the connection manager closes and reopens
        the device.
        """
        return int(self.pointer.async_fd)

    @classmethod
    def borrow(cls, library: Library, pointer: h.ibv_context) -> Context:
        """Return the context for a device that is opened and closed by librdmacm.

        There is one context object per C pointer, shared by all users. Its ``close()`` closes the
        objects created on the context but leaves the device open.
        """
        key = (library.name, int(ffi.cast("uintptr_t", pointer)))
        references = _borrowed_contexts.setdefault(key, [])
        if (context := _first_open_context(references)) is not None:
            return context
        c_name = library.calls.ibv_get_device_name(pointer.device)
        name = ffi.string(c_name).decode(errors="replace")
        new_context = cls(library, pointer, name, borrowed=True)
        references.append(weakref.ref(new_context))
        # Another thread may have added a context first, which all threads then share.
        context = _first_open_context(references)
        assert context is not None
        return context

    # --- device attributes -----------------------------------------------------------------

    def query_device(self) -> DeviceAttributes:
        """Return the device's limits and capabilities. The result is cached."""
        if self._attributes is None:
            attr = ffi.new("struct ibv_device_attr *")
            self.library.calls.ibv_query_device(self.pointer, attr)
            self._attributes = DeviceAttributes.read(attr)
        return self._attributes

    def query_device_ex(self) -> ExtendedDeviceAttributes:
        """Return the device's extended limits and capabilities. The result is cached.

        If the library or the device does not support this query, all extended values are zero.
        """
        if self._extended is None:
            from .capabilities import ExtendedDeviceAttributes  # noqa: PLC0415

            attr = ffi.new("struct ibv_device_attr_ex *")
            calls = self.library.calls
            try:
                calls.ibv_query_device_ex(self.pointer, attr)
            except UnsupportedError:
                calls.ibv_query_device(self.pointer, ffi.addressof(attr, "orig_attr"))
            self._extended = ExtendedDeviceAttributes.read(attr)
        return self._extended

    def query_rt_values_ex(self) -> int:
        """Read the device's clock, which is also the clock of completion timestamps.

        See ibv_query_rt_values_ex(3).

        Returns:
            The time in ticks of ``hca_core_clock``, within ``completion_timestamp_mask``.

        Raises:
            UnsupportedError: If the device's clock cannot be read.
        """
        values = ffi.new("struct ibv_values_ex *")
        values.comp_mask = lib.IBV_VALUES_MASK_RAW_CLOCK
        with self._requires_capability("reading the device clock"):
            self.library.calls.ibv_query_rt_values_ex(self.pointer, values)
        if not values.comp_mask & lib.IBV_VALUES_MASK_RAW_CLOCK:
            raise self._unsupported_error("reading the device clock", "ibv_query_rt_values_ex")
        # mlx5 and the embedded device store all ticks in tv_nsec, and set tv_sec to 0.
        return values.raw_clock.tv_sec * 1_000_000_000 + values.raw_clock.tv_nsec

    @contextmanager
    def _requires_capability(
        self, capability: str, describe_error: Callable[[VerbsError], str] | None = None
    ) -> Iterator[None]:
        """Add the capability's name to any UnsupportedError raised in the ``with`` block.

        Args:
            capability: The name of the capability.
            describe_error: A function that creates the message for any other VerbsError. If None,
                other errors are not changed.
        """
        try:
            yield
        except UnsupportedError as error:
            raise self._unsupported_error(capability, error.verb, error.errno or 0) from None
        except VerbsError as error:
            if describe_error is None:
                raise
            raise explained(error, describe_error(error)) from None

    def _unsupported_error(
        self, capability: str, verb: str, code: int = errno.EOPNOTSUPP
    ) -> UnsupportedError:
        return UnsupportedError(capability, device=self.name, verb=verb, errno=code)

    # --- ports (numbered from 1) and GIDs --------------------------------------------------

    def query_port(self, port_num: int = 1) -> PortAttributes:
        """Query a port's current state and limits."""
        return PortAttributes.read(port_num, self.ask_port(port_num))

    def ask_port(self, port_num: int) -> h.ibv_port_attr:
        """Query a port and return the C structure, which is faster if few fields are needed."""
        port_num = _check_port_num(port_num)
        attr = ffi.new("struct ibv_port_attr *")
        pointer, calls = self.pointer, self.library.calls
        try:
            code = lib.aiordma_query_port(pointer, port_num, attr)
            if code == errno.EOPNOTSUPP:  # the library predates port_cap_flags2
                compat = ffi.cast("struct _compat_ibv_port_attr *", attr)
                calls.ibv_query_port(pointer, port_num, compat)
            elif code:
                raise failure("ibv_query_port", abs(code))
        except VerbsError as error:
            raise explained(error, f"cannot query port {port_num} of {self.name}") from None
        return attr

    def query_gid_table(self) -> list[GIDEntry]:
        """Return the non-empty GID table entries of all ports.

        Until the table changes, each call returns the same entry objects.
        """
        ports = range(1, self.query_device().phys_port_cnt + 1)
        capacity = max(1, sum(self.ask_port(port).gid_tbl_len for port in ports))
        entries = _new_uncleared("struct ibv_gid_entry[]", capacity)
        calls, pointer = self.library.calls, self.pointer
        count = calls._ibv_query_gid_table(pointer, entries, capacity, 0, _GID_ENTRY_SIZE)
        raw_table = ffi.buffer(entries, count * _GID_ENTRY_SIZE)
        cached_raw, table = self._gid_table
        if raw_table != cached_raw:
            table = tuple(GIDEntry.read(entries[index]) for index in range(count))
            self._gid_table = raw_table[:], table
        return list(table)

    def query_gid(self, index: int, port_num: int = 1) -> GIDEntry:
        """Return an entry in a port's GID table.

        Raises:
            VerbsError: With ENODATA, if the entry is empty.
        """
        index, port_num = integer("index", index, 0, I32_MAX), _check_port_num(port_num)
        entry = ffi.new("struct ibv_gid_entry *")
        try:
            self.library.calls._ibv_query_gid_ex(
                self.pointer, port_num, index, entry, 0, _GID_ENTRY_SIZE
            )
        except VerbsError as error:
            message = f"cannot query GID index {index} of port {port_num} of {self.name}"
            raise explained(error, message) from None
        return GIDEntry.read(entry)

    def find_gid(self, ip: str | IPAddress, port_num: int | None = None) -> GIDEntry:
        """Return the GID table entry for a local IP address, preferring RoCE v2.

        Raises:
            ValueError: If no entry has this address.
        """
        raw = GID.from_ip(ip).raw
        table = self.query_gid_table()
        if port_num is not None:
            table = [entry for entry in table if entry.port_num == port_num]
        matches = [entry for entry in table if entry.gid.raw == raw]
        if not matches:
            known_gids = ", ".join(str(entry.gid) for entry in table) or "none"
            raise ValueError(f"{self.name} has no GID for {ip}; its GIDs are: {known_gids}")
        return best(matches)

    def choose_gid(self, port_num: int = 1, to: GID | None = None) -> GIDEntry:
        """Return a port's best GID table entry, preferring routable RoCE v2 addresses.

        Args:
            port_num: The port.
            to: The peer's GID. Entries that cannot reach it are only used as a last resort.

        Raises:
            ValueError: If the port has no GID.
        """
        port_num = _check_port_num(port_num)
        if to is not None:
            instance("to", to, GID, "a GID, such as GID(raw) or GID.from_ip(text)")
        table = [e for e in self.query_gid_table() if e.port_num == port_num]
        if not table:
            raise ValueError(f"port {port_num} of {self.name} has no GID")
        return min(table, key=lambda entry: (bool(entry.problem(to)), entry.preference()))

    def explain_gid(self, entry: GIDEntry, to: GID | None = None) -> str:
        """Return why ``entry`` is a poor source address, or an empty string if it is a good one.

        The text describes the entry and its problem, and suggests a better entry.

        Args:
            entry: The entry to check.
            to: The peer's GID; None means any peer.
        """
        problem = entry.problem(to)
        if not problem:
            return ""
        return f"{entry} of {self.name} {problem}; {better_gid_hint(self, entry.port_num, to)}"

    # --- P_Keys ----------------------------------------------------------------------------

    def query_pkey(self, index: int, port_num: int = 1) -> int:
        """Return an entry in a port's P_Key table.

        Bit 15 indicates full membership in the partition (IBTA volume 1, clause 10.9.1).
        """
        index, port_num = integer("index", index, 0, I32_MAX), _check_port_num(port_num)
        pkey = ffi.new("uint16_t *")
        try:
            self.library.calls.ibv_query_pkey(self.pointer, port_num, index, pkey)
        except VerbsError as error:
            message = f"cannot query P_Key index {index} of port {port_num} of {self.name}"
            raise explained(error, message) from None
        return int.from_bytes(ffi.buffer(pkey)[:], "big")

    def query_pkey_table(self, port_num: int = 1) -> dict[int, int]:
        """Return a port's non-empty P_Keys as a dict that maps each index to its P_Key."""
        keys = {
            index: self.query_pkey(index, port_num)
            for index in range(self.query_port(port_num).pkey_tbl_len)
        }
        return {index: pkey for index, pkey in keys.items() if pkey}

    def find_pkey(self, pkey: int, port_num: int = 1) -> int:
        """Return the index of a P_Key, or else of its full membership, in the port's table.

        Raises:
            ValueError: If the port does not have this P_Key. The message lists the port's P_Keys.
        """
        pkey, port_num = integer("pkey", pkey, 0, 0xFFFF), _check_port_num(port_num)
        table = self.query_pkey_table(port_num)
        for wanted in (pkey, pkey | 0x8000):
            for index, found in table.items():
                if found == wanted:
                    return index
        known_pkeys = ", ".join(f"{found:#06x}" for found in table.values()) or "none"
        raise ValueError(
            f"port {port_num} of {self.name} has no P_Key {pkey:#06x}; its P_Keys are:"
            f" {known_pkeys}"
        )

    # --- resources -------------------------------------------------------------------------

    def alloc_pd(self) -> ProtectionDomain:
        """Create a protection domain. Its memory regions and queue pairs can be used together."""
        return ProtectionDomain(self, self.library.calls.ibv_alloc_pd(self.pointer))

    def alloc_td(self) -> ThreadDomain:
        """Create a thread domain. See ibv_alloc_td(3).

        Raises:
            UnsupportedError: If the device does not support thread domains.
        """
        return ThreadDomain(self)

    def alloc_parent_domain(
        self, pd: ProtectionDomain, td: ThreadDomain | None = None
    ) -> ParentDomain:
        """Create a protection domain that combines ``pd`` with a thread domain.

        If ``td`` is given, objects created in the new domain may only be used by one thread at a
        time. See ibv_alloc_parent_domain(3).

        Raises:
            UnsupportedError: If the device does not support parent domains.
        """
        return ParentDomain(pd, td)

    def alloc_dm(self, length: int, log_align_req: int = 0) -> DeviceMemory:
        """Allocate memory on the device. See ibv_alloc_dm(3).

        Args:
            length: The number of bytes, up to ``max_dm_size``.
            log_align_req: The binary logarithm of the alignment. For example, 6 means 64-byte
                alignment.

        Raises:
            ValueError: If the device does not have this much memory.
            UnsupportedError: If the device does not provide memory for applications.
        """
        length = integer("length", length, None)
        log_align_req = integer("log_align_req", log_align_req, 0, U32_MAX)
        max_dm_size = self.query_device_ex().max_dm_size
        capability = "device memory"
        if not max_dm_size:
            raise self._unsupported_error(capability, "ibv_alloc_dm")
        if not 0 < length <= max_dm_size:
            raise ValueError(
                f"the length of device memory must be between 1 and {max_dm_size} bytes on"
                f" {self.name}, not {length}"
            )
        attr = ffi.new("struct ibv_alloc_dm_attr *")
        attr.length = length
        attr.log_align_req = log_align_req
        with self._requires_capability(capability):
            pointer = self.library.calls.ibv_alloc_dm(self.pointer, attr)
        return DeviceMemory(self, pointer, length)

    create_cq: Final = create_cq_on
    open_xrcd: Final = open_xrcd_on

    def create_comp_channel(self) -> CompletionChannel:
        """Create a completion channel. Its file descriptor ``fd`` is non-blocking."""
        return CompletionChannel(self, self.library.calls.ibv_create_comp_channel(self.pointer))

    @property
    def cq_fields(self) -> WCFields | None:
        """The fields extended completion queues can report, or None if these are unsupported."""
        if self._cq_fields is None:
            self._cq_fields = (supported_fields(self),)
        return self._cq_fields[0]

    # --- asynchronous events ---------------------------------------------------------------

    def async_events(self) -> list[AsyncEvent]:
        """Return and acknowledge all pending asynchronous events, without waiting.

        The first call makes ``async_fd`` non-blocking. The descriptor is readable when events are
        pending, but may also be readable without one. A borrowed context is shared, so this call
        also consumes events that its other users are waiting for.
        """
        code = lib.aiordma_set_nonblocking(self.library.table, self.async_fd)
        if code:
            raise failure(
                "fcntl", code, f"cannot make the event descriptor of {self.name} non-blocking"
            )
        calls, pointer = self.library.calls, self.pointer
        raw = ffi.new("struct ibv_async_event *")
        events = []
        while calls.ibv_get_async_event(pointer, raw):
            events.append(event := _read_event(raw, self._objects_by_address))
            self._event_counts[event.type.name] += 1
            calls.ibv_ack_async_event(raw)
        return events

    def statistics(self) -> DeviceStatistics:
        """Return the number of open objects, failures and events on this context."""
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


def _read_event(raw: h.ibv_async_event, objects_by_address: Mapping[int, Any]) -> AsyncEvent:
    """Convert a C event. Find the affected object by the address of its C structure."""
    kind = EventType(raw.event_type)
    member = _MEMBERS.get(kind)
    if member is None:
        return AsyncEvent(kind)
    value = getattr(raw.element, member)
    if member == "port_num":
        return AsyncEvent(kind, port_num=value)
    return AsyncEvent(kind, objects_by_address.get(int(ffi.cast("uintptr_t", value))))


def _check_port_num(port_num: int) -> int:
    return integer("port_num", port_num, 0, 0xFF)
