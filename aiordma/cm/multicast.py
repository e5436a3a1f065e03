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

# The events name a join by the context that was given with it: a number here, which never comes
# again, so that the event of a group that has been left is told from those of a newer one.
_numbers = itertools.count(1)


class Multicast(Options):
    """Joining and leaving. The id must be bound to a device, in a port space of datagrams."""

    _groups: dict[int, Address]

    def join_multicast(self, address: Address, *, send_only: bool = False) -> None:
        """Join the group of a multicast address; its port does not matter.

        Then: MULTICAST_JOIN, whose ``datagrams`` is where to send to the group, or
        MULTICAST_ERROR. The id's queue pair, if there is one, receives what is sent to the
        group from then on, unless ``send_only``. VerbsError (EINVAL) in a port space of
        connections, or for an id that is bound to no device; UnsupportedError where the device
        has no groups of that address family.
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
            self.library.calls.rdma_join_multicast_ex(self.pointer, attr, context)
        except VerbsError:
            del self._groups[number]
            raise

    def leave_multicast(self, address: Address) -> None:
        """Leave the group of an address that :meth:`join_multicast` was called with.

        VerbsError (EADDRNOTAVAIL) when it was not.
        """
        sockaddr, _keep = as_sockaddr(address)
        self.library.calls.rdma_leave_multicast(self.pointer, sockaddr)
        for number in [n for n, group in self._groups.items() if group == address]:
            del self._groups[number]

    def leaving(self) -> Callable[[], None]:
        """What leaves every group; it does not keep this object alive. For this package."""
        calls, pointer, groups = self.library.calls, self.pointer, self._groups

        def leave() -> None:
            while groups:
                _, address = groups.popitem()
                sockaddr, _keep = as_sockaddr(address)
                with contextlib.suppress(VerbsError):  # the join had failed
                    calls.rdma_leave_multicast(pointer, sockaddr)

        return leave

    def group_of(self, context: h.Characters | h.VoidPointer) -> Address | None:
        """The group that an event is about; None when it has been left since."""
        return self._groups.get(int(ffi.cast("uintptr_t", context)))
