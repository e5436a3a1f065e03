# Validation of frames, and flow control. aiordma/_core/frames.py describes the layout of frames.

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
    """Return whether a frame of this kind needs a data credit."""
    return kind == DATA or kind == BUNDLE or kind == RNDV_RTS or kind == WRITTEN


cdef uint64_t bundled_size(uint64_t length) noexcept:
    """Return the size of a message in a bundle: its entry, and its bytes padded to 8."""
    return sizeof(BundleEntry) + (length + 7 & ~<uint64_t> 7)


cdef uint32_t validate_bundle(const unsigned char *bytes, uint32_t length) except 0:
    """Return the number of messages in a bundle. Raises ProtocolError if any part is invalid."""
    cdef uint32_t offset = HEADER, count = 0, length_word, size, i
    cdef uint64_t entry_size
    cdef const BundleEntry *entry
    while True:
        if length - offset < sizeof(BundleEntry):
            raise ProtocolError("the peer sent a bundle that ends before its last message")
        if count == MAX_BUNDLE:
            raise ProtocolError(f"the peer sent a bundle of more than {MAX_BUNDLE} messages")
        entry = <const BundleEntry *> (bytes + offset)
        length_word = le32toh(entry.length)
        size = length_word & ~ENTRY_HAS_IMM
        entry_size = bundled_size(size)
        if entry_size > length - offset:
            raise ProtocolError(
                f"the peer sent a bundle with a message of {size} bytes, longer than the bundle"
            )
        if entry.imm and not length_word & ENTRY_HAS_IMM:
            raise ProtocolError("the peer sent a bundle with unexpected immediate data")
        for i in range(<uint32_t> sizeof(BundleEntry) + size, <uint32_t> entry_size):
            if bytes[offset + i]:
                raise ProtocolError("the peer sent a bundle with nonzero bytes between its messages")
        offset += <uint32_t> entry_size
        count += 1
        if offset == length:
            return count


def count_bundled(const unsigned char[:] frame not None: Buffer) -> int:
    """Call `validate_bundle`, for tests."""
    return validate_bundle(&frame[0], <uint32_t> len(frame))


# Flow control uses credits. Each side posts D receives for frames with messages and C receives for
# all other frames. All receives share one queue.
#
#   1. Each DATA, BUNDLE, RNDV_RTS or WRITTEN frame needs a data credit. A write with immediate data
#      needs one as well, because it consumes a receive.
#   2. A CONTROL, RNDV_ACK or RNDV_KEYS frame needs more than two control credits, so that two
#      remain for CREDIT frames.
#   3. A CREDIT frame that returns control credits needs one control credit. A CREDIT frame that
#      returns only data credits needs two.
#   4. A CREDIT frame is due when max(1, D // 2) data credits or two control credits are owed. If a
#      connection can use several rails, this rule uses min(D, 8) instead of D, because the sender's
#      journal keeps frames until their credits return.
#
# Deadlock is impossible. Suppose that nothing is in flight and that side A cannot send a CREDIT
# frame that is due. Then A has at most one control credit, so B owes A at least C - 1 >= 3 control
# credits. B's CREDIT frame is therefore due as well, and B can only be blocked if it has no control
# credit. Then A owes B all C control credits, so A's frame needs only one credit by rule 3, and A
# has none either. By rules 2 and 3, only a CREDIT frame that returns control credits can spend the
# last control credit. A's last frame therefore gave B a credit when it arrived. B has spent that
# credit, so B sent its last frame after A's last frame had arrived. By the same argument, A sent
# its last frame after B's last frame had arrived, which is a contradiction. If rule 3 did not
# require two credits, both sides could spend their last two credits on returning only data credits,
# and deadlock.
#
# Starvation is impossible. An idle side owes at most one control credit, so its peer has at least
# C - 1 >= 3 and may send a CONTROL frame. This is why C must be at least 4. An idle side also owes
# fewer than max(1, D // 2) data credits, in addition to the credits for messages that its program
# has yet to take. Once the program has taken all messages, the peer can therefore always send
# another message.
#
# CREDIT frames cannot trigger each other endlessly. A CREDIT frame that returns no data credits
# responds to at least two frames. Without new data, each round therefore has at most half as many
# frames as the previous round.

cdef enum:
    RESERVE = 2  # control credits that only CREDIT frames may use


@cython.final
cdef class Credits:
    """The credits of one connection, in both directions."""

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
        """Return whether a CREDIT frame must return the credits that this side owes.

        The frame itself uses a control credit. It therefore has to return at least two control
        credits, or enough data credits. Otherwise, two idle sides would return credits for each
        other's CREDIT frames forever. The last control credit may only be used for a frame that
        returns control credits. Otherwise, both sides could run out of them.
        """
        if self.owed_control >= 2:
            return self.control >= 1
        if self.owed_data >= self.data_threshold:
            return self.control >= (1 if self.owed_control else 2)
        return False

    cpdef int received(self, int kind, uint32_t control, uint32_t data) except -1:
        """Validate and count a frame that returns `control` and `data` credits."""
        if control > self.control_limit - self.control:
            raise ProtocolError(f"the peer returned {control} control credits, more than it has")
        if data > self.data_limit - self.data:
            raise ProtocolError(f"the peer returned {data} data credits, more than it has")
        if kind == CREDIT and not control and not data:
            raise ProtocolError("the peer sent a CREDIT frame that returns no credits")
        if carries_message(kind):
            if self.used_data_receives + self.owed_data >= self.data_receives:
                raise ProtocolError(f"the peer sent a {frame_name(kind)} frame without a credit")
            self.used_data_receives += 1
        else:
            if self.used_control_receives + self.owed_control >= self.control_receives:
                raise ProtocolError(f"the peer sent a {frame_name(kind)} frame without a credit")
            self.used_control_receives += 1
        self.control += control
        self.data += data
        return 0

    cdef int reposted_data(self, uint32_t count) except -1:
        """Count receives that were posted again after their messages were taken."""
        if count > self.used_data_receives:
            raise InternalError(
                f"{count} data receives were reposted, but only {self.used_data_receives} were used"
            )
        self.used_data_receives -= count
        self.owed_data += count
        return 0

    cdef void reposted_control(self) noexcept:
        self.used_control_receives -= 1
        self.owed_control += 1

    # ---- for tests ----

    def sent(self, int kind) -> tuple[int, int]:
        """Count a sent frame, and return the control and data credits that its header returns."""
        cdef FrameHeader header
        write_header(&header, self, kind, False, 0)
        return header.control, le16toh(header.data)

    def posted(self, uint32_t data, uint32_t control):
        self.reposted_data(data)
        for _ in range(control):
            self.reposted_control()

    def may_send(self) -> tuple[bool, bool, bool]:
        """Return whether a message, a control frame and a CREDIT frame may be sent now."""
        return self.data > 0, self.may_send_control(), self.credit_frame_due()

    def account(self) -> tuple[int, int, int, int, int, int]:
        """Return the counters that change, in the form that `load` accepts."""
        return (
            self.data, self.control, self.used_data_receives, self.owed_data,
            self.used_control_receives, self.owed_control,
        )

    def load(self, account: tuple[int, ...]):
        """Restore the counters that `account` returned."""
        (
            self.data, self.control, self.used_data_receives, self.owed_data,
            self.used_control_receives, self.owed_control,
        ) = account


# ---- the size of the peer's receives -------------------------------------------------------------

cdef enum:
    MAX_SIZE_CHANGES = 8  # announced sizes that are not in effect yet


@cython.final
cdef class PeerRoom:
    """The size of the peer's receives, which frames consume in the order in which they are sent.

    The peer announces a new size, and the first receive that has it, before it returns the credit
    for that receive.
    """

    def __cinit__(self, size: int, largest: int, tag_size: int, max_message: int):
        self.largest, self.tag_size, self.max_message = largest, tag_size, max_message
        self.changes = collections.deque()
        self.set_size(size)

    cdef int set_size(self, object size) except -1:
        self.size = min(size, self.largest) - self.tag_size
        return 0

    cdef int apply_changes(self) except -1:
        """Use the announced size if the next frame consumes a receive that has it."""
        while self.changes:
            first_receive, size = self.changes[0]
            if first_receive > self.sent:
                break
            self.changes.popleft()
            self.set_size(size)
        return 0

    @cython.wraparound(True)
    def announced(self, first: int, size: int):
        """Record a new `size` of the peer's receives, starting with receive number `first`.

        Raises ProtocolError if the announcement is invalid.
        """
        if first < (self.changes[-1][0] if self.changes else self.sent):
            raise ProtocolError(
                f"the peer announced the size of its receive {first}, which is already used"
            )
        if len(self.changes) == MAX_SIZE_CHANGES:
            raise ProtocolError("the peer changes the size of its receives too often")
        self.changes.append((first, size))
        self.apply_changes()

    # ---- for tests ----

    def longest_after(self, count: int) -> int:
        """Count `count` sent frames and return the maximum size of the next one."""
        for _ in range(count):
            self.count_sent()
        return self.size
