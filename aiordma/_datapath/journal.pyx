# Frames that the peer may not have received. Each frame stays in its block until the peer returns a
# credit for it.
#
# An acknowledgement from the peer's device is not sufficient, because the device can fail before
# the peer has counted the frame. Control credits return in the order in which frames are handled,
# and data credits in the order in which messages are taken, so each credit identifies its frame.

cimport cython

from aiordma.errors import ProtocolError


cdef uint64_t number_of(object frame):
    return (<Frame> frame).number


@cython.no_gc_clear
@cython.final
cdef class Journal:
    """The frames of one connection that may have to be posted again, and the frame counts.

    The journal keeps no frames if the connection can have only one rail. A frame that is kept has
    to be copied, which costs 50 % more for 64 KiB.
    """

    def __cinit__(self):
        self.data, self.control = Fifo(), Fifo()

    def __len__(self) -> int:
        return self.data.size() + self.control.size()

    cpdef int add(self, Frame frame, bint carries_message) except -1:
        """Record a frame that is about to be posted for the first time."""
        if not self.is_enabled:
            return 0
        frame.kept, frame.number = True, self.sent
        self.sent += 1
        return (self.data if carries_message else self.control).append(frame)

    cpdef int release_credited(self, uint32_t control, uint32_t data) except -1:
        """Release the frames whose credits were returned. The numbers have been validated."""
        if not self.is_enabled:
            return 0
        release_first_frames(self, self.control, control)
        return release_first_frames(self, self.data, data)

    cdef list all(self):
        return sorted([*self.data.all(), *self.control.all()], key=number_of)

    cpdef list missing_frames(self, uint64_t arrived):
        """Return the missing frames in order. The peer has received the first `arrived` frames."""
        cdef Frame frame
        cdef list missing = []
        if not self.handled_by_peer <= arrived <= self.sent:
            raise ProtocolError(
                f"the peer reports {arrived} received frames, but {self.sent} frames were sent, "
                f"and the peer has returned credits for {self.handled_by_peer}"
            )
        for frame in self.all():
            frame.missing = frame.number >= arrived
            if frame.missing:
                missing.append(frame)
            else:
                frame.mark_arrived()
        return missing

    cdef int close(self) except -1:
        """Release all frames after the connection has ended and no device uses them."""
        cdef Frame frame
        for frame in [*self.data.take_all(), *self.control.take_all()]:
            frame.release_from_journal()
        return 0


cdef int release_first_frames(Journal journal, Fifo queue, uint32_t count) except -1:
    cdef Frame frame
    while count:
        count -= 1
        frame = <Frame> queue.first()
        if frame is None:
            raise ProtocolError("the peer returned a credit for a frame that was not sent")
        if frame.missing:  # its block is still needed to send it again
            raise ProtocolError("the peer returned a credit for a frame that it reports as not received")
        queue.popleft()
        journal.handled_by_peer = max(journal.handled_by_peer, frame.number + 1)
        frame.mark_arrived()
        frame.release_from_journal()
    return 0
