# Rendezvous messages that this side offers: their memory is opened to the peer, which reads it, and closed
# when the peer has acknowledged the message.

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcpy

cimport cython

from .frames cimport HEADER, RendezvousPiece, RendezvousRequest, htole32, next_number
from .keys cimport Key
from .sends cimport COPIED_BELOW, Piece

cdef extern from "<endian.h>" nogil:
    uint64_t htole64(uint64_t)


# ---- the request -----------------------------------------------------------------------------------

cdef uint32_t rendezvous_size(SendFuture message) noexcept:
    return HEADER + sizeof(RendezvousRequest) + message.count() * sizeof(RendezvousPiece)


cdef void write_request(unsigned char *to, SendFuture message, bytes seal) noexcept:
    """Writes what follows the header of an RNDV_RTS frame: the pieces with their keys, and the seal."""
    cdef RendezvousRequest *request = <RendezvousRequest *> to
    cdef RendezvousPiece *described = <RendezvousPiece *> (request + 1)
    cdef Piece piece = message.first
    request.request_id = htole32(message.request_id)
    request.count = htole32(message.count())
    while piece is not None:
        described.address = htole64(<uintptr_t> piece.bytes)
        described.length = htole64(piece.length)
        described.rkey, described.flags = htole32(piece.key.number()), htole32(piece.key.flags())
        described += 1
        piece = piece.next
    memcpy(described, PyBytes_AS_STRING(seal), len(seal))


# ---- the memory ------------------------------------------------------------------------------------

cdef int open_message(SendFuture message, ReadKeys keys) except -1:
    """Opens the message's memory to the peer, to read by that rail, until the acknowledgement."""
    cdef Piece piece = message.first
    cdef Key key
    try:
        while piece is not None:
            key = keys.open(piece.source, piece.bytes, piece.length)
            if piece.key is None:
                piece.key = key
            else:
                key.next, piece.key.next = piece.key.next, key
            piece = piece.next
    except BaseException:
        close_message(message, 0)
        raise
    return 0


cdef int close_message(SendFuture message, uint32_t invalidated_key) noexcept:
    """Ends the peer's access: 0, or the errno value of what could not be closed.

    `invalidated_key` is the key of a window that the peer has ended already; 0: of none.
    """
    cdef Piece piece = message.first
    cdef Key key
    cdef int failed = 0
    while piece is not None:
        key, piece.key = piece.key, None
        while key is not None:
            failed = key.keys.close(key, invalidated_key) or failed
            key = key.next
        piece = piece.next
    message.close_payload()
    return failed


# ---- what is offered -------------------------------------------------------------------------------

# The peer may still read them: the cycle collector must not clear them.
@cython.no_gc_clear
@cython.final
cdef class Offers:
    """Messages that the peer may read, each until it acknowledges the message."""

    def __init__(self, most: int, max_pieces: int):
        self.messages = {}
        self.most, self.max_pieces = most, max_pieces

    cdef int join_pieces(self, SendFuture message, uint32_t longest) except -1:
        """Joins pieces that are not worth a registration here and a READ there, or all if their
        request is longer than `longest`."""
        message.join_pieces(COPIED_BELOW)
        if message.count() > self.max_pieces or rendezvous_size(message) > longest:
            message.join_pieces(message.length + 1)
        return 0

    cdef int add(self, SendFuture message) except -1:
        self.latest = message.request_id = next_number(self.latest)
        self.messages[self.latest] = message
        return 0

    def end_windows(self):
        """The connection has ended: the peer reads nothing more.  The queue pairs go after this."""
        cdef SendFuture message
        cdef Piece piece
        cdef Key key
        for message in self.messages.values():
            piece = message.first
            while piece is not None:
                key = piece.key
                while key is not None:
                    key.keys.end_window(key, 0)
                    key = key.next
                piece = piece.next

    cdef int close(self) except -1:
        """The queue pairs are gone: closes the memory of the messages that the peer has not read."""
        cdef SendFuture message
        cdef int code = 0
        self.end_windows()
        messages, self.messages = self.messages, {}
        for message in messages.values():
            code = close_message(message, 0) or code
        return code
