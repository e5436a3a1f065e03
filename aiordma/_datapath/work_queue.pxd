# Outstanding work, and the drain of its completions.

from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t

cimport cython

from .futures cimport Wakeups
from .memory cimport Clock, PoolBlock

cdef extern from "verbs/boundary.h":
    struct ibv_sge:
        uint64_t addr
        uint32_t length
        uint32_t lkey
    struct ibv_pd:
        pass
    struct ibv_mr:
        uint32_t lkey
        uint32_t rkey
    struct ibv_mw:
        uint32_t rkey
    struct ibv_qp_ex:
        pass
    struct aiordma_send:
        uint64_t wr_id
        uint64_t remote_addr
        uint64_t compare_add
        uint64_t swap
        uint64_t mw
        uint64_t mr
        uint64_t bind_addr
        uint64_t bind_length
        uint32_t bind_access
        uint32_t rkey
        uint32_t imm_data
        uint32_t opcode
        uint32_t send_flags
        uint32_t first_sge
        uint32_t num_sge
    struct ibv_qp:
        pass
    struct ibv_srq:
        pass
    struct aiordma_recv:
        uint64_t wr_id
        uint32_t first_sge
        uint32_t num_sge
    struct aiordma_completion:
        uint64_t wr_id
        uint32_t status
        uint32_t vendor_err
        uint32_t byte_len
        uint32_t imm_data
        uint32_t wc_flags
    struct aiordma_drain:
        uint32_t spin_us
        int polls_again
        int busy
    int aiordma_post_send(ibv_qp *, ibv_qp_ex *, const aiordma_send *, uint32_t, const ibv_sge *,
                          uint32_t *) nogil
    int aiordma_post_recv(ibv_qp *, ibv_srq *, const aiordma_recv *, uint32_t, const ibv_sge *,
                          uint32_t *)
    enum:
        IBV_WR_RDMA_WRITE
        IBV_WR_RDMA_WRITE_WITH_IMM
        IBV_WR_SEND
        IBV_WR_RDMA_READ
        IBV_WR_ATOMIC_CMP_AND_SWP
        IBV_WR_ATOMIC_FETCH_AND_ADD
        IBV_WR_BIND_MW
        IBV_WR_SEND_WITH_INV
        IBV_WR_LOCAL_INV
        IBV_SEND_SIGNALED
        IBV_WC_WITH_IMM
        IBV_WC_WITH_INV
        IBV_ACCESS_MW_BIND
        IBV_ACCESS_REMOTE_READ
        IBV_ACCESS_REMOTE_WRITE
        IBV_ACCESS_REMOTE_ATOMIC


cdef enum:
    KIND_RECV = 0
    KIND_SEND = 1
    KIND_WRITE = 2
    KIND_READ = 3
    KIND_COMPARE_AND_SWAP = 4
    KIND_BATCH = 6
    KIND_BIND = 7
    KIND_INVALIDATE = 8

cdef enum:
    WAIT_NONE
    WAIT_CREDITS
    WAIT_SEND_QUEUE
    WAIT_MEMORY

cdef enum:  # results of `WorkRequest.take_turn`
    TURN_POST                          # the rail must post the work
    TURN_LEAVE                         # the work has posted itself, and leaves the backlog
    TURN_STAY                          # the work and all work behind it must wait

cdef enum:  # values of `was_posted`
    NOT_POSTED = 0
    WAS_POSTED = 1

cdef enum:  # values of `to_other_device`
    TO_ANY_DEVICE = 0
    TO_OTHER_DEVICE = 1

cdef enum:  # bits of the result of `drain_once`
    FOUND = 1
    MORE = 2

cdef enum:
    NO_SLOT = 0xFFFFFFFF

cdef struct Slot:
    double posted_at                   # time, if its latency is measured; else NOT_MEASURED
    uint32_t generation, next, previous, entries
    uint8_t kind
    bint in_use

cdef struct SlotList:
    uint32_t first, last

cdef enum:
    BEFORE_LAST = 0x80000000  # 1 << 31 is a negative `int`, which would also set the higher bits

cdef int post_sends(WorkQueues queue, const aiordma_send *sends, uint32_t count, const ibv_sge *sges,
                    uint32_t *posted, uint64_t length) noexcept
cdef int post_recvs(WorkQueues queue, const aiordma_recv *receives, uint32_t count,
                    const ibv_sge *sges, uint32_t *posted) noexcept


cdef class Wait:
    cdef Clock clock
    cdef int reason
    cdef double started_at
    cdef void set_reason(self, int reason) noexcept
    cdef void settle(self) noexcept


cdef class WorkRequest:
    cdef public uint32_t kind, opcode, length, lkey, rkey, imm
    cdef public uint64_t address, remote_address
    cdef readonly uint32_t request_count  # each uses one send queue entry
    cdef readonly bint kept            # by the session, to post it on another rail
    cdef ibv_sge second                # second piece; none if its length is 0
    cdef int post_to(self, WorkQueues queue, uint64_t wr_id, uint32_t *posted) except -1
    cdef int on_completion(self, uint32_t byte_len) except -1
    cdef int on_error(self, object error) except -1
    cdef object reason_not_to_post(self)
    cdef int take_turn(self) except -1
    cdef bint can_move(self, bint was_posted) noexcept
    cdef int end_unposted(self, object error) except -1
    cdef int free_memory(self) except -1
    cdef str text(self, str peer)


cdef class RailObserver:
    pass


cdef class FrameHandler:
    cdef uint32_t invalidated_key      # by the current frame, or 0
    cdef int received(self, PoolBlock block, uint32_t length) except -1
    cdef int received_write(self, PoolBlock block, uint32_t length, uint32_t imm) except -1
    cdef int flush(self) except -1
    cdef bint begin_failover(self, WorkQueues rail, bint to_other_device=*) except -1


cdef class WorkQueues:
    cdef object __weakref__
    cdef readonly object driver  # type: Driver
    cdef public WorkRequestTable table
    cdef public FrameHandler frame_handler  # type: FrameHandler | None
    cdef ibv_qp *native_qp             # NULL once it is closed
    cdef ibv_qp_ex *extended
    cdef SlotList sends, receives      # in flight
    cdef public uint32_t capacity
    cdef readonly uint32_t free
    cdef readonly uint64_t completions
    cdef public bint failed
    cdef bint entries_freed            # by the current drain
    cdef int open(self, ibv_qp *qp, ibv_qp_ex *extended, uint32_t capacity) except -1
    cdef uint64_t latest_posted(self) noexcept
    cdef object take_first(self, SlotList *in_flight)
    cdef int use_freed_entries(self) except -1
    cdef int on_error_completion(
        self, object work, uint8_t kind, const aiordma_completion *wc
    ) except -1


@cython.final
cdef class WorkRequestTable:
    cdef readonly Wakeups wakeups
    cdef Clock clock
    cdef Slot *slots
    cdef uint32_t count, free
    cdef readonly uint32_t slots_in_use
    cdef list works, queues            # by slot index
    cdef uint32_t until_measured       # number of posts
    cdef readonly uint64_t stray_completions
    cdef int grow(self) except -1
    cdef uint32_t take_slot(self, WorkQueues queue, uint8_t kind, object work,
                            uint32_t entries) except? 0xFFFFFFFF
    cdef uint64_t wr_id(self, uint32_t index) noexcept
    cdef bint is_in_flight(self, uint64_t wr_id) noexcept
    cdef void free_slot(self, uint32_t index) noexcept
    cdef int drain_once(self, aiordma_drain *state, int most, uint32_t spin_us,
                        int polls_again) except? -10000
    cdef int report_error(self, WorkQueues queue, object error) except -1
