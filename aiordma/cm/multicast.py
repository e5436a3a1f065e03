"""Multicast groups of a datagram id: rdma_join_multicast(3), rdma_leave_multicast(3)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma._native import ffi
from aiordma.errors import VerbsError

from .address import Address, as_sockaddr
from .options import Options

if TYPE_CHECKING:
    from aiordma._native import handles as h

_ADDRESS_AND_FLAGS = 3  # RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS
_FULL_MEMBER, _SEND_ONLY = 0, 1  # enum rdma_cm_mc_join_flags

# An event names its join by the context that was given with it. Here that is a number that is never
# reused, so that an event of a group that has been left is not taken for one of a newer join.
_numbers = itertools.count(1)


class Multicast(Options):
    """Joining and leaving groups, for an id of a datagram port space that is bound to a device."""

    _groups: dict[int, Address]

    def join_multicast(self, address: Address, *, send_only: bool = False) -> None:
        """Join the group of a multicast address; the port is ignored.

        Then: MULTICAST_JOIN, whose ``datagrams`` is where to send to the group, or
        MULTICAST_ERROR. From then on the id's queue pair, if there is one, receives what is sent to
        the group, unless ``send_only``. VerbsError (EINVAL) in a port space of connections, or for
        an id that is bound to no device; UnsupportedError where the device has no groups of that
        address family.
        """
        sockaddr, _keep = as_sockaddr(address)
        attr = ffi.new("struct rdma_cm_join_mc_attr_ex *")
        attr.comp_mask = _ADDRESS_AND_FLAGS
        attr.join_flags = _SEND_ONLY if send_only else _FULL_MEMBER
        attr.addr = sockaddr
        number = next(_numbers)
        context = ffi.cast("void *", number)
        self._groups[number] = address
        try:
            self._call(self.library.calls.rdma_join_multicast_ex, attr, context)
        except VerbsError:
            del self._groups[number]
            raise

    def leave_multicast(self, address: Address) -> None:
        """Leave the group of an address that :meth:`join_multicast` was called with.

        VerbsError (EADDRNOTAVAIL) if it was not called with that address.
        """
        sockaddr, _keep = as_sockaddr(address)
        self._call(self.library.calls.rdma_leave_multicast, sockaddr)
        for number in [n for n, group in self._groups.items() if group == address]:
            del self._groups[number]

    def _leaving(self) -> Callable[[], None]:
        """A function that leaves every group, without keeping this object."""
        calls, pointer, groups = self.library.calls, self.pointer, self._groups

        def leave() -> None:
            while groups:
                _, address = groups.popitem()
                sockaddr, _keep = as_sockaddr(address)
                with contextlib.suppress(VerbsError):  # the join had failed
                    calls.rdma_leave_multicast(pointer, sockaddr)

        return leave

    def group_of(self, context: h.Characters | h.VoidPointer) -> Address | None:
        """The group of an event; None if the id has left that group."""
        return self._groups.get(int(ffi.cast("uintptr_t", context)))
