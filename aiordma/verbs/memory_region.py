"""Registered memory: library-owned, or the user's own, pinned for as long as it is registered."""

from __future__ import annotations

import errno
import mmap
import resource as limits
from typing import TYPE_CHECKING, cast

from aiordma._native import failure, ffi
from aiordma.errors import VerbsError

from .enums import AccessFlags
from .resource import Node, Resource

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from aiordma._native import handles as h

    from .protection_domain import ProtectionDomain

# What lets the device change the memory: all of these need a writable buffer, and the remote ones
# need local write as well (ibv_reg_mr(3)).
_REMOTE_CHANGES = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
_CHANGES = AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND | _REMOTE_CHANGES


class MemoryRegion(Resource["h.MRPointer"]):
    """Memory that the device may use: ``addr`` and ``length`` in bytes, with its two keys.

    ``lkey`` goes into local scatter/gather entries. ``rkey`` is a bearer token: whoever has it
    may do what ``access`` allows, anywhere in the region. The memory is pinned until ``close()``:
    a ``bytearray`` cannot be resized meanwhile, an ``mmap`` not closed. Dropping an unclosed
    region does not unpin it; closing its protection domain does.
    """

    def __init__(
        self,
        pd: ProtectionDomain,
        pointer: h.MRPointer,
        pin: h.Characters,
        access: AccessFlags,
    ) -> None:
        self.pd = pd
        self.addr = int(ffi.cast("uintptr_t", pin))
        self.length = len(pin)
        self.lkey = pointer.lkey
        self.rkey = pointer.rkey
        self.access = access
        destroy = pd.context.library.calls.ibv_dereg_mr
        super().__init__(Node("MemoryRegion", pointer, destroy, [pd.node], pin))

    @property
    def buf(self) -> memoryview:
        """The memory as bytes, read-only if the region is. A view of it outlives ``close()``."""
        self.pointer  # noqa: B018 - raises when this is closed
        view = memoryview(ffi.buffer(self.node.pin))
        return view if self.access & _CHANGES else view.toreadonly()

    def _label(self) -> str:
        return f"MemoryRegion {self.addr:#x}+{self.length}"

    def _details(self) -> str:
        access = self.access.name or "NONE"
        return f"lkey {self.lkey:#x} rkey {self.rkey:#x} {access}"


def register(pd: ProtectionDomain, memory: object, access: AccessFlags | None) -> MemoryRegion:
    """Register memory; :meth:`ProtectionDomain.reg_mr` is the public name and has the contract."""
    if isinstance(memory, int):
        pin, readonly = _owned(memory), False
    else:
        pin, readonly = _users(memory, access)
    if access is None:
        access = AccessFlags.NONE if readonly else AccessFlags.LOCAL_WRITE
    if not len(pin):
        raise ValueError("a memory region of 0 bytes")
    if access & _REMOTE_CHANGES and not access & AccessFlags.LOCAL_WRITE:
        raise ValueError(f"{access!r} needs LOCAL_WRITE as well (ibv_reg_mr(3))")
    calls = pd.context.library.calls
    try:
        if access & AccessFlags.RELAXED_ORDERING:  # an optional right: only iova2 knows them
            addr = int(ffi.cast("uintptr_t", pin))
            pointer = calls.ibv_reg_mr_iova2(pd.pointer, pin, len(pin), addr, access)
        else:
            pointer = calls.ibv_reg_mr(pd.pointer, pin, len(pin), access)
    except VerbsError as error:
        raise _explained(error, len(pin)) from None
    return MemoryRegion(pd, pointer, pin, access)


def _owned(length: int) -> h.Characters:
    if length <= 0:
        raise ValueError(f"a memory region of {length} bytes")
    # Page aligned and apart from the heap, so that nothing else lies on the registered pages.
    return ffi.from_buffer(
        mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), require_writable=True
    )


def _users(memory: object, access: AccessFlags | None) -> tuple[h.Characters, bool]:
    # Not every type that has the buffer protocol can tell the type checker so before Python 3.12.
    buffer = cast("Buffer", memory)
    readonly = memoryview(buffer).readonly
    if readonly and access is not None and access & _CHANGES:
        raise ValueError(
            f"a read-only {type(memory).__name__} cannot be registered with {access!r}; "
            "only reading (AccessFlags.NONE, REMOTE_READ) is possible"
        )
    return ffi.from_buffer(buffer, require_writable=not readonly), readonly


def _explained(error: VerbsError, length: int) -> VerbsError:
    detail = f"registering {length} bytes"
    if error.errno in (errno.ENOMEM, errno.EAGAIN):
        soft, hard = (_bytes(limit) for limit in limits.getrlimit(limits.RLIMIT_MEMLOCK))
        detail += (
            f"; the limit on locked memory (RLIMIT_MEMLOCK) of this process is {soft} (hard "
            f"limit: {hard}); if that is too little, raise it with 'ulimit -l', memlock in "
            "/etc/security/limits.conf or LimitMEMLOCK= of the systemd unit, or register less"
        )
    return failure(error.verb, error.errno or 0, detail)


def _bytes(limit: int) -> str:
    return "unlimited" if limit == limits.RLIM_INFINITY else f"{limit} bytes"
