# Registered memory: pool blocks, the cache of free blocks, the program's memory, and the peer's
# memory. `Clock` is the time base for leases on the peer's memory.

from cpython.buffer cimport Py_buffer, PyBuffer_FillInfo
from cpython.memoryview cimport PyMemoryView_FromObject
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.math cimport INFINITY
from libc.stdint cimport uintptr_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

cimport cython

cdef extern from "Python.h":
    void PyErr_Fetch(PyObject **, PyObject **, PyObject **) noexcept
    void PyErr_Restore(PyObject *, PyObject *, PyObject *) noexcept
    void PyErr_WriteUnraisable(object) noexcept

cdef extern from *:
    int clzll "__builtin_clzll"(unsigned long long) noexcept nogil


@cython.final
cdef class Clock:
    """The clock of an event loop's connections, in seconds. Thread-safe.

    It is the machine's clock by default. A loop in virtual time passes its own `source` and
    `call_at`.
    """

    def __cinit__(self, source: Callable[[], float] | None = None, call_at: Any = None):
        self.source, self.call_at = source, call_at

    cdef double time(self) noexcept:
        cdef timespec now
        if self.source is not None:
            return self.source()
        clock_gettime(CLOCK_MONOTONIC, &now)
        return now.tv_sec + 1e-9 * now.tv_nsec

    def now(self) -> float:
        return self.time()


MACHINE: Clock = Clock()


cdef class Pinned:
    """Memory whose `_retire` is called when it is no longer leased or pinned."""

    def pin(self):
        self.pins += 1

    def unpin(self):
        self.pins -= 1
        self.retire_if_unused()

    def lease(self):
        self.leases += 1

    def release(self):
        self.leases -= 1
        self.retire_if_unused()

    cdef int retire_if_unused(self) except -1:
        if not self.pins and not self.leases:
            self._retire()
        return 0

    cdef void unpin_now(self) noexcept:
        """Unpin the memory in a place that cannot raise. Errors are reported as unraisable."""
        self.pins -= 1
        self.retire_if_unused()

    cdef void end_lease(self) noexcept:
        """Release the memory in a place that cannot raise. Errors are reported as unraisable."""
        self.leases -= 1
        self.retire_if_unused()


# `start_lease` takes a reference that the cycle collector does not see, and `return_block` drops
# it. Until then, the collector treats the block as reachable. Otherwise, the collector would clear
# a block whose views are garbage, and the views could not return the block to the pool.
@cython.no_gc_clear
cdef class PoolBlock(Pinned):
    """A block of registered memory that is created once and leased many times."""

    cdef unsigned char *bytes(self) noexcept:
        return <unsigned char *> <uintptr_t> self.address

    cdef int retire_if_unused(self) except -1:
        if not self.pins and not self.leases and not self.views and self.pool is not None:
            self.pool.return_block(self)
        return 0

    cdef object view_of(self, uint64_t start, uint64_t stop):
        return PyMemoryView_FromObject(self)[start:stop]

    def export(self, uint64_t start, uint64_t stop) -> memoryview:
        """Return a view for the program. The block stays in use while the view exists."""
        return self.view_of(start, stop)

    def __getbuffer__(self, Py_buffer *view, int flags):
        if not self.leases and not self.pins and not self.views:  # an old view was used
            raise BufferError("this memory has been returned to its pool")
        PyBuffer_FillInfo(view, self, self.bytes(), <Py_ssize_t> self.size, 0, flags)
        self.views += 1

    def __releasebuffer__(self, Py_buffer *view):
        cdef PyObject *kind = NULL
        cdef PyObject *value = NULL
        cdef PyObject *traceback = NULL
        self.views -= 1
        if not self.views:
            # A view may be released while an exception is being raised, so save that exception.
            PyErr_Fetch(&kind, &value, &traceback)
            try:
                self.retire_if_unused()
            except BaseException:
                PyErr_WriteUnraisable(self)
            PyErr_Restore(kind, value, traceback)


cdef int release_all(list blocks) except -1:
    while blocks:
        (<PoolBlock> blocks.pop()).end_lease()
    return 0


cdef class BlockCache:
    """Free blocks by size. The pool (mr_pool.py) creates blocks and enforces the limit."""

    def __cinit__(self):
        self.free_blocks = [[] for _ in range(64)]

    cdef list free_list(self, uint64_t size):
        """Return the free blocks for a size, which is rounded up to a power of two."""
        if size < self.smallest:
            size = self.smallest
        return <list> self.free_blocks[64 - clzll(size - 1) if size > 1 else 0]

    cdef PoolBlock pop_free(self, uint64_t size):
        cdef list free_list = self.free_list(size)
        return <PoolBlock> free_list.pop() if free_list else None

    cdef int start_lease(self, PoolBlock block) except -1:
        Py_INCREF(block)  # held until `return_block`
        block.leases += 1
        self.leases += 1
        self.leased_bytes += block.size
        if block.size <= self.slab_size:
            self.leased_in_slabs += block.size
        return 0

    cdef PoolBlock take_fast(self, uint64_t size):
        """Lease a cached block. This is the fast path of `MemoryPool._block`.

        Returns None if the pool would have to create a block, or if others wait for a block.
        """
        cdef PoolBlock block
        if size > self.slab_size or len(<dict> self.internal_waiters) or len(<dict> self.user_waiters):
            return None
        block = self.pop_free(size)
        if block is not None:
            self.start_lease(block)
        return block

    cdef bint keep_block(self, PoolBlock block) except -1:
        """Cache a free block for fast reuse, unless its size already has `max_cached_bytes` cached.

        One block of each size is always cached. Returns False if the block is not cached.
        """
        cdef list free_list = self.free_list(block.size)
        if free_list and <uint64_t> (len(free_list) + 1) * block.size > self.max_cached_bytes:
            return False
        free_list.append(block)
        return True

    cdef int return_block(self, PoolBlock block) except -1:
        """Take back a block whose last lease has ended. Cache it, or recycle it in the pool.

        The pool recycles it if, for example, tasks are waiting for memory, or so little memory is
        leased (`trim_below`) that the pool can release unused slabs.
        """
        self.leases -= 1
        self.leased_bytes -= block.size
        if block.size <= self.slab_size:
            self.leased_in_slabs -= block.size
        try:
            if (
                self.closed
                or block.size > self.slab_size
                or self.leased_in_slabs < self.trim_below
                or len(<dict> self.internal_waiters)
                or len(<dict> self.user_waiters)
                or not self.keep_block(block)
            ):
                self._recycle(block)
        finally:
            Py_DECREF(block)
        return 0

    # ---- for the pool, in Python ----

    def take(self, uint64_t size) -> Any:
        """Lease a cached block, even if others wait for a block. Returns None if there is none."""
        cdef PoolBlock block = self.pop_free(size)
        if block is not None:
            self.start_lease(block)
        return block

    def lease_block(self, PoolBlock block not None):
        self.start_lease(block)

    def keep(self, PoolBlock block not None) -> bool:
        return self.keep_block(block)

    def take_cached_blocks(self) -> list[Any]:
        """Remove and return all cached free blocks."""
        cdef list blocks = []
        for free_list in self.free_blocks:
            blocks.extend(free_list)
            (<list> free_list).clear()
        return blocks


cdef class Local:
    """Registered memory of this process, or a slice of it."""

    cdef Local whole(self):
        return self if self.owner is None else self.owner

    cdef Pinned holder(self):
        cdef Local whole = self.whole()
        if whole.gone or whole.pinned is None:
            whole._check()
            raise TypeError("cannot pin memory that has no holder")
        return whole.pinned

    @property
    def root(self) -> Local:
        return self.whole()

    @root.setter
    def root(self, Local owner not None):
        self.owner = owner.whole()

    def _pin(self):
        """Pin the memory for a work request. If it was released, raise the error of `_check`."""
        cdef Pinned holder = self.holder()
        holder.pins += 1

    def _unpin(self):
        self.whole().pinned.unpin()

    def __len__(self) -> int:
        return self.length


cdef class Remote:
    """Memory of the peer, or a slice of it."""

    def __cinit__(self):
        self._deadline = INFINITY

    cdef Remote whole(self):
        return self if self.owner is None else self.owner

    def _unusable_error(self) -> Exception:
        """Return the error for a region that can no longer be used."""
        raise NotImplementedError

    cdef bint lease_over(self) noexcept:
        """Return whether the lease of the whole region has expired."""
        return self._deadline != INFINITY and self._deadline <= self._clock.time()

    @property
    def _root(self) -> Remote:
        return self.whole()

    @_root.setter
    def _root(self, Remote owner not None):
        self.owner = owner.whole()

    def __len__(self) -> int:
        return self.length
