# Outgoing control messages.
#
# Control messages have their own credits, and wait here until a credit is available. Spare blocks
# are reserved for them, because a connection must respond to its peer even when the program holds
# all memory of the pool.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.string cimport memcpy

cimport cython

from .frames cimport (
    CONTROL,
    HEADER,
    RNDV_ACK,
    RendezvousAck,
    htole32,
    next_number,
)
from .futures cimport complete_waiter
from .memory cimport PoolBlock, release_all
from .outbox cimport ENDED, NOT_STARTED, SWITCHING
from .sends cimport Frame, new_frame
from .work_queue cimport IBV_WR_SEND_WITH_INV

from aiordma._core import protocol
from aiordma.errors import ProtocolError, RDMAError

SPARE_BLOCKS = 2


# The cycle collector must not clear a message, because a finalizer may still cause it to be sent.
@cython.no_gc_clear
@cython.final
cdef class QueuedControl:
    """A control message that waits for a credit."""


cdef QueuedControl new_control(
    int kind, bytes content, object waiter, uint64_t backlog_position, uint32_t window_key
):
    cdef QueuedControl control = QueuedControl.__new__(QueuedControl)
    control.kind, control.content, control.waiter = kind, content, waiter
    control.backlog_position, control.window_key = backlog_position, window_key
    return control


@cython.no_gc_clear
@cython.final
cdef class Controls(RailObserver):
    """The queue of outgoing control messages of one connection."""

    def __init__(self, Outbox outbox not None, FrameHandler session not None):
        self.outbox, self.session = outbox, session
        self.waiting, self.spare_blocks = Fifo(), []
        self.max_responses = 4 * protocol.MAX_UNANSWERED  # a correct peer causes fewer

    def take_spare_blocks(self, pool: Pool, count: int = SPARE_BLOCKS):
        for _ in range(count):
            self.spare_blocks.append(pool._block(protocol.MIN_RECEIVE))

    def release_spare_blocks(self):
        release_all(self.spare_blocks)

    def new_request_id(self) -> int:
        self.latest_request = next_number(self.latest_request)
        return self.latest_request

    def send(self, message: protocol.Message, waiter: Waiter | None = None):
        """Send a control message as soon as a credit is available for it.

        A message without a waiter is a response. If too many responses wait, the peer violates the
        protocol by not returning credits. A message with a waiter is sent after all operations that
        began before it, but responses may overtake it. Nothing is sent after the connection has
        ended.
        """
        cdef bytes content = protocol.encode(message)
        if self.session is None:
            return
        if waiter is None:
            self.queue_response(CONTROL, content, 0, isinstance(message, protocol.Goodbye))
        else:
            self.waiting.append(
                new_control(CONTROL, content, waiter, self.outbox.lead_rail.backlog.latest, 0)
            )
            self.session.flush()

    cdef int queue_response(
        self, int kind, bytes content, uint32_t window_key, bint is_goodbye=False
    ) except -1:
        self.responses += 1
        # A Goodbye is always accepted, because `violated` sends one to end the connection.
        if self.responses > self.max_responses and not is_goodbye:
            self.outbox.owner.violated(
                ProtocolError(
                    f"the peer does not return credits, and {self.max_responses} responses are "
                    "waiting for them"
                )
            )
            return 0
        self.waiting.append(new_control(kind, content, None, 0, window_key))
        return self.session.flush()

    cdef int acknowledge(self, uint32_t request_id, uint32_t window_key) except -1:
        """Acknowledge the peer's message, and invalidate its window `window_key` unless it is 0."""
        cdef RendezvousAck ack
        ack.request_id, ack.status = htole32(request_id), 0
        content = PyBytes_FromStringAndSize(<const char *> &ack, sizeof(ack))
        if (
            not self.waiting.size()
            and can_post_frame(self)
            and self.send_frame(RNDV_ACK, content, None, window_key)
        ):
            return 0
        return self.queue_response(RNDV_ACK, content, window_key)

    def lead_changed(self, lead: Any) -> None:
        """Drop the window keys of waiting messages, because they are valid only on the old lead."""
        cdef QueuedControl control
        for control in self.waiting.all():
            control.window_key = 0

    def end(self, error: BaseException):
        """Fail all waiters with errors caused by `error`, and drop all waiting messages."""
        cdef QueuedControl control
        for control in self.waiting.take_all():
            if control.waiter is not None:
                complete_waiter(control.waiter, self.outbox.owner.error_for(error))

    def withdraw(self, waiter):
        """Drop the control message of `waiter` unless it has been sent."""
        cdef QueuedControl control
        for control in self.waiting.all():
            if control.waiter is waiter:
                self.waiting.remove(control)
                return

    cdef int flush(self) except -1:
        """Send the waiting control messages in order, while there are credits and memory."""
        cdef QueuedControl control
        while self.waiting.size() and can_post_frame(self):
            control = <QueuedControl> self.waiting.first()
            if (
                control.backlog_position
                and not self.outbox.lead_rail.backlog.has_posted(control.backlog_position)
            ):
                # This message has to follow a write that has not been posted yet. Send responses
                # first, because the write may depend on the peer receiving one of them.
                control = first_response(self)
                if control is None:
                    break
            self.waiting.remove(control)
            if not self.send_frame(
                control.kind, control.content, control.waiter, control.window_key
            ):
                self.waiting.appendleft(control)
                break
            self.responses -= control.waiter is None
        return 0

    cdef bint send_frame(
        self, int kind, bytes content, object waiter, uint32_t window_key=0
    ) except -1:
        """Send a control frame.

        The frame invalidates the peer's window `window_key` unless that is 0. Returns False if no
        memory is available until another frame completes.
        """
        cdef Outbox outbox = self.outbox
        cdef uint32_t length = HEADER + <uint32_t> len(content)
        cdef PoolBlock block = outbox.pool.take_fast(length + outbox.peer_room.tag_size)
        cdef list spare_blocks = None
        cdef Frame frame
        if block is None:
            try:
                block = (<object> outbox.pool)._block(length + outbox.peer_room.tag_size)
            except (RDMAError, OSError, MemoryError):
                if not self.spare_blocks:
                    return False
                spare_blocks = self.spare_blocks
                block = spare_blocks.pop()
        memcpy(block.bytes() + HEADER, PyBytes_AS_STRING(content), len(content))
        frame = new_frame(block, length)
        frame.waiter, frame.spare_blocks = waiter, spare_blocks
        if window_key:
            frame.opcode, frame.imm = IBV_WR_SEND_WITH_INV, window_key
        outbox.post_frame(frame, kind, False, 0)
        return True

    @property
    def can_send_now(self) -> bool:
        return not self.outbox.flags & (NOT_STARTED | ENDED) and can_post_frame(self)

    def send_now(self, message: protocol.Message) -> bool:
        """Send a control message now if possible. Otherwise drop the message and return False."""
        return self.can_send_now and self.send_frame(CONTROL, protocol.encode(message), None)


cdef QueuedControl first_response(Controls controls):
    cdef QueuedControl control
    for control in controls.waiting.all():
        if control.waiter is None:
            return control
    return None


cdef bint can_post_frame(Controls controls) noexcept:
    """Return whether a control frame can be posted now.

    This takes a control credit and a free entry in the send queue. While another rail is taking
    over from the broken lead, nothing can be posted.
    """
    return (
        controls.outbox.credits.may_send_control()
        and controls.outbox.lead_rail.free > 0
        and not controls.outbox.flags & SWITCHING
    )
