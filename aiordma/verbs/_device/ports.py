"""The ports of a device and their tables: GIDs by index, by address, by choice; P_Keys."""

from __future__ import annotations

import errno
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiordma._core.arguments import I32_MAX, instance, integer
from aiordma._native import Library, explained, failure, ffi, lib
from aiordma.errors import VerbsError

from .address import GID, GIDEntry, IPAddress
from .attributes import DeviceAttributes, PortAttributes
from .resource import Resource

if TYPE_CHECKING:
    from aiordma._native import handles as h


_ENTRY_SIZE = ffi.sizeof("struct ibv_gid_entry")

# For memory that a call fills and that is read only as far as it was filled.
_unset = ffi.new_allocator(should_clear_after_alloc=False)


class Ports(Resource["h.ibv_context"]):
    """The part of :class:`Context` that queries ports and their tables. Ports count from 1."""

    library: Library
    name: str
    _gid_table: tuple[bytes, tuple[GIDEntry, ...]]
    """The table as it was last, in C and as objects."""

    @abstractmethod
    def query_device(self) -> DeviceAttributes: ...

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

    # --- GIDs ------------------------------------------------------------------------------

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
        size = ffi.sizeof("struct ibv_gid_entry")
        try:
            self.library.calls._ibv_query_gid_ex(self.pointer, port_num, index, entry, 0, size)
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
        return f"{entry} of {self.name} {problem}; {self._better(entry.port_num, to)}"

    def _better(self, port_num: int, to: GID | None) -> str:
        better = self.choose_gid(port_num, to)
        return "there is no better one" if better.problem(to) else f"{better} would do"

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


def _port(port_num: int) -> int:
    return integer("port_num", port_num, 0, 0xFF)


def best(entries: Sequence[GIDEntry]) -> GIDEntry:
    """The first choice among some."""
    return entries[0] if len(entries) == 1 else min(entries, key=GIDEntry.preference)
