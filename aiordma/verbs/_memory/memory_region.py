"""Registered memory. It is allocated by the library or the user, and pinned while registered."""

from __future__ import annotations

from array import array
from numbers import Integral
from typing import Any, NamedTuple, cast

from aiordma import verbs
from aiordma._core.arguments import choice, integer
from aiordma._native import explained, failure, ffi
from aiordma._native import handles as h
from aiordma.errors import BufferStateError, LocalRangeError, UnsupportedError, VerbsError

from .._device.enums import AccessFlags, Advice
from .._device.resource import Node, Resource
from .._qp.work_request import ScatterGatherElement
from .buffers import AnyMemory, bytes_of, keeper_of
from .memlock import locked_memory_hint
from .pages import Mapped, allocate

# Rights to modify the memory. All of them require a writable buffer. The remote rights also require
# LOCAL_WRITE (ibv_reg_mr(3)).
_REMOTE_WRITE_RIGHTS = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
_WRITE_RIGHTS = AccessFlags.LOCAL_WRITE | _REMOTE_WRITE_RIGHTS
_WRITE_RIGHTS_BITS = int(_WRITE_RIGHTS)  # an int, because enum operators are ten times slower
# Rights that a device may ignore. They require ibv_reg_mr_iova2() instead of ibv_reg_mr().
_OPTIONAL_RIGHTS = int(AccessFlags.RELAXED_ORDERING)
# Rights that `reg_mr` must check, because they depend on other rights, on `iova` or on the device.
_CONDITIONAL_RIGHTS = int(_REMOTE_WRITE_RIGHTS | AccessFlags.ZERO_BASED | AccessFlags.ON_DEMAND)

# Objects of these types get their memory from an allocator, so all of it is mapped. mmap is not
# included, because pages of a mapped file become inaccessible if the file is truncated (mmap(2)).
_ALLOCATED = frozenset({bytes, bytearray, array})

# The values of enum ibv_rereg_mr_flags and enum ibv_rereg_mr_err_code.
_TRANSLATION, _PD, _ACCESS = 1 << 0, 1 << 1, 1 << 2
_ERR_DO_FORK_OLD, _ERR_CMD = -3, -4

ADDRESS_SPACE = (1 << 64) - 1  # SIZE_MAX
# Ranges are split into pieces of this size, because an ibv_advise_mr(3) entry has a 32-bit length.
_ADVICE_PIECE = 1 << 31


class Memory(NamedTuple):
    """Memory to be registered, and the objects that keep it in place.

    `page_size` is the page size if the library allocated the memory, or 0 otherwise. The view and
    `keeper` together pin the memory (see `keeper_of`). Do not pin it with a cffi buffer, because
    the buffer would hold an export of the view. If the buffer and the view became garbage at the
    same time, Python before 3.12.7 would clear the view first and crash.
    """

    view: memoryview
    length: int
    page_size: int
    readonly: bool
    keeper: object = None


class MemoryRegion(Resource[h.ibv_mr]):
    """Memory the device may access: ``length`` bytes at ``addr``, with two keys.

    ``addr`` is the address used by work requests and peers. It is the memory's actual address
    unless you requested a different one with ``iova``. Use ``lkey`` in local scatter/gather
    elements. ``rkey`` is a bearer token: any peer that knows it can access the whole region, with
    the rights in ``access``. ``page_size`` is the page size if the library allocated the memory, or
    0 if you provided it.

    Memory you provided is pinned until you call ``close()``. Until then, for example, you cannot
    resize a ``bytearray`` or close an ``mmap``. Deleting the last reference to an open region does
    not unpin the memory, but closing its protection domain does.
    """

    def __init__(
        self,
        pd: verbs.ProtectionDomain,
        pointer: h.ibv_mr,
        addr: int,
        length: int,
        access: AccessFlags,
        *,
        pin: Memory | None = None,
        page_size: int = 0,
        parent: Node[Any] | None = None,
    ) -> None:
        self.pd: verbs.ProtectionDomain = pd
        self.addr: int = addr
        self.length: int = length
        self.lkey: int = pointer.lkey
        self.rkey: int = pointer.rkey
        self.access: AccessFlags = access
        self.page_size: int = page_size
        # This region's copies in other protection domains, which `in_domain` creates.
        self.elsewhere: dict[verbs.ProtectionDomain, MemoryRegion] = {}
        destroy = pd.context.library.calls.ibv_dereg_mr
        parents: list[Node[Any]] = [pd.node] if parent is None else [pd.node, parent]
        super().__init__(Node("MemoryRegion", pointer, destroy, parents, pin))

    @property
    def _view(self) -> memoryview | None:
        """The pinned memory, or None if the memory does not belong to a Python object."""
        pin = self.node.pin
        return pin.view if isinstance(pin, Memory) else None

    @property
    def buf(self) -> memoryview:
        """The memory as a memoryview of bytes, which is read-only if the region is read-only.

        The view remains valid after ``close()``. Raises BufferStateError if the memory does not
        belong to a Python object. This is the case for dma-bufs, device memory, and memory
        registered by address.
        """
        self.pointer  # noqa: B018 - raises if the region is closed
        whole = self._view
        if whole is None:
            raise BufferStateError(
                f"{self._label()} has no buffer, because its memory does not belong to a Python"
                " object"
            )
        view = whole[: self.length]
        return view if int(self.access) & _WRITE_RIGHTS_BITS else view.toreadonly()

    def sge(self, offset: int = 0, length: int | None = None) -> ScatterGatherElement:
        """Return a scatter/gather element for a range of the region.

        Args:
            offset: The start of the range within the region.
            length: The number of bytes. By default, the range extends to the end of the region.

        Raises:
            LocalRangeError: If the range is not within the region.
            BufferStateError: If the region is closed.
        """
        self.pointer  # noqa: B018 - raises if the region is closed
        offset, length = check_range(self.length, offset, length)
        return ScatterGatherElement(self.addr + offset, length, self.lkey)

    def prefetch(
        self, offset: int = 0, length: int | None = None, *, write: bool = False, wait: bool = True
    ) -> None:
        """Load a range of an on-demand region into memory before it is needed.

        Args:
            offset: The start of the range within the region.
            length: The number of bytes. By default, the range extends to the end of the region.
            write: Whether to prepare the pages for writing.
            wait: Whether to wait until the pages are in memory.

        Raises:
            LocalRangeError: If the range is not within the region.
            UnsupportedError: If the device does not support prefetching.
            VerbsError: If the device rejects the request; see :meth:`ProtectionDomain.advise_mr`.
        """
        offset, length = check_range(self.length, offset, length, min_length=1)
        self.pointer  # noqa: B018 - raises if the region is closed
        pieces = [
            ScatterGatherElement(
                self.addr + start, min(_ADVICE_PIECE, offset + length - start), self.lkey
            )
            for start in range(offset, offset + length, _ADVICE_PIECE)
        ]
        advice = Advice.PREFETCH_WRITE if write else Advice.PREFETCH
        self.pd.advise_mr(advice, pieces, flush=wait)

    def rereg(
        self,
        memory: object = None,
        access: AccessFlags | None = None,
        pd: verbs.ProtectionDomain | None = None,
    ) -> None:
        """Change the region's memory, access rights or protection domain.

        Passing None leaves the corresponding attribute unchanged. New memory replaces the previous
        memory, which is released. The keys may change. The region must not be in use by any
        operation. See ibv_rereg_mr(3).

        Args:
            memory: The new memory, as for :meth:`ProtectionDomain.reg_mr`.
            access: The new access rights.
            pd: The new protection domain.

        Raises:
            UnsupportedError: If the device does not support this operation. After any error, the
                region is unchanged unless the message says that it has been closed.
        """
        if memory is None and access is None and pd is None:
            raise ValueError("rereg() needs at least one of memory, access and pd")
        view = self._view
        rights = self.access if access is None else choice("access", access, AccessFlags)
        if memory is None:
            if view is not None:
                _check_writable(view, rights)
            elif access is not None:
                raise ValueError(
                    f"cannot change the access rights of {self._label()}, because its memory does "
                    "not belong to a Python object; close the region and register the memory again"
                )
        check_rights(rights)
        require_on_demand(self.pd.context, rights)
        new_memory = (
            None if memory is None else _memory_to_register(memory, rights, huge_pages=False)
        )
        flags = (
            (_TRANSLATION if new_memory is not None else 0)
            | (_PD if pd is not None else 0)
            | (_ACCESS if access is not None else 0)
        )
        calls, context = self.pd.context.library.calls, self.pd.context
        ffi.errno = 0
        code = calls.ibv_rereg_mr(
            self.pointer,
            flags,
            ffi.NULL if pd is None else pd.pointer,
            ffi.NULL if new_memory is None else pointer_to(new_memory.view),
            0 if new_memory is None else new_memory.length,
            0 if access is None else int(rights),
        )
        if code not in (0, _ERR_DO_FORK_OLD):  # the region is valid after DO_FORK_OLD
            if new_memory is not None:
                new_memory.view.release()  # the traceback would keep the view alive
            self._raise_rereg_error(code, context)
        if pd is not None:
            self.node.move(self.pd.node, pd.node)
            self.pd = pd
        if new_memory is not None:
            self.node.pin, self.length, self.page_size = (
                new_memory,
                new_memory.length,
                new_memory.page_size,
            )
            self.addr = 0 if rights & AccessFlags.ZERO_BASED else _address(new_memory.view)
        self.access = rights
        self.lkey, self.rkey = self.pointer.lkey, self.pointer.rkey

    def _raise_rereg_error(self, code: int, context: verbs.Context) -> None:
        message = f"cannot change {self!r}"
        error = failure("ibv_rereg_mr", code if code > 0 else ffi.errno, message)
        if isinstance(error, UnsupportedError):
            raise context._unsupported_error(
                "changing registered memory regions", error.verb, error.errno or 0
            )
        if code <= _ERR_CMD:  # the region is unusable but must still be deregistered
            message += "; the region has been closed"
            self.close()
        raise explained(error, message + locked_memory_hint(error))

    def _label(self) -> str:
        return f"MemoryRegion {self.addr:#x}+{self.length}"

    def _details(self) -> str:
        access = self.access.name or "NONE"
        return f"lkey {self.lkey:#x} rkey {self.rkey:#x} {access}"


def check_range(
    size: int, offset: int, length: int | None, *, min_length: int = 0
) -> tuple[int, int]:
    """Check a range within ``size`` bytes of memory, and return its offset and length.

    If ``length`` is None, the range extends to the end.

    Raises:
        LocalRangeError: If the range exceeds the memory or is shorter than ``min_length`` bytes.
    """
    offset = integer("offset", offset, None)
    length = size - offset if length is None else integer("length", length, None)
    if offset < 0 or length < min_length or offset + length > size:
        raise LocalRangeError(offset, length, size)
    return offset, length


def address_of(memory: object) -> int:
    """Return the address of an object's memory, for :meth:`ProtectionDomain.reg_pointer`.

    The address remains valid until the object moves or frees its memory.

    Raises:
        TypeError: If the object has no buffer.
        BufferError: If the buffer is not contiguous.
    """
    return _address(bytes_of(cast("AnyMemory", memory)))


def _address(view: memoryview) -> int:
    pin = ffi.from_buffer(view)
    try:
        return int(ffi.cast("uintptr_t", pin))
    finally:
        ffi.release(pin)


def pointer_to(view: memoryview) -> h.VoidPointer:
    return ffi.cast("void *", _address(view))


def register(
    pd: verbs.ProtectionDomain,
    memory: object,
    access: AccessFlags | None,
    iova: int | None,
    huge_pages: bool,
) -> MemoryRegion:
    """Implement :meth:`ProtectionDomain.reg_mr`."""
    access = None if access is None else choice("access", access, AccessFlags)
    iova = None if iova is None else integer("iova", iova)
    if huge_pages and not isinstance(memory, Integral):
        raise ValueError("memory must be a size in bytes if huge_pages is true")
    pin = _memory_to_register(memory, access, huge_pages)
    view, length, page_size, readonly, _ = pin
    if access is None:
        access = AccessFlags.NONE if readonly else AccessFlags.LOCAL_WRITE
    try:
        if not length:
            raise ValueError("a memory region must be at least 1 byte long, not 0")
        # ibv_reg_mr() creates all pages immediately, which is what a caller who requests huge pages
        # wants. With `fully_mapped`, the kernel may create each page on its first access.
        fully_mapped = not huge_pages if page_size else is_fully_mapped(view.obj)
        pointer, addr = reg_mr(
            pd, pointer_to(view), length, access, iova, fully_mapped=fully_mapped
        )
    except BaseException:
        view.release()  # the traceback would keep the view alive
        raise
    return MemoryRegion(pd, pointer, addr, length, access, pin=pin, page_size=page_size)


def reg_mr(
    pd: verbs.ProtectionDomain,
    memory: h.Characters | h.VoidPointer,
    length: int,
    access: AccessFlags,
    iova: int | None,
    *,
    fully_mapped: bool = False,
) -> tuple[h.ibv_mr, int]:
    """Register memory, and return the ``struct ibv_mr`` and the address for work requests.

    If `fully_mapped` is true, the device can rely on all of the memory being mapped (see
    `Library.reg_own_mr`).
    """
    rights = int(access)  # enum operators would double this function's run time
    if rights & _CONDITIONAL_RIGHTS:
        check_rights(access)
        require_on_demand(pd.context, access)
        if access & AccessFlags.ZERO_BASED:
            if iova:
                raise ValueError("with AccessFlags.ZERO_BASED, iova must be 0 or omitted")
            iova = 0
    library = pd.context.library
    addr = int(ffi.cast("uintptr_t", memory)) if iova is None else iova
    try:
        if iova is not None or rights & _OPTIONAL_RIGHTS:
            return library.calls.ibv_reg_mr_iova2(pd.pointer, memory, length, addr, rights), addr
        reg_mr_call = library.reg_own_mr if fully_mapped else library.calls.ibv_reg_mr
        return reg_mr_call(pd.pointer, memory, length, rights), addr
    except UnsupportedError as error:
        what = f"memory regions with {access!r}"
        raise pd.context._unsupported_error(what, error.verb, error.errno or 0) from None
    except VerbsError as error:
        raise explained(
            error, f"cannot register {length} bytes{locked_memory_hint(error)}"
        ) from None


def reg_local_dma(pd: verbs.ProtectionDomain) -> MemoryRegion | None:
    """Register all of this process's memory for local use, without pinning it.

    The region covers all addresses, so the device cannot check the bounds of a request. Therefore,
    only the library itself may use the key, and only for memory that it keeps alive. Cards could
    use an implicit on-demand region instead, but they would load the pages one at a time, which is
    slower than copying the data.

    Returns:
        The region, or None if the device requires memory to be pinned.
    """
    register_all = pd.context.library.reg_local_dma
    if register_all is None:
        return None
    pointer = register_all(pd.pointer)
    return MemoryRegion(pd, pointer, 0, ADDRESS_SPACE, AccessFlags.LOCAL_WRITE)


def address_of_mr(region: MemoryRegion) -> int:
    """Return the address of the region's `struct ibv_mr`, for the data path."""
    return int(ffi.cast("uintptr_t", region.pointer))


def in_domain(region: MemoryRegion, pd: verbs.ProtectionDomain) -> MemoryRegion:
    """Return a region in ``pd`` with the same memory, rights and address as ``region``.

    If ``region`` is already in ``pd``, it is returned. Otherwise, the first call registers a new
    region, and later calls reuse it. The new region is closed when ``region`` or ``pd`` is closed.
    The address of ``region`` must be the actual address of its memory, not a different ``iova``.

    The function raises the same exceptions as :meth:`ProtectionDomain.reg_pointer`, and
    BufferStateError if ``region`` is closed.
    """
    region.pointer  # noqa: B018 - raises if the region is closed
    if region.pd is pd:
        return region
    copy = region.elsewhere.get(pd)
    if copy is None:
        for closed_pd in [other_pd for other_pd in region.elsewhere if other_pd.closed]:
            del region.elsewhere[closed_pd]
        # The new region is a child of the original one, which keeps the memory mapped and in place.
        memory, length = ffi.cast("void *", region.addr), region.length
        is_own_memory = region.page_size != 0  # allocated by this library, so certainly mapped
        pointer, addr = reg_mr(pd, memory, length, region.access, None, fully_mapped=is_own_memory)
        copy = MemoryRegion(pd, pointer, addr, length, region.access, parent=region.node)
        region.elsewhere[pd] = copy
    return copy


def is_fully_mapped(owner: object) -> bool:
    """Return whether all memory of a buffer's owner is known to be mapped, for `reg_mr`."""
    if isinstance(owner, Mapped):
        return True
    while type(owner).__module__ == "numpy":
        array = cast("Any", owner)
        if array.base is None:
            return bool(array.flags.owndata)
        owner = array.base
    return type(owner) in _ALLOCATED


def check_rights(access: AccessFlags) -> None:
    """Raise ValueError if the rights include remote writes or atomics, but not LOCAL_WRITE."""
    if access & _REMOTE_WRITE_RIGHTS and not access & AccessFlags.LOCAL_WRITE:
        raise ValueError(f"access {access!r} also requires AccessFlags.LOCAL_WRITE")


def require_on_demand(
    context: verbs.Context, access: AccessFlags, *, implicit: bool = False
) -> None:
    """Raise UnsupportedError if ON_DEMAND is requested but not supported by the device."""
    if not access & AccessFlags.ON_DEMAND:
        return
    general = context.query_device_ex().odp_caps.general
    if not general:
        what = "on-demand paging (ODP)"
    elif implicit and not general & general.SUPPORT_IMPLICIT:
        what = "on-demand paging of the whole address space (implicit ODP)"
    else:
        return
    raise context._unsupported_error(what, "ibv_reg_mr")


def _memory_to_register(memory: object, access: AccessFlags | None, huge_pages: bool) -> Memory:
    """Return the memory to register, allocating it if ``memory`` is a size in bytes.

    If ``access`` is None, the caller chooses rights that the memory allows.

    Raises:
        ValueError: If the size is not positive, or if the memory is read-only but ``access`` allows
            the device to modify it.
    """
    if isinstance(memory, Integral):  # numpy integers also support the buffer protocol
        length = integer("memory", memory, None, None)
        if length <= 0:
            raise ValueError(f"a memory region must be at least 1 byte long, not {length}")
        pages = allocate(length, huge_pages)
        return Memory(pages.view, length, pages.page_size, readonly=False)
    # Before Python 3.12, type checkers do not recognize every type with the buffer protocol.
    view = bytes_of(cast("AnyMemory", memory))
    if access is not None:
        try:
            _check_writable(view, access)
        except BaseException:
            view.release()
            raise
    return Memory(view, len(view), 0, view.readonly, keeper_of(view))


def _check_writable(view: memoryview, access: AccessFlags) -> None:
    """Raise ValueError if the rights allow the device to modify read-only memory."""
    if view.readonly and access & _WRITE_RIGHTS:
        raise ValueError(
            f"cannot register a read-only {type(view.obj).__name__} with {access!r}; use writable "
            "memory, or limit access to AccessFlags.NONE or REMOTE_READ"
        )
