# Divides long operations into chunks, and distributes the chunks over several rails.
#
# A rail takes another chunk while fewer than CHUNKS_PER_RAIL of its chunks are in flight, so faster
# rails take more chunks. The size of a chunk is half of the rail's share of the remaining bytes,
# and the shares follow the measured rates. The last chunks are therefore short, and all rails
# finish at about the same time.

cimport cython

cdef enum:
    STRIPED_FROM = 512 << 10           # bytes
    MIN_CHUNK = 256 << 10              # bytes of a chunk, except for the last
    MAX_CHUNK = 8 << 20
    CHUNKS_PER_RAIL = 2                # per rail; one is sent while the other is requested
    CHUNK_UNIT = 4096                  # bytes; all chunks but the last are multiples
    RATE_WINDOW = 64 << 20             # bytes of a rail after which earlier bytes count half


cpdef list select_lanes(list lanes, uint64_t size):
    """Return the lanes that take chunks of an operation of `size` bytes, in order of preference.

    `lanes` are those of all rails that are up, starting with the lead.
    """
    return lanes if size >= STRIPED_FROM else lanes[:1]


@cython.final
cdef class Lane:
    """A rail with its chunks in flight."""

    def __cinit__(self, object rail, double recent_bytes):
        self.rail, self.recent_bytes = rail, recent_bytes


cdef class Striped:
    """An operation on memory whose bytes can be moved in any order, by any rail.

    A subclass defines `movable_bytes` and `post`. A Python subclass, for tests, defines
    `_movable_bytes` and `_post`.
    """

    def __cinit__(self, uint64_t size, *_):
        self.size = self.rest = size
        self.ranges = [(0, size)]

    cdef uint64_t movable_bytes(self, Lane lane, uint64_t start) except? 0xFFFFFFFFFFFFFFFF:
        """Return the number of bytes from `start` on that the rail can move now, or 0.

        If they can never be moved, this may also drop the operation or break the rail.
        """
        return self._movable_bytes(lane, start)

    cdef int post(self, Lane lane, uint64_t start, uint64_t length) except -1:
        """Post a chunk.

        `Stripes.finished` or `requeue_chunk` is called when the device has released its memory.
        """
        self._post(lane, start, length)
        return 0

    cdef bint may_exceed_limit(self, Lane lane) except -1:
        """Return whether a rail may exceed its limit, as its chunks may wait for this operation."""
        return False

    cdef int end_if_over(self) except -1:
        """Complete a dropped operation after one of its held chunks is over."""
        return 0

    cdef int connection_ended(self) except -1:
        """Handle the end of the connection while bytes remain."""
        return 0


@cython.final
cdef class Stripes(RailObserver):
    """The rails of a session, and the operations with bytes that no rail has taken."""

    def __cinit__(self):
        self.lanes, self.operations, self.held_chunks = [], [], []

    def rail_up(self, rail: Any) -> None:
        """Add a rail. It also takes part in operations that have begun."""
        cdef double mean = total_recent_bytes(self) / len(self.lanes) if self.lanes else MAX_CHUNK
        self.lanes.append(Lane(rail, mean))
        self.serve()

    def rail_removed(self, rail: Any) -> None:
        """Give no more chunks to a rail."""
        self.lanes = [lane for lane in self.lanes if (<Lane> lane).rail is not rail]

    def lead_changed(self, lead: Any) -> None:
        """Offer chunks to the lead before all other rails."""
        self.lead_rail = lead
        self.lanes.sort(key=lambda lane: (<Lane> lane).rail is not lead)
        self.serve()

    cpdef int begin(self, Striped operation) except -1:
        self.operations.append(operation)
        return self.serve()

    cpdef int finished(self, Lane lane, uint64_t length) except -1:
        """Record the completion of a chunk, and give the rail another one."""
        cdef Lane each
        lane.chunks_in_flight -= 1
        if self.operations:  # otherwise some rails are idle, and the bytes do not show their rates
            lane.recent_bytes += length
            if lane.recent_bytes >= RATE_WINDOW:
                for each in self.lanes:
                    each.recent_bytes /= 2
        return self.serve()

    cpdef int requeue_chunk(
        self, Lane lane, Striped operation, uint64_t start, uint64_t length
    ) except -1:
        """Offer a chunk to other rails after its rail has broken and released the memory."""
        if lane is not None:  # None if no lane had the chunk
            lane.chunks_in_flight -= 1
        if not operation.rest:
            self.operations.insert(0, operation)
        operation.rest += length
        operation.ranges.append((start, start + length))
        return self.serve()

    cdef int hold(
        self, Lane lane, Striped operation, uint64_t start, uint64_t length
    ) except -1:
        """Keep a written chunk of a broken rail until `release_held_chunks` is called.

        Its bytes may still be on the way to the peer. Until the peer has stopped the rail, a late
        packet could overwrite newer bytes.
        """
        operation.held_count += 1
        self.held_chunks.append((lane, operation, start, length))
        return 0

    def has_held_chunks(self, rail_number: int) -> bool:
        """Return whether chunks of a rail wait for `release_held_chunks`."""
        return any(lane.rail.number == rail_number for lane, *_ in self.held_chunks)

    def release_held_chunks(self, rail_number: int):
        """Offer the held chunks of a rail to other rails. The peer has stopped the rail."""
        cdef Lane lane
        cdef Striped operation
        held_chunks, self.held_chunks = self.held_chunks, []
        for each in held_chunks:
            lane, operation, start, length = each
            if lane.rail.number != rail_number:
                self.held_chunks.append(each)
                continue
            operation.held_count -= 1
            if operation.dropped:
                operation.end_if_over()
            else:
                self.requeue_chunk(lane, operation, start, length)

    cpdef uint64_t drop(self, Striped operation) except? 0xFFFFFFFFFFFFFFFF:
        """Give no more chunks of an operation to rails. Returns the number of remaining bytes."""
        cdef uint64_t rest = operation.rest
        operation.dropped, operation.rest = True, 0
        operation.ranges.clear()
        if operation in self.operations:
            self.operations.remove(operation)
        return rest

    cdef int close(self, object error) except -1:
        """End all operations because the connection has ended."""
        cdef Striped operation
        self.end_error = error
        for operation in tuple(self.operations):
            operation.connection_ended()
        self.operations.clear()
        self.held_chunks.clear()
        return 0

    cdef int serve(self) except -1:
        """Give chunks to the rails that have room, until no chunk is left or no rail has room."""
        cdef Lane lane
        cdef Striped operation
        cdef bint has_room, posted_any = True
        while posted_any:
            posted_any = False
            for operation in tuple(self.operations):
                for lane in select_lanes(self.lanes, operation.size):
                    has_room = (
                        lane.chunks_in_flight < CHUNKS_PER_RAIL
                        or operation.may_exceed_limit(lane)
                    )
                    if has_room and operation.rest and self.post_chunk(lane, operation):
                        posted_any = True
        return 0

    cdef bint post_chunk(self, Lane lane, Striped operation) except -1:
        """Let the rail post the next chunk that it can move. Returns False if there is none."""
        cdef uint64_t start, end, length = 0
        cdef Py_ssize_t i
        for i, (start, end) in enumerate(operation.ranges):
            # `movable_bytes` may drop the operation, which leaves no ranges.
            length = min(operation.movable_bytes(lane, start), end - start)
            if length:
                break
        if not length:
            return False
        length = min(length, self.chunk_size(lane, operation.rest))
        if length == end - start:
            del operation.ranges[i]
        else:
            operation.ranges[i] = (start + length, end)
        operation.rest -= length
        if not operation.rest:
            self.operations.remove(operation)
        lane.chunks_in_flight += 1
        operation.post(lane, start, length)
        return True

    cdef uint64_t chunk_size(self, Lane lane, uint64_t rest) noexcept:
        """Return half of the rail's share of the remaining bytes, according to its recent rate."""
        cdef uint64_t half = <uint64_t> (rest * (lane.recent_bytes / total_recent_bytes(self)) / 2)
        half &= ~<uint64_t> (CHUNK_UNIT - 1)
        return max(<uint64_t> MIN_CHUNK, min(<uint64_t> MAX_CHUNK, half))


cdef double total_recent_bytes(Stripes stripes) noexcept:
    cdef double all = 0
    cdef Lane each
    for each in stripes.lanes:
        all += each.recent_bytes
    return all
