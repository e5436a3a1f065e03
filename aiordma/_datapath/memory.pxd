# Registered memory: blocks of a pool, memory of users, and memory of peers.

from libc.stdint cimport uint32_t, uint64_t


cdef class Clock:
    cdef object source
    cdef readonly object call_at  # type: Callable[[float, Callable[[], object]], object] | None
    cdef double time(self) noexcept


cdef class Pinned:
    cdef readonly Py_ssize_t pins      # work requests in flight that use it
    cdef readonly Py_ssize_t leases    # number of holders
    cdef int retire_if_unused(self) except -1
    cdef void unpin_now(self) noexcept
    cdef void end_lease(self) noexcept


cdef class PoolBlock(Pinned):
    cdef public BlockCache pool
    cdef public uint64_t address, size
    cdef public uint32_t lkey
    cdef public uint64_t mr            # struct ibv_mr * of its slab
    cdef Py_ssize_t views              # memoryviews held by users
    cdef unsigned char *bytes(self) noexcept
    cdef object view_of(self, uint64_t start, uint64_t stop)


cdef int release_all(list blocks) except -1


cdef class BlockCache:
    cdef list free_blocks              # one list for each power of two
    # waiters of the library, and waiters of users
    cdef public object internal_waiters, user_waiters  # type: Sized
    cdef readonly uint64_t leases, leased_bytes, leased_in_slabs
    cdef public uint64_t trim_below, slab_size, max_cached_bytes
    cdef public uint32_t smallest
    cdef public uint32_t local_dma_lkey  # key for all memory of the process, or 0
    cdef public uint64_t local_dma_mr  # struct ibv_mr *
    cdef public bint closed
    cdef public bint has_windows       # the device has memory windows of type 2
    cdef public bint enforces_window_bounds
    cdef list free_list(self, uint64_t size)
    cdef PoolBlock pop_free(self, uint64_t size)
    cdef PoolBlock take_fast(self, uint64_t size)
    cdef int start_lease(self, PoolBlock block) except -1
    cdef bint keep_block(self, PoolBlock block) except -1
    cdef int return_block(self, PoolBlock block) except -1


cdef class Local:
    cdef public uint64_t address, length
    cdef public uint32_t lkey
    cdef public bint writable, gone
    cdef public Pinned pinned
    cdef Local owner                   # memory that it was sliced from; None if whole
    cdef Local whole(self)
    cdef Pinned holder(self)


cdef class Remote:
    cdef public uint64_t address, length
    cdef public uint32_t rkey, _allowed  # key for the lead rail; rights
    cdef public bint _usable
    cdef public Clock _clock           # of a whole region
    cdef public double _deadline       # end of the lease by `_clock`; infinite if none
    # owner of the region's connection; None while the region has no key for the lead rail
    cdef public object _user
    # keys for rails other than the lead rail, by number; None if there will be none
    cdef public dict _keys  # type: dict[int, int] | None
    cdef Remote owner
    cdef Remote whole(self)
    cdef bint lease_over(self) noexcept
