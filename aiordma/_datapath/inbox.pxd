# Messages that have arrived, and the receivers that wait for them.

from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint32_t, uint64_t

from .controls cimport Controls
from .futures cimport OpFuture, Wakeups
from .memory cimport BlockCache, Local, Pinned
from .message cimport Fifo, Message
from .outbox cimport Outbox
from .rail cimport SendQueue
from .receives cimport Receives
from .stripes cimport Lane, Striped
from .work_queue cimport WorkRequest


cdef PendingRendezvous pending_rendezvous(const unsigned char *frame, uint32_t length,
                                          uint64_t longest, bint sealed, bint rails)


cdef class PendingRendezvous:
    cdef uint32_t request_id, imm
    cdef uint32_t rail                 # of the keys in `pieces`
    cdef uint64_t length
    cdef bytes pieces                  # RendezvousPiece structures, checked
    cdef dict keys                     # of other rails, by number: RendezvousKey structures; None
    cdef bytes seal                    # what opens it; None: it is not sealed
    cdef bint has_imm, started
    cdef bint answered                 # the peer's device has answered since it was offered
    cdef bint watched                  # until it has been read (Fetcher.watch)
    cdef uint64_t unread               # bytes, once it is started
    cdef StripedRead striped           # None: one rail reads it, or none
    cdef Message message               # it is read into
    cdef ReceiveTarget target          # memory of a receiver, that it is read into instead
    cdef object refused                # why its first receiver cannot have it now
    cdef bint is_complete(self) noexcept
    cdef uint32_t count(self) noexcept
    cdef uint32_t window_key(self) noexcept
    cdef int end_striping(self) except -1


cdef class RendezvousRead(WorkRequest):
    cdef Fetcher fetcher
    cdef PendingRendezvous pending
    cdef Pinned pinned
    cdef Lane lane                     # None: it is no chunk of a StripedRead, or is over
    cdef uint64_t start                # of its bytes in the message


cdef class StripedRead(Striped):
    cdef Fetcher fetcher
    cdef PendingRendezvous pending
    cdef Pinned pinned                 # None: it is over
    cdef uint64_t address
    cdef dict lkeys                    # of that memory, by the number of the rail; 0: it can have none
    cdef object refused                # why, of the latest of these
    cdef int use(self, SendQueue rail) except -1
    cdef int let_go(self) except -1


cdef class ReceiveTarget(Pinned):
    cdef object memory                 # of the caller, or of `allocate`; None: not allocated yet
    cdef object allocate
    cdef Local local                   # registered memory, which it is, or lies in
    cdef Pinned held                   # its holder, as long as it is used here
    cdef object registration           # made for this message; closed after it
    cdef Py_buffer buffer
    cdef object keeper                 # of what the buffer is of
    cdef bint has_buffer, closed
    cdef unsigned char *bytes
    cdef uint64_t length
    cdef object refused                # why it cannot be used
    cdef int open(self, object memory) except -1
    cdef int close(self) except -1


cdef class RecvFuture(OpFuture):
    cdef Inbox inbox
    cdef ReceiveTarget target
    cdef bint ends_iteration


cdef class RecvOperation:
    cdef Inbox inbox
    cdef object memory, allocate       # of the caller; None: memory of the pool
    cdef ReceiveTarget target
    cdef RecvFuture waiter
    cdef bint returns_memory, ends_iteration, of_reader, awaited, begun, over
    cdef str name(self)
    cdef object advance(self)
    cdef object finish(self, object item)
    cdef int withdraw(self) except -1


cdef class Inbox:
    cdef object __weakref__
    cdef Outbox outbox
    cdef Receives receives
    cdef Wakeups wakeups
    cdef readonly Fetcher fetcher
    cdef Fifo incoming, receivers
    cdef uint32_t notified             # receivers that have been told and have not taken yet
    cdef uint32_t allocating           # calls of a receiver's `allocate` that have not returned
    cdef bint iteration_ends           # of `async for`, where no message is left
    cdef object ended
    cdef int end_iteration(self) except -1
    cdef int arrived(self, object item) except -1
    cdef int offered(self, PendingRendezvous pending) except -1
    cdef Message take(self)
    cdef int taken(self, uint64_t length, bint last) except -1
    cdef object refusal(self, object item, ReceiveTarget target)


cdef class Fetcher:
    cdef Inbox inbox
    cdef Outbox outbox
    cdef Controls controls
    cdef Fifo unread                   # those in `incoming` that are not being read
    cdef object memory, source, pool
    cdef set stalling                  # StalledReads of the pools of which messages are `watched`
    cdef uint64_t bytes_ahead, max_bytes_ahead  # read, or being read, and not taken
    cdef uint64_t bytes_reading        # of READs under way
    cdef bint probing                  # whether the peer's device answers
    cdef uint32_t watched              # messages: `watch` has them
    cdef readonly uint64_t progress    # bytes of READs that have completed
    cdef bint reads_ahead              # the last receiver took memory of the pool
    cpdef int fetch_ahead(self) except -1
    cdef BlockCache move(self, SendQueue rail)
    cdef int watch(self, PendingRendezvous pending) except -1
    cdef int read(self, PendingRendezvous pending, Pinned pinned, uint64_t address,
                  uint32_t lkey) except -1
    cdef int take_keys(self, bytes content) except -1
    cdef int drop_keys(self, uint32_t rail) except -1
    cdef int acknowledge(self, PendingRendezvous pending) except -1
    cdef bint opens(self, PendingRendezvous pending) except -1
    cdef int drop(self, PendingRendezvous pending) except -1
    cdef int end(self) except -1


cdef class MessageIterator:
    cdef Inbox inbox
    cdef Outbox outbox                 # its own reference: the cycle collector clears that of the inbox
    cdef bint of_reader
