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
from .sends cimport MessageOwner
from .stripes cimport Lane, Striped
from .work_queue cimport RailObserver, WorkRequest


cdef PendingRendezvous parse_rendezvous(const unsigned char *frame, uint32_t length,
                                        uint64_t longest, bint sealed, bint has_rails)


cdef class PendingRendezvous:
    cdef uint32_t request_id, imm
    cdef uint32_t rail                 # rail of the keys in `pieces`
    cdef uint64_t length
    cdef bytes pieces                  # validated RendezvousPiece structures
    cdef dict keys                     # RendezvousKey structures by number of other rails, or None
    cdef bytes seal                    # key and tag for decryption; None if not encrypted
    cdef bint has_imm, started
    cdef bint answered                 # the peer's device has responded since the offer
    cdef bint watched                  # `Fetcher.watch` checks that it is read quickly enough
    cdef uint64_t unread_bytes         # bytes, once reading has started
    cdef StripedRead striped           # None if it is not read in chunks
    cdef Message message               # pool memory that it is read into, or None
    cdef ReceiveTarget target          # memory of a receiver that it is read into, or None
    cdef object fetch_error            # error for its first receiver, which cannot have it now
    cdef bint is_complete(self) noexcept
    cdef uint32_t count(self) noexcept
    cdef uint32_t window_key(self) noexcept
    cdef int end_striping(self) except -1


cdef class RendezvousRead(WorkRequest):
    cdef Fetcher fetcher
    cdef PendingRendezvous pending
    cdef Pinned pinned
    cdef Lane lane                     # None if not a chunk of a StripedRead, or over
    cdef uint64_t start                # offset in the message


cdef class StripedRead(Striped):
    cdef Fetcher fetcher
    cdef PendingRendezvous pending
    cdef Pinned pinned                 # None once it is over
    cdef uint64_t address
    cdef dict lkeys                    # lkeys by rail number; 0 if the rail cannot have one
    cdef object registration_error     # error of the latest failed registration
    cdef int register_for(self, SendQueue rail) except -1
    cdef int unpin(self) except -1


cdef class ReceiveTarget(Pinned):
    cdef object memory                 # memory of the caller; None until it is allocated
    cdef object allocate
    cdef Local local                   # registered memory; None if not registered
    cdef Pinned pinned_holder          # holder of `local`, pinned while it is used here
    cdef object registration           # registration made for this message only, or None
    cdef Py_buffer buffer
    cdef object keeper                 # object that keeps the memory of the buffer in place
    cdef bint has_buffer, closed
    cdef unsigned char *bytes
    cdef uint64_t length
    cdef object memory_error           # error if the memory cannot be used
    cdef int open(self, object memory) except -1
    cdef int close(self) except -1


cdef class RecvFuture(OpFuture):
    cdef Inbox inbox
    cdef ReceiveTarget target
    cdef bint ends_iteration


cdef class RecvOperation:
    cdef Inbox inbox
    cdef object memory, allocate       # from the caller; both None for memory of the pool
    cdef ReceiveTarget target
    cdef RecvFuture waiter
    cdef bint returns_memory, ends_iteration, awaited, started, finished
    cdef MessageOwner message_owner    # the owner that started it, or None
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
    cdef uint32_t woken_receivers      # receivers that have been woken but not yet resumed
    cdef uint32_t allocate_calls       # running calls of a receiver's `allocate`
    cdef bint iteration_ends           # `async for` ends when no message remains
    cdef object end_error
    cdef int end_iteration(self) except -1
    cdef int add_message(self, object item) except -1
    cdef int add_rendezvous(self, PendingRendezvous pending) except -1
    cdef Message take(self)
    cdef int on_message_taken(self, uint64_t length, bint is_last_in_frame) except -1
    cdef object allocate_and_check(self, object item, ReceiveTarget target)


cdef class Fetcher(RailObserver):
    cdef Inbox inbox
    cdef Outbox outbox
    cdef Controls controls
    cdef Fifo unread                   # messages in `incoming` that are not being read
    cdef object memory, block_source, pool
    cdef set read_watchers             # StalledReads of the pools that have watched messages
    cdef uint64_t bytes_ahead, max_bytes_ahead  # read or being read, but not taken; and their limit
    cdef uint64_t bytes_reading        # bytes of READs in flight
    cdef bint probing                  # a probe of the peer's device is in flight
    cdef uint32_t watched_count        # number of watched messages
    cdef readonly uint64_t progress    # bytes of completed READs
    cdef bint reads_ahead              # the latest receiver used memory of the pool
    cpdef int fetch_ahead(self) except -1
    cdef int watch(self, PendingRendezvous pending) except -1
    cdef int read(self, PendingRendezvous pending, Pinned pinned, uint64_t address,
                  uint32_t lkey) except -1
    cdef int take_keys(self, bytes content) except -1
    cdef int acknowledge(self, PendingRendezvous pending) except -1
    cdef bint decrypt(self, PendingRendezvous pending) except -1
    cdef int drop(self, PendingRendezvous pending) except -1
    cdef int end(self) except -1


cdef class MessageIterator:
    cdef Inbox inbox

cdef MessageOwner claim_messages(Inbox inbox, str name)
cdef RecvOperation next_of_iteration(Inbox inbox, MessageOwner owner)
