# Keys by which the peer reads the memory of messages, each of one rail.
#
# A key is that of a memory window where the device has them, since no other queue pair takes it, and the
# peer's acknowledgement can end it; else of a memory region.

from libc.errno cimport EFAULT, EINVAL, EIO, errno
from libc.stdint cimport uintptr_t

cimport cython

from .frames cimport IS_WINDOW
from .memory cimport PoolBlock
from .work_queue cimport IBV_ACCESS_MW_BIND, IBV_ACCESS_REMOTE_READ

import array

from aiordma._native import ffi, fork
from aiordma.verbs._memory.memory_region import address_of_mr, in_domain, is_there, reg_mr
from aiordma.errors import RDMAError, VerbsError


cdef enum:
    SPARE_WINDOWS = 16  # that are kept for the next messages


cdef bint has_no_holes(object owner) noexcept:
    """Whether all of its memory is mapped, so that the embedded device need not look at each page."""
    return (
        type(owner) is bytes
        or type(owner) is bytearray
        or type(owner) is array.array
        or isinstance(owner, PoolBlock)
    )


# The peer may still read what these are for: the cycle collector must not clear them.
@cython.no_gc_clear
@cython.freelist(64)
@cython.final
cdef class Key:
    """A key of one rail to one piece of memory."""

    cdef uint32_t next_number(self) noexcept:
        """The rkey, once the window is bound."""
        return self.mr.rkey if self.window is None else self.window.next_key()

    cdef uint32_t bound_number(self) noexcept:
        """The rkey; of a window that is bound."""
        return self.mr.rkey if self.window is None else self.window.mw.rkey

    cdef uint32_t flags(self) noexcept:
        return 0 if self.window is None else IS_WINDOW


@cython.no_gc_clear
@cython.final
cdef class ReadKeys:
    """The keys of one rail's memory: for its peer, and for its own requests."""

    def __init__(self, pool: Pool):
        cdef uintptr_t deregister = pool.pd.context.library.dereg_mr
        self.pool, self.pd = pool, pool.pd
        self.windows = []
        self.forks = fork.generation()
        self.deregister = <int (*)(ibv_mr *) noexcept nogil> deregister
        cdef uintptr_t exclude = int(
            ffi.cast("uintptr_t", pool.pd.context.library.table.device.exclude_from_served)
        )
        self.exclude = <void (*)(uint32_t) noexcept nogil> exclude

    cdef Key open(self, object source, const unsigned char *bytes, uint64_t length):
        """A window on a region that exists or is made for it, to be bound; or else a region."""
        cdef object owner = source
        cdef PoolBlock block
        cdef Key key = Key.__new__(Key)
        key.keys = self
        if type(owner) is memoryview:
            owner = owner.obj
        if self.pool.has_windows:
            if self.pool.local_dma_mr and has_no_holes(owner):
                key.region = self.pool.local_dma_mr
            elif isinstance(owner, PoolBlock):
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
                    # The kernel takes no window on memory that may only be read.
                    if error.errno != EFAULT:
                        raise
            if key.region:
                try:
                    key.window = self.windows.pop() if self.windows else self.new_window()
                except BaseException:
                    self.close(key, 0)
                    raise
                return key
        key.mr = self.register(owner, bytes, length, IBV_ACCESS_REMOTE_READ)
        if self.exclude != NULL:
            self.exclude(key.mr.rkey)
        return key

    cdef Window new_window(self):
        cdef Window window = Window(self.pd.alloc_mw())
        if self.exclude != NULL:
            self.exclude(window.mw.rkey)
        return window

    cdef ibv_mr *register(
        self, object owner, const unsigned char *bytes, uint64_t length, int access
    ) except NULL:
        # By its address: the frames of an error would keep a buffer.
        pointer, _ = reg_mr(
            self.pd, ffi.cast("void *", <uintptr_t> bytes), length, access, None,
            there=is_there(owner),
        )
        cdef uintptr_t address = int(ffi.cast("uintptr_t", pointer))
        return <ibv_mr *> address

    cdef int end_window(self, Key key, uint32_t invalidated_key) noexcept:
        """Keeps the window that the peer has ended for another message, or closes it: 0, or why not."""
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
        """Ends the peer's access: 0, or the errno value of what could not be closed.

        `invalidated_key` is the key of a window that the peer has ended already; 0: of none.
        """
        cdef int failed = self.end_window(key, invalidated_key), code = 0
        cdef ibv_mr *mr = key.mr
        key.mr = NULL
        if mr != NULL and self.forks == fork.generation():
            with nogil:  # where pages are pinned this takes a while
                code = self.deregister(mr)
        if code < 0:
            code = errno  # providers have it either way
        return failed if code == 0 or code == EIO else code  # EIO: see Node.close

    def close_windows(self):
        """Those that are not bound; the queue pair goes after this."""
        while self.windows:
            self.windows.pop().close()

    cpdef uint32_t local_key(self, Pinned memory) except? 0:
        """The lkey of registered memory in this rail's domain, where it is registered when first needed.

        0: there can be none.
        """
        if isinstance(memory, PoolBlock) and (<PoolBlock> memory).pool is self.pool:
            return (<PoolBlock> memory).lkey
        if self.pool.local_dma_lkey:
            return self.pool.local_dma_lkey
        region = getattr(memory, "region", None)  # memory that the first rail takes as it is has none
        return 0 if region is None else in_domain(region, self.pd).lkey

