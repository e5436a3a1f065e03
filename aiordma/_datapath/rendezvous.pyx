# Rendezvous messages that this side offers. The memory of a message stays readable for the peer
# until the peer acknowledges the message.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcpy

cimport cython

from .frames cimport (
    HEADER,
    RAIL_SHIFT,
    RendezvousKey,
    RendezvousKeys,
    RendezvousPiece,
    RendezvousRequest,
    htole32,
    next_number,
)
from .keys cimport NOT_INVALIDATED, Key
from .rail cimport CONTROL_ENTRIES
from .sends cimport (
    COPIED_BELOW,
    MAX_PIECES,
    Piece,
    mark_windows_bound,
    count_windows,
    prepare_binds,
)
from .work_queue cimport (
    BEFORE_LAST,
    IBV_SEND_SIGNALED,
    IBV_WR_BIND_MW,
    IBV_WR_LOCAL_INV,
    KIND_BIND,
    KIND_INVALIDATE,
    WorkQueues,
    aiordma_send,
    post_sends,
)

from aiordma.errors import RDMAError

cdef extern from "<endian.h>" nogil:
    uint64_t htole64(uint64_t)


# ---- the request -----------------------------------------------------------------------------------

cdef uint32_t rendezvous_size(SendFuture message) noexcept:
    return HEADER + sizeof(RendezvousRequest) + message.count() * sizeof(RendezvousPiece)


cdef void write_request(unsigned char *to, SendFuture message, bytes seal) noexcept:
    """Write the body of an RNDV_RTS frame: the pieces with their keys, and the seal."""
    cdef RendezvousRequest *request = <RendezvousRequest *> to
    cdef RendezvousPiece *entry = <RendezvousPiece *> (request + 1)
    cdef Piece piece = message.first
    cdef uint32_t rail = message.rail << RAIL_SHIFT
    request.request_id = htole32(message.request_id)
    request.count = htole32(message.count())
    while piece is not None:
        entry.address = htole64(<uintptr_t> piece.bytes)
        entry.length = htole64(piece.length)
        entry.rkey, entry.flags = (
            htole32(piece.key.next_rkey()), htole32(piece.key.flags() | rail)
        )
        entry += 1
        piece = piece.next
    memcpy(entry, PyBytes_AS_STRING(seal), len(seal))


# ---- the memory ------------------------------------------------------------------------------------

cdef int open_keys(SendFuture message, ReadKeys keys) except -1:
    """Create the keys with which the peer reads the message through one rail."""
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
        close_keys(message, keys, KEYS_VALID)
        unlink_keys(message, keys)
        raise
    return 0


cdef void unlink_keys(SendFuture message, ReadKeys keys) noexcept:
    """Remove the closed keys of one rail, so that the message can be opened to it again."""
    cdef Piece piece = message.first
    cdef Key key
    while piece is not None:
        key = piece.key
        if key is not None and key.keys is keys:
            piece.key = key.next
        while key is not None and key.next is not None:
            if key.next.keys is keys:
                key.next = key.next.next
            key = key.next
        piece = piece.next


cdef int close_keys(SendFuture message, ReadKeys keys, bint invalidated) noexcept:
    """End the access through one rail. Returns 0 or the errno value of a failure.

    `invalidated` is KEYS_INVALIDATED if requests have already invalidated the windows' keys.
    """
    cdef Piece piece = message.first
    cdef Key key
    cdef uint32_t invalidated_key
    cdef int error_code = 0
    while piece is not None:
        key = piece.key_of(keys)
        if key is not None:
            invalidated_key = NOT_INVALIDATED
            if invalidated and key.window is not None:
                invalidated_key = key.window.mw.rkey
            error_code = keys.close(key, invalidated_key) or error_code
        piece = piece.next
    return error_code


cdef int close_message(SendFuture message, uint32_t invalidated_key) noexcept:
    """End the peer's access. Returns 0 or the errno value of a failure.

    `invalidated_key` is a window's key that the peer has invalidated, or NOT_INVALIDATED.
    """
    cdef Piece piece = message.first
    cdef Key key
    cdef int error_code = 0
    while piece is not None:
        key, piece.key = piece.key, None
        while key is not None:
            error_code = key.keys.close(key, invalidated_key) or error_code
            key = key.next
        piece = piece.next
    message.close_payload()
    return error_code


cdef int end_windows(SendFuture message, ReadKeys keys) except -1:
    """Close a message's memory windows on one rail, or on all rails if `keys` is None.

    This is called before the rail's queue pair is destroyed.
    """
    cdef Piece piece = message.first
    cdef Key key
    while piece is not None:
        key = piece.key
        while key is not None:
            if keys is None or key.keys is keys:
                key.keys.end_window(key, NOT_INVALIDATED)
            key = key.next
        piece = piece.next
    return 0


# ---- other rails ----------------------------------------------------------------------------------

@cython.no_gc_clear
@cython.final
cdef class Opening(WorkRequest):
    """The access to an offered message through a rail that is not the lead.

    Windows are bound and invalidated by requests on that rail. The message only ends after these
    requests.
    """

    cdef int begin(self) except -1:
        self.kind, self.opcode = KIND_BIND, IBV_WR_BIND_MW
        self.request_count = count_windows(self.message, self.rail.keys)
        if not self.request_count:  # without windows, the rail accepts the keys already
            return self.offers.on_opened(self)
        self.in_flight = True
        try:
            return self.rail.post_checked(self)
        except BaseException:
            self.free_memory()
            raise

    cdef int end(self) except -1:
        """End the access after the peer has read the message. No more keys are sent."""
        self.end_requested = True
        if self in self.offers.unannounced:
            self.offers.unannounced.remove(self)
        if self.in_flight:
            return 0
        if (
            not self.request_count  # without windows
            or self.rail.error is not None
            or not self.rail.has_room_for(self.request_count)
        ):
            return self.close(KEYS_VALID)
        self.kind, self.opcode = KIND_INVALIDATE, IBV_WR_LOCAL_INV
        self.in_flight = True
        return self.rail.post_checked(self)

    cdef int close(self, bint invalidated) except -1:
        close_keys(self.message, self.rail.keys, invalidated)
        return self.offers.on_closed(self)

    cdef int post_to(self, WorkQueues queue, uint64_t wr_id, uint32_t *posted) except -1:
        cdef aiordma_send[MAX_PIECES] sends
        cdef aiordma_send *send = sends
        cdef Piece piece = self.message.first
        cdef Key key
        cdef int code
        if self.opcode == IBV_WR_BIND_MW:
            send = prepare_binds(self.message, self.rail.keys, send, wr_id)
        else:
            while piece is not None:
                key = piece.key_of(self.rail.keys)
                if key.window is not None:
                    key.window.prepare_invalidation(send)
                    send.wr_id = wr_id | BEFORE_LAST
                    send += 1
                piece = piece.next
        send -= 1
        send.wr_id, send.send_flags = wr_id, IBV_SEND_SIGNALED
        code = post_sends(queue, sends, self.request_count, NULL, posted, 0)
        if not code and self.opcode == IBV_WR_BIND_MW:
            mark_windows_bound(self.message, self.rail.keys)
        return code

    cdef int on_completion(self, uint32_t byte_len) except -1:
        self.in_flight = False
        if self.opcode == IBV_WR_LOCAL_INV:
            return self.close(KEYS_INVALIDATED)
        return self.end() if self.end_requested else self.offers.on_opened(self)

    cdef int on_error(self, object error) except -1:
        return 0  # the lead still offers the message

    cdef int free_memory(self) except -1:
        """End the access if the request that binds or invalidates the windows has failed."""
        if self.in_flight:
            self.in_flight = False
            self.close(KEYS_VALID)
        return 0

    cdef str text(self, str peer):
        return f"keys of a message of {self.message.length} bytes for {peer}"

    cdef bytes next_keys(self, uint32_t most):
        """Return the contents of an RNDV_KEYS frame with the next keys, at most `most`."""
        cdef uint32_t count = min(most, self.message.count() - self.announced), i
        cdef bytes content = PyBytes_FromStringAndSize(
            NULL, sizeof(RendezvousKeys) + count * sizeof(RendezvousKey)
        )
        cdef RendezvousKeys *frame = <RendezvousKeys *> PyBytes_AS_STRING(content)
        cdef RendezvousKey *entries = <RendezvousKey *> (frame + 1)
        cdef Piece piece = self.message.first
        cdef Key key
        frame.request_id, frame.rail = htole32(self.message.request_id), htole32(self.rail.number)
        frame.first, frame.count = htole32(self.announced), htole32(count)
        for i in range(self.announced):
            piece = piece.next
        for i in range(count):
            key = piece.key_of(self.rail.keys)
            entries[i].rkey, entries[i].flags = htole32(key.bound_rkey()), htole32(key.flags())
            piece = piece.next
        return content

    cdef int mark_announced(self, uint32_t most) except -1:
        """Record that the keys from `next_keys` have been sent to the peer."""
        self.announced = min(self.announced + most, self.message.count())
        if self.announced == self.message.count():
            self.offers.unannounced.remove(self)
        return 0


# ---- offers ----------------------------------------------------------------------------------------

# The cyclic garbage collector must not clear the messages, because the peer may still read them.
@cython.no_gc_clear
@cython.final
cdef class Offers(RailObserver):
    """The messages that the peer may read, each until it acknowledges the message."""

    def __init__(self, FrameHandler session not None, max_messages: int, max_pieces: int):
        self.session, self.messages, self.ending, self.unannounced = session, {}, {}, []
        self.max_messages, self.max_pieces = max_messages, max_pieces

    cdef int join_pieces(self, SendFuture message, uint32_t longest) except -1:
        """Join pieces that are too small to be read separately.

        If the request is still longer than `longest`, join all pieces.
        """
        message.join_pieces(COPIED_BELOW)
        if message.count() > self.max_pieces or rendezvous_size(message) > longest:
            message.join_pieces(message.length + 1)
        return 0

    cdef int add(self, SendFuture message) except -1:
        self.latest = message.request_id = next_number(self.latest)
        self.messages[self.latest] = message
        return 0

    # ---- other rails ----

    cdef int open_elsewhere(self, SendFuture message, list lanes) except -1:
        """Open an offered message to other rails as well. Rails that cannot be used are skipped."""
        cdef Opening opening
        cdef Lane lane
        cdef SendQueue rail
        for lane in lanes:
            rail = <SendQueue> lane.rail
            if rail.error is not None or not rail.has_room_for(message.count()):
                continue
            if message.first.key_of(rail.keys) is not None:  # it is already open to this rail
                continue
            try:
                open_keys(message, rail.keys)
            except (RDMAError, OSError, MemoryError):
                continue
            opening = Opening.__new__(Opening)
            opening.offers, opening.message, opening.rail = self, message, rail
            if message.openings is None:
                message.openings = []
            message.openings.append(opening)
            opening.begin()
        return 0

    cdef int reopen_messages(self, Lane lead) except -1:
        """Let the new lead serve messages that the previous one offered, as there is room."""
        cdef SendFuture message
        cdef SendQueue rail = <SendQueue> lead.rail
        while self.to_reopen:
            message = self.to_reopen[0]
            offered = self.messages.get(message.request_id) is message
            if offered and not rail.has_room_for(message.count()):
                if message.count() + CONTROL_ENTRIES > rail.capacity:  # possible on another card
                    (<object> rail).rail_broke(RDMAError("the send queue has too few entries for "
                    "the message"))
                return 0
            self.to_reopen.pop(0)  # before it is opened, because that may re-enter this method
            if offered:
                self.open_elsewhere(message, [lead])
                if message.first.key_of(rail.keys) is None:
                    (<object> rail).rail_broke(RDMAError("the device cannot register the memory of a message"))
                    return 0
        self.to_reopen = None
        return 0

    cdef int on_opened(self, Opening opening) except -1:
        """Queue the keys of an opening for the peer, because the rail accepts them now."""
        self.unannounced.append(opening)
        return self.session.flush()

    cdef bint end_elsewhere(
        self, SendFuture message, uint32_t status, uint32_t invalidated_key
    ) except -1:
        """End the access of other rails to an acknowledged message.

        Returns False if no other rail has access any more.
        """
        cdef Opening opening
        for opening in list(message.openings):
            opening.end()
        if not message.openings:
            return False
        self.ending[message] = status, invalidated_key
        return True

    cdef int on_closed(self, Opening opening) except -1:
        """Complete an acknowledged message after the last other rail's access has ended."""
        cdef SendFuture message = opening.message
        if self.session is None:  # `close` has closed the message
            return 0
        message.openings.remove(opening)
        if opening in self.unannounced:
            self.unannounced.remove(opening)
        if message in self.ending and not message.openings:
            status, invalidated_key = self.ending.pop(message)
            message.sender.finish(message, status, invalidated_key)
        return 0

    def rail_removed(self, SendQueue rail not None) -> None:
        """End the peer's access through a rail. Other rails still serve its messages."""
        cdef Opening opening
        for message in [*self.messages.values(), *self.ending]:
            if (<SendFuture> message).rail == rail.number:  # the rail was the lead
                end_windows(<SendFuture> message, rail.keys)
            for opening in list((<SendFuture> message).openings or ()):
                if opening.rail is not rail:
                    continue
                if opening.in_flight:  # its `free_memory` does the rest
                    end_windows(<SendFuture> message, rail.keys)
                else:
                    opening.close(KEYS_VALID)

    def lead_changed(self, lead: Any) -> None:
        """Open all messages on the new lead once sending continues (`reopen_messages`)."""
        self.to_reopen = list(self.messages.values())

    # ---- the end ----

    def end_windows(self):
        """End all windows after the connection has ended, before the queue pairs are destroyed."""
        for message in [*self.messages.values(), *self.ending]:
            end_windows(<SendFuture> message, None)

    cdef int close(self, bint ended) except -1:
        """Close the memory of unread messages after the queue pairs have been destroyed.

        If `ended` is False, the loop was closed, and futures cannot be settled.
        """
        cdef SendFuture message
        cdef int code = 0
        self.end_windows()
        messages, self.messages = [*self.messages.values(), *self.ending], {}
        ending, self.ending = self.ending, {}
        if ended:
            for message, (status, invalidated_key) in ending.items():
                message.sender.finish(message, status, invalidated_key)
        self.unannounced.clear()
        self.to_reopen = None  # its messages refer to this object
        for message in messages:
            message.openings = None  # they refer to the message
            code = close_message(message, NOT_INVALIDATED) or code
        self.session = None
        return code
