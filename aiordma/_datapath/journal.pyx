# Frames that the peer may not have: each stays in its block until the peer gives a credit back for it.
#
# The acknowledgement of a device says too little: the device can die before the peer has counted the
# frame.  Control credits come back in the order of handling, data credits in that of taking, so they say
# of which frames they are.

cimport cython

from aiordma.errors import ProtocolError


cdef uint64_t number_of(object frame):
    return (<Frame> frame).number


@cython.no_gc_clear
@cython.final
cdef class Journal:
    """The frames of one connection that may have to be posted again, and how many went each way.

    Where both sides can have one rail alone, it keeps none: a frame that stays until the peer has
    handled it is a copy, half as much work again for 64 KiB.
    """

    def __cinit__(self):
        self.data, self.control = Fifo(), Fifo()

    def __len__(self) -> int:
        return self.data.size() + self.control.size()

    cpdef int add(self, Frame frame, bint carries_message) except -1:
        """A frame is about to be posted for the first time."""
        if not self.keeps:
            return 0
        frame.kept, frame.number = True, self.sent
        self.sent += 1
        return (self.data if carries_message else self.control).append(frame)

    cpdef int credited(self, uint32_t control, uint32_t data) except -1:
        """So many credits came back, which are not more than there were frames."""
        if not self.keeps:
            return 0
        forget(self, self.control, control)
        return forget(self, self.data, data)

    cdef list all(self):
        return sorted([*self.data.all(), *self.control.all()], key=number_of)

    cpdef list after(self, uint64_t arrived):
        """The frames that the peer has not got, in their order, where so many have arrived there."""
        cdef Frame frame
        cdef list missing = []
        if not self.first <= arrived <= self.sent:
            raise ProtocolError(
                f"the peer reports {arrived} received frames, but {self.sent} frames were sent, "
                f"and the peer has returned credits for {self.first}"
            )
        for frame in self.all():
            frame.missing = frame.number >= arrived
            if frame.missing:
                missing.append(frame)
            else:
                frame.arrived()
        return missing

    cdef int close(self) except -1:
        """The connection is over, and no device has any of them."""
        cdef Frame frame
        for frame in [*self.data.take_all(), *self.control.take_all()]:
            frame.let_go()
        return 0


cdef int forget(Journal journal, Fifo queue, uint32_t count) except -1:
    cdef Frame frame
    while count:
        count -= 1
        frame = <Frame> queue.first()
        if frame is None:
            raise ProtocolError("the peer returned a credit for a frame that was not sent")
        if frame.missing:  # its block is still to be sent from
            raise ProtocolError("the peer returned a credit for a frame that it reports as not received")
        queue.popleft()
        journal.first = max(journal.first, frame.number + 1)
        frame.arrived()
        frame.let_go()
    return 0
