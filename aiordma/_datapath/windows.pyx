# Type 2 memory windows, whose keys are valid on only one queue pair.
#
# A work request binds a window. The key is valid for all work posted after that request (IBTA
# 10.6.7.2.4).

from libc.stdint cimport uintptr_t
from libc.string cimport memset

cimport cython

from .work_queue cimport (
    IBV_SEND_SIGNALED,
    IBV_WR_BIND_MW,
    IBV_WR_LOCAL_INV,
    WorkQueues,
    WorkRequest,
    post_sends,
)

from aiordma._native import ffi


cdef class Window:
    """A memory window of type 2, which is bound repeatedly on one queue pair."""

    def __init__(self, window: MemoryWindow):
        cdef uintptr_t mw = int(ffi.cast("uintptr_t", window.pointer))
        self.window, self.mw = window, <ibv_mw *> mw

    cdef uint32_t next_key(self) noexcept:
        """Return the key of the next bind, which differs in the lowest 8 bits (ibv_inc_rkey(3))."""
        return (self.mw.rkey & ~<uint32_t> 0xFF) | ((self.mw.rkey + 1) & 0xFF)

    cdef void mark_bound(self) noexcept:
        """Update the key after a bind has been posted, because providers do not."""
        self.mw.rkey = self.next_key()

    cdef void prepare_bind(
        self, aiordma_send *send, uint64_t region, uint64_t address, uint64_t length,
        uint32_t access,
    ) noexcept:
        """Prepare the request that binds the window with the next key."""
        memset(send, 0, sizeof(aiordma_send))
        send.opcode = IBV_WR_BIND_MW
        send.mw, send.mr = <uintptr_t> self.mw, region
        send.bind_addr, send.bind_length, send.bind_access = address, length, access
        send.rkey = self.next_key()

    cdef void prepare_invalidation(self, aiordma_send *send) noexcept:
        """Prepare the request that invalidates the key, so that the window can be bound again."""
        memset(send, 0, sizeof(aiordma_send))
        send.opcode, send.imm_data = IBV_WR_LOCAL_INV, self.mw.rkey

    @property
    def rkey(self) -> int:
        """The key of the latest bind that was posted."""
        return self.mw.rkey

    def close(self):
        """Unbind and release the window. Its key is invalid afterwards."""
        self.window.close()


@cython.no_gc_clear
cdef class BindRequest(WorkRequest):
    """A request that binds a window. A subclass defines `done`, `failed` and `release`.

    If it is `expired` before its turn comes, it is not posted but released.
    """

    cdef Window window
    cdef uint64_t region, bind_length
    cdef uint32_t access
    cdef readonly bint was_posted
    cdef public bint expired

    def __init__(
        self, kind: int, Window window not None, mr: MemoryRegion, address: int, length: int,
        access: int,
    ):
        """Create a request to bind the window to bytes in `mr`, a verbs.MemoryRegion."""
        WorkRequest.__init__(self, kind, IBV_WR_BIND_MW, address, 0, 0)
        self.window, self.bind_length, self.access = window, length, access
        self.region = int(ffi.cast("uintptr_t", mr.pointer))

    @property
    def next_key(self) -> int:
        return self.window.next_key()

    cdef int post_to(self, WorkQueues queue, uint64_t wr_id, uint32_t *posted) except -1:
        cdef aiordma_send send
        cdef int code
        self.window.prepare_bind(&send, self.region, self.address, self.bind_length, self.access)
        send.wr_id, send.send_flags = wr_id, IBV_SEND_SIGNALED
        code = post_sends(queue, &send, 1, NULL, posted, 0)
        if not code:
            self.window.mark_bound()
            self.was_posted = True
        return code

    cdef object reason_not_to_post(self):
        return "its lease has ended" if self.expired else None

    cdef int end_unposted(self, object reason) except -1:
        return self.free_memory()  # an expired bind has not failed; `release` reports its end
