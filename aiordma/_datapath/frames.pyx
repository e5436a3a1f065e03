# Frames, and what the peer has room for.  aiordma/_core/frames.py has the layout of frames.

cimport cython

import collections

from aiordma._core.frames import FrameKind
from aiordma.errors import InternalError, ProtocolError

cdef extern from "<endian.h>" nogil:
    uint16_t le16toh(uint16_t)
    uint32_t le32toh(uint32_t)


cdef str frame_name(int kind):
    return FrameKind(kind).name


cdef bint carries_message(int kind) noexcept:
    """True if a frame of this kind needs a data credit."""
    return kind == DATA or kind == BUNDLE or kind == RNDV_RTS or kind == WRITTEN


cdef uint64_t bundled_size(uint64_t length) noexcept:
    return sizeof(BundleEntry) + (length + 7 & ~<uint64_t> 7)


cdef uint32_t validate_bundle(const unsigned char *bytes, uint32_t length) except 0:
    """The number of messages; ProtocolError unless the whole frame is as it should be."""
    cdef uint32_t offset = HEADER, count = 0, word, size, i
    cdef uint64_t whole
    cdef const BundleEntry *entry
    while True:
        if length - offset < sizeof(BundleEntry):
            raise ProtocolError("the peer sent a bundle that ends before its last message")
        if count == MAX_BUNDLE:
            raise ProtocolError(f"the peer sent a bundle of more than {MAX_BUNDLE} messages")
        entry = <const BundleEntry *> (bytes + offset)
        word = le32toh(entry.length)
        size = word & ~ENTRY_HAS_IMM
        whole = bundled_size(size)
        if whole > length - offset:
            raise ProtocolError(
                f"the peer sent a bundle with a message of {size} bytes, longer than the bundle"
            )
        if entry.imm and not word & ENTRY_HAS_IMM:
            raise ProtocolError("the peer sent a bundle with unexpected immediate data")
        for i in range(<uint32_t> sizeof(BundleEntry) + size, <uint32_t> whole):
            if bytes[offset + i]:
                raise ProtocolError("the peer sent a bundle with nonzero bytes between its messages")
        offset += <uint32_t> whole
        count += 1
        if offset == length:
            return count


def count_bundled(const unsigned char[:] frame not None: Buffer) -> int:
    """`validate_bundle`, for tests."""
    return validate_bundle(&frame[0], <uint32_t> len(frame))


# Flow control by credits.  A side has posted D receives for frames with messages and C for the others,
# all in one queue.
#
# 1. A DATA frame needs a data credit, and so do an RNDV_RTS, which stands for a message, a BUNDLE, which
#    stands for several, and a write with immediate data, which uses up a receive.
# 2. A CONTROL, RNDV_ACK or RNDV_KEYS frame needs more than two control credits: it leaves two for CREDIT
#    frames.
# 3. A CREDIT frame that gives control credits back needs one control credit; one that gives back nothing
#    but data credits needs two.
# 4. A CREDIT frame is due when max(1, D // 2) data credits or two control credits are owed; over several
#    rails, where credits free the sender's journal, D counts as 8 at most.
#
# No deadlock.  Let nothing be in flight and side A have a CREDIT frame due that it cannot send.  It has at
# most one control credit, so B owes it at least C - 1 >= 3; B's frame is due as well, and only blocked if B
# has no credit; then A owes B all C, so A has none either.  Both have spent their last.  By rules 2 and 3
# only a CREDIT frame that carries control credits spends the last one.  When A's arrived at B, B had a
# credit; now it has none; so B's last frame was sent after A's last had arrived, and A's likewise after
# B's: impossible.  (Without the "two" of rule 3 it can happen: both sides use up everything in one flight,
# the last two for data credits only.)
#
# No starvation.  At rest a side owes at most one control credit, so the other has C - 1 >= 3 (this is why C
# is at least 4) and may send a CONTROL frame.  And it owes less than max(1, D // 2) data credits plus those
# of messages that the program has not taken: a side whose program has taken everything can be sent to.
#
# No ping-pong.  A CREDIT frame that is not for data answers two frames or more, so without new data each
# round has at most half the frames of the one before.

cdef enum:
    RESERVE = 2  # control credits that only CREDIT frames may use


@cython.final
cdef class Credits:
    """The credits of both directions of one connection."""

    def __cinit__(
        self, data_receives: int, control_receives: int, peer_data_receives: int,
        peer_control_receives: int, data_threshold: int = 0,
    ):
        self.data_receives = data_receives
        self.control_receives = control_receives
        self.data = self.data_limit = peer_data_receives
        self.control = self.control_limit = peer_control_receives
        self.data_threshold = data_threshold or max(1, data_receives // 2)

    cdef bint may_send_control(self) noexcept:
        return self.control > RESERVE

    cdef bint credit_frame_due(self) noexcept:
        if self.owed_control >= 2:
            return self.control >= 1
        if self.owed_data >= self.data_threshold:
            return self.control >= (1 if self.owed_control else 2)
        return False

    cpdef int received(self, int kind, uint32_t control, uint32_t data) except -1:
        if control > self.control_limit - self.control:
            raise ProtocolError(f"the peer returned {control} control credits, more than it has")
        if data > self.data_limit - self.data:
            raise ProtocolError(f"the peer returned {data} data credits, more than it has")
        if kind == CREDIT and not control and not data:
            raise ProtocolError("the peer sent a CREDIT frame that returns no credits")
        if carries_message(kind):
            if self.held_data + self.owed_data >= self.data_receives:
                raise ProtocolError(f"the peer sent a {frame_name(kind)} frame without a credit")
            self.held_data += 1
        else:
            if self.held_control + self.owed_control >= self.control_receives:
                raise ProtocolError(f"the peer sent a {frame_name(kind)} frame without a credit")
            self.held_control += 1
        self.control += control
        self.data += data
        return 0

    cdef int reposted_data(self, uint32_t count) except -1:
        """The user has taken so many frames' messages, and their receives are posted again."""
        if count > self.held_data:
            raise InternalError(f"{count} data receives were reposted, but only {self.held_data} were used")
        self.held_data -= count
        self.owed_data += count
        return 0

    cdef void reposted_control(self) noexcept:
        self.held_control -= 1
        self.owed_control += 1

    # For tests.

    def sent(self, int kind) -> tuple[int, int]:
        """A frame is sent: the control and data credits in its header."""
        cdef FrameHeader header
        write_header(&header, self, kind, False, 0)
        return header.control, le16toh(header.data)

    def posted(self, uint32_t data, uint32_t control):
        self.reposted_data(data)
        for _ in range(control):
            self.reposted_control()

    def may_send(self) -> tuple[bool, bool, bool]:
        """For a message, a control frame and a CREDIT frame: True if it may be sent now."""
        return self.data > 0, self.may_send_control(), self.credit_frame_due()

    def account(self) -> tuple[int, int, int, int, int, int]:
        """Returns the counters that change, as `load` takes them."""
        return (
            self.data, self.control, self.held_data, self.owed_data, self.held_control,
            self.owed_control,
        )

    def load(self, account: tuple[int, ...]):
        (
            self.data, self.control, self.held_data, self.owed_data, self.held_control,
            self.owed_control,
        ) = account


# ---- the size of the peer's receives -------------------------------------------------------------

cdef enum:
    MAX_SIZE_CHANGES = 8  # that have been announced and are not reached yet


@cython.final
cdef class PeerRoom:
    """The size of the peer's receives, which frames take in the order of sending.

    The peer changes it from one of its receives on, and says so before it gives a credit for that.
    """

    def __cinit__(self, size: int, largest: int, tag_size: int, max_message: int):
        self.largest, self.tag_size, self.max_message = largest, tag_size, max_message
        self.changes = collections.deque()
        self.use(size)

    cdef int use(self, object size) except -1:
        self.size = min(size, self.largest) - self.tag_size
        return 0

    cdef int change(self) except -1:
        while self.changes and self.changes[0][0] <= self.sent:
            self.use(self.changes.popleft()[1])
        return 0

    @cython.wraparound(True)
    def announced(self, first: int, size: int):
        """The peer's receives have this size from that one on; ProtocolError if it cannot be."""
        if first < (self.changes[-1][0] if self.changes else self.sent):
            raise ProtocolError(
                f"the peer announced the size of its receive {first}, which is already used"
            )
        if len(self.changes) == MAX_SIZE_CHANGES:
            raise ProtocolError("the peer changes the size of its receives too often")
        self.changes.append((first, size))
        self.change()

    # For tests.

    def longest_after(self, count: int) -> int:
        """Sends so many frames: the bytes that the next one may have."""
        for _ in range(count):
            self.count_sent()
        return self.size
