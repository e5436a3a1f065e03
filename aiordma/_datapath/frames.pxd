# The layout of frames (see aiordma/_core/frames.py), the credits of both directions, and the size
# of the peer's receives.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cimport cython

cdef extern from "<endian.h>" nogil:
    uint16_t htole16(uint16_t)
    uint32_t htole32(uint32_t)

cdef enum:
    DATA = 1
    CONTROL = 2
    CREDIT = 3
    RNDV_RTS = 4
    BUNDLE = 5
    RNDV_ACK = 6
    RNDV_KEYS = 7
    WRITTEN = 8
    HAS_IMM = 0x80

cdef enum:
    HEADER = 8
    MAX_BUNDLE = 128

cdef enum:
    ENTRY_HAS_IMM = 0x80000000

cdef struct FrameHeader:
    uint8_t kind, control
    uint16_t data
    uint32_t imm

cdef struct BundleEntry:
    uint32_t length, imm

cdef struct RendezvousRequest:  # followed by its pieces
    uint32_t request_id, count

cdef struct RendezvousPiece:
    uint64_t address, length
    uint32_t rkey, flags

cdef enum:
    RAIL_SHIFT = 8  # position of the rail number in `flags`
    IS_WINDOW = 1  # the acknowledgement may invalidate the key (IBV_WR_SEND_WITH_INV)

cdef struct RendezvousAck:
    uint32_t request_id, status

cdef struct RendezvousKeys:  # followed by the keys of the pieces from `first` on
    uint32_t request_id, rail, first, count

cdef struct RendezvousKey:
    uint32_t rkey, flags

cdef str frame_name(int kind)
cdef bint carries_message(int kind) noexcept
cdef uint64_t bundled_size(uint64_t length) noexcept
cdef uint32_t validate_bundle(const unsigned char *bytes, uint32_t length) except 0


cdef class Credits:
    cdef uint32_t data, control        # credits that this side has
    cdef uint32_t data_limit, control_limit  # the peer's receives
    cdef uint32_t data_receives, control_receives  # this side's receives
    cdef uint32_t used_data_receives, used_control_receives  # not posted again yet
    cdef uint32_t owed_data, owed_control  # credits to return to the peer
    cdef uint32_t data_threshold       # owed data credits that make a CREDIT frame due
    cdef bint may_send_control(self) noexcept
    cdef bint credit_frame_due(self) noexcept
    cpdef int received(self, int kind, uint32_t control, uint32_t data) except -1
    cdef int reposted_data(self, uint32_t count) except -1
    cdef void reposted_control(self) noexcept


@cython.final
cdef class PeerRoom:
    cdef uint64_t sent                 # number of frames
    cdef uint32_t size, largest        # next receive without the tag; largest receive with it
    cdef uint32_t tag_size             # bytes that encryption adds to a frame
    cdef uint64_t max_message          # bytes
    cdef object changes                # announced sizes not reached yet: (first receive, size)
    cdef int set_size(self, object size) except -1
    cdef int apply_changes(self) except -1

    cdef inline bint fits(self, uint64_t length) noexcept:
        return HEADER + length <= self.size

    cdef inline int count_sent(self) except -1:  # each frame consumes the next receive
        self.sent += 1
        return self.apply_changes() if self.changes else 0


cdef inline uint32_t next_number(uint32_t latest) noexcept:
    """Return the number of the next request, which is never 0."""
    return latest % 0xFFFFFFFF + 1


cdef inline void write_header(
    FrameHeader *header, Credits credits, int kind, bint has_imm, uint32_t imm
) noexcept:
    """Write the header of a frame. It uses a credit and returns all credits that are owed."""
    if carries_message(kind):
        credits.data -= 1
    else:
        credits.control -= 1
    header.kind = <uint8_t> (kind | (HAS_IMM if has_imm else 0))
    header.control = <uint8_t> credits.owed_control
    header.data = htole16(<uint16_t> credits.owed_data)
    header.imm = htole32(imm)
    credits.owed_control = credits.owed_data = 0
