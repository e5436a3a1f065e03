# Long operations over several rails: which rail takes which bytes, and when.
#
# A rail takes the next chunk of an operation when it has less than CHUNKS under way, so that a quick rail
# takes more of them.  A chunk is half of the rail's share of the bytes that are left: shares are measured,
# and the last chunks are short, so that the rails end together.

cimport cython

cdef enum:
    STRIPED_FROM = 512 << 10           # bytes
    SHORTEST = 256 << 10               # bytes of a chunk, but for the last
    LONGEST = 8 << 20
    CHUNKS = 2                         # under way on a rail: one is sent while the other one is asked for
    UNIT = 4096                        # bytes: all chunks but the last are multiples
    MEASURED = 64 << 20                # bytes of a rail, after which what was done before counts half


cpdef list order(list rails, uint64_t size):
    """The policy: the rails that take chunks of an operation of so many bytes, of those that are up, the
    lead before the others.  The first asked is the first that takes one."""
    return rails if size >= STRIPED_FROM else rails[:1]


@cython.final
cdef class Lane:
    """A rail, with the chunks that it has under way."""

    def __cinit__(self, object rail, double done):
        self.rail, self.done = rail, done


cdef class Striped:
    """An operation on memory whose bytes can be moved in any order, by any rail.

    A subclass has `reach` and `post`; one in Python, for tests, `_reach` and `_post`.
    """

    def __cinit__(self, uint64_t size, *_):
        self.size = self.rest = size
        self.ranges = [(0, size)]

    cdef uint64_t reach(self, Lane lane, uint64_t start) except? 0xFFFFFFFFFFFFFFFF:
        """The bytes from `start` on that the rail can move with one request; 0: not now."""
        return self._reach(lane, start)

    cdef int post(self, Lane lane, uint64_t start, uint64_t length) except -1:
        """Posts a chunk.  `Stripes.finished` or `give_back` come when the device has let go of its memory."""
        self._post(lane, start, length)
        return 0

    cdef bint holds_up(self, Lane lane) except -1:
        """True if a rail with CHUNKS under way takes one more: they may wait for this operation."""
        return False

    cdef int end_if_over(self) except -1:
        """It has been dropped, and a chunk that was held is over."""
        return 0

    cdef int connection_ended(self) except -1:
        """Bytes of it were left."""
        return 0


@cython.final
cdef class Stripes:
    """The rails of a session, and the operations of which bytes are left."""

    def __cinit__(self):
        self.lanes, self.operations, self.lost = [], [], []

    def add(self, rail: object):
        """A rail that is up: it takes part in what is left as well."""
        cdef double mean = all_done(self) / len(self.lanes) if self.lanes else LONGEST
        self.lanes.append(Lane(rail, mean))
        self.serve()

    def remove(self, rail: object) -> bool:
        """The rail takes nothing more; False: it was not up."""
        before, self.lanes = self.lanes, [lane for lane in self.lanes if (<Lane> lane).rail is not rail]
        return len(self.lanes) < len(before)

    def lead(self, rail: object):
        """The rail is the first that is asked from now on."""
        self.leading = rail
        self.lanes.sort(key=lambda lane: (<Lane> lane).rail is not rail)
        self.serve()

    cpdef int begin(self, Striped operation) except -1:
        self.operations.append(operation)
        return self.serve()

    cpdef int finished(self, Lane lane, uint64_t length) except -1:
        cdef Lane each
        lane.under_way -= 1
        if self.operations:  # else not all rails are busy, and the bytes say nothing of their rates
            lane.done += length
            if lane.done >= MEASURED:
                for each in self.lanes:
                    each.done /= 2
        return self.serve()

    cpdef int give_back(
        self, Lane lane, Striped operation, uint64_t start, uint64_t length
    ) except -1:
        """The rail has broken and let go of the memory: others take the chunk."""
        if lane is not None:  # a lane had it
            lane.under_way -= 1
        if not operation.rest:
            self.operations.insert(0, operation)
        operation.rest += length
        operation.ranges.append((start, start + length))
        return self.serve()

    cdef int hold(
        self, Lane lane, Striped operation, uint64_t start, uint64_t length
    ) except -1:
        """As `give_back`, of bytes that are on their way to the peer: a late packet could undo what is
        written there next, until the peer has stopped the rail (`over`)."""
        operation.held += 1
        self.lost.append((lane, operation, start, length))
        return 0

    def holds(self, number: int) -> bool:
        """Whether bytes of that rail wait for `over`."""
        return any(lane.rail.number == number for lane, *_ in self.lost)

    def over(self, number: int):
        """The peer takes nothing more by the rail of that number."""
        cdef Lane lane
        cdef Striped operation
        lost, self.lost = self.lost, []
        for each in lost:
            lane, operation, start, length = each
            if lane.rail.number != number:
                self.lost.append(each)
                continue
            operation.held -= 1
            if operation.dropped:
                operation.end_if_over()
            else:
                self.give_back(lane, operation, start, length)

    cpdef uint64_t drop(self, Striped operation) except? 0xFFFFFFFFFFFFFFFF:
        """No rail takes anything more of it, and nothing is given back; returns the bytes that were left."""
        cdef uint64_t rest = operation.rest
        operation.dropped, operation.rest = True, 0
        operation.ranges.clear()
        if operation in self.operations:
            self.operations.remove(operation)
        return rest

    cdef int close(self, object error) except -1:
        """The connection has ended: no rail takes anything more."""
        cdef Striped operation
        self.ended = error
        for operation in tuple(self.operations):
            operation.connection_ended()
        self.operations.clear()
        self.lost.clear()
        return 0

    cdef int serve(self) except -1:
        """Gives a chunk to each rail that has room, and again."""
        cdef Lane lane
        cdef Striped operation
        cdef bint has_place, given = True
        while given:
            given = False
            for operation in tuple(self.operations):
                for lane in order(self.lanes, operation.size):
                    has_place = lane.under_way < CHUNKS or operation.holds_up(lane)
                    if has_place and operation.rest and self.give(lane, operation):
                        given = True
        return 0

    cdef bint give(self, Lane lane, Striped operation) except -1:
        """Has the rail post the next chunk that it can; False: there is none."""
        cdef uint64_t start, end, length = 0
        cdef Py_ssize_t i
        for i, (start, end) in enumerate(operation.ranges):  # `reach` may drop it
            length = min(operation.reach(lane, start), end - start)
            if length:
                break
        if not length:
            return False
        length = min(length, self.chunk(lane, operation.rest))
        if length == end - start:
            del operation.ranges[i]
        else:
            operation.ranges[i] = (start + length, end)
        operation.rest -= length
        if not operation.rest:
            self.operations.remove(operation)
        lane.under_way += 1
        operation.post(lane, start, length)
        return True

    cdef uint64_t chunk(self, Lane lane, uint64_t rest) noexcept:
        cdef uint64_t half = <uint64_t> (rest * (lane.done / all_done(self)) / 2)
        half &= ~<uint64_t> (UNIT - 1)
        return max(<uint64_t> SHORTEST, min(<uint64_t> LONGEST, half))


cdef double all_done(Stripes stripes) noexcept:
    cdef double all = 0
    cdef Lane each
    for each in stripes.lanes:
        all += each.done
    return all
