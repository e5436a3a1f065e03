# When an event loop polls for completions.

from libc.stdint cimport uint32_t, uintptr_t

cimport cython

from .work_queue cimport WorkRequestTable, aiordma_drain


@cython.final
cdef class Poller:
    cdef readonly WorkRequestTable table
    cdef public bint closed
    cdef public bint polls_again       # the caller of the drain will poll again soon
    cdef public bint spin_scheduled, spin_found
    cdef public object spin  # type: Callable[[], object] | None
    cdef public uint32_t spin_us
    cdef uint32_t spun_us, slice_us    # of the spin that goes on
    cdef int spin_slice_soon(self) except -1
    cdef int serve_with(self, uintptr_t state, int most, list leaving, object slow,
                        uint32_t spin_us, bint polls_again) except -1
