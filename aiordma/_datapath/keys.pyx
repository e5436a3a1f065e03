# Keys that let the peer read messages from this side's memory. Each key belongs to one rail.
#
# A memory window provides the key if the device supports windows. Such a key is valid on only one
# queue pair, and the peer's acknowledgement can invalidate it. Otherwise, a memory region provides
# the key.

from libc.errno cimport EFAULT, EINVAL, EIO, errno
from libc.stdint cimport uintptr_t

cimport cython

from .frames cimport IS_WINDOW
from .memory cimport PoolBlock
from .work_queue cimport IBV_ACCESS_MW_BIND, IBV_ACCESS_REMOTE_READ

import array

from aiordma._native import ffi, fork
from aiordma.verbs._memory.memory_region import address_of_mr, in_domain, is_fully_mapped, reg_mr
from aiordma.errors import RDMAError, VerbsError


cdef enum:
    SPARE_WINDOWS = 16  # unbound windows kept for the next messages


cdef bint has_no_holes(object owner) noexcept:
    """Return whether all the memory is mapped, so that embedded devices need not check it."""
    return (
        type(owner) is bytes
        or type(owner) is bytearray
        or type(owner) is array.array
        or isinstance(owner, PoolBlock)
    )


# The peer may still be reading memory with the key, so the cycle collector must not clear the key.
@cython.no_gc_clear
@cython.freelist(64)
@cython.final
cdef class Key:
    """The key for one piece of memory on one rail."""

    cdef uint32_t next_rkey(self) noexcept:
        """Return the rkey that is valid after the next bind."""
        return self.mr.rkey if self.window is None else self.window.next_key()

    cdef uint32_t bound_rkey(self) noexcept:
        """Return the current rkey. If the key has a window, the window must be bound."""
        return self.mr.rkey if self.window is None else self.window.mw.rkey

    cdef uint32_t flags(self) noexcept:
        return 0 if self.window is None else IS_WINDOW


@cython.no_gc_clear
@cython.final
cdef class ReadKeys:
    """The keys of one rail: rkeys for the peer, and lkeys for local requests."""

    def __init__(self, pool: Pool):
        cdef uintptr_t deregister = pool.pd.context.library.dereg_mr
        self.pool, self.pd = pool, pool.pd
        self.windows = []
        self.fork_generation = fork.generation()
        self.deregister = <int (*)(ibv_mr *) noexcept nogil> deregister
        cdef uintptr_t exclude_from_counts = int(
            ffi.cast("uintptr_t", pool.pd.context.library.table.device.exclude_from_served)
        )
        self.exclude_from_counts = <void (*)(uint32_t) noexcept nogil> exclude_from_counts

    cdef Key open(self, object source, const unsigned char *bytes, uint64_t length):
        """Create a key for a window if possible, or for a new region.

        If the key has a window, the caller must bind it.
        """
        cdef object owner = source
        cdef PoolBlock block
        cdef Key key = Key.__new__(Key)
        key.keys = self
        if type(owner) is memoryview:
            owner = owner.obj
        if self.pool.has_windows:
            # The region for all memory of the process saves a registration. The device cannot check
            # the bounds of this region, so use it only for memory that is certainly mapped.
            if self.pool.local_dma_mr and has_no_holes(owner):
                key.region = self.pool.local_dma_mr
            # Without bounds, a window on the block's region would show the peer the other blocks.
            elif isinstance(owner, PoolBlock) and self.pool.enforces_window_bounds:
                block = <PoolBlock> owner
                key.region = (
                    block.mr
                    if block.pool is self.pool
                    else address_of_mr(in_domain((<object> block).region, self.pd))
                )
            else:
                try:
                    key.mr = self.register(owner, bytes, length, IBV_ACCESS_MW_BIND)
                    key.region = <uintptr_t> key.mr
                except VerbsError as error:
                    # The kernel does not allow windows on read-only memory. Register the memory for
                    # remote reading instead.
                    if error.errno != EFAULT:
                        raise
            if key.region:
                try:
                    key.window = self.windows.pop() if self.windows else self.new_window()
                except BaseException:
                    self.close(key, NOT_INVALIDATED)
                    raise
                return key
        key.mr = self.register(owner, bytes, length, IBV_ACCESS_REMOTE_READ)
        # Messages count as sent bytes, not as bytes that the peer reads with one-sided reads.
        if self.exclude_from_counts != NULL:
            self.exclude_from_counts(key.mr.rkey)
        return key

    cdef Window new_window(self):
        """Allocate a window for messages, whose reads do not count as one-sided reads."""
        cdef Window window = Window(self.pd.alloc_mw())
        if self.exclude_from_counts != NULL:
            self.exclude_from_counts(window.mw.rkey)
        return window

    cdef ibv_mr *register(
        self, object owner, const unsigned char *bytes, uint64_t length, int access
    ) except NULL:
        # If reg_mr raises an exception, the traceback keeps its arguments alive. Pass the address,
        # so that the buffer object can be freed anyway.
        pointer, _ = reg_mr(
            self.pd, ffi.cast("void *", <uintptr_t> bytes), length, access, None,
            fully_mapped=is_fully_mapped(owner),
        )
        cdef uintptr_t address = int(ffi.cast("uintptr_t", pointer))
        return <ibv_mr *> address

    cdef int end_window(self, Key key, uint32_t invalidated_key) noexcept:
        """Keep an invalidated window for reuse, or close it. Returns 0 or an errno value."""
        cdef Window window = key.window
        key.window, key.region = None, 0
        if window is None:
            return 0
        if (
            invalidated_key
            and invalidated_key == window.mw.rkey
            and len(self.windows) < SPARE_WINDOWS
        ):
            self.windows.append(window)
            return 0
        try:
            window.close()
        except (RDMAError, OSError) as error:
            return error.errno or EINVAL
        return 0

    cdef int close(self, Key key, uint32_t invalidated_key) noexcept:
        """End the peer's access. Returns 0 or the errno value of a failure.

        `invalidated_key` is a window's key that the peer has invalidated, or NOT_INVALIDATED.
        """
        cdef int window_error = self.end_window(key, invalidated_key), code = 0
        cdef ibv_mr *mr = key.mr
        key.mr = NULL
        if mr != NULL and self.fork_generation == fork.generation():
            with nogil:  # this can take a while if pages are pinned
                code = self.deregister(mr)
        if code < 0:
            code = errno  # some providers return -1 and set errno
        if code == EIO:  # the device was removed, and the kernel has already released the region
            code = 0
        return code or window_error

    def close_windows(self):
        """Close the windows that are not bound, before the queue pair is destroyed."""
        while self.windows:
            self.windows.pop().close()

    cpdef uint32_t local_key(self, Pinned memory) except? 0:
        """Return the lkey of registered memory for this rail, or 0 if it does not have one.

        The memory is registered in the rail's protection domain on first use.
        """
        if isinstance(memory, PoolBlock) and (<PoolBlock> memory).pool is self.pool:
            return (<PoolBlock> memory).lkey
        if self.pool.local_dma_lkey:
            return self.pool.local_dma_lkey
        region = getattr(memory, "region", None)  # None if the first rail uses the global key
        return 0 if region is None else in_domain(region, self.pd).lkey

