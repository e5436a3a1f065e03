"""Messages of any size, in order, within what both ends have room for.

Some facts, and what they mean here:

- A send needs a receive that is already posted at the peer.  `_core.credits` counts them; what
  has no credit waits here, first come first served, so order is kept among concurrent awaits.
- A receive has the size it was posted with.  A message that fits the next one (with its header) is
  *eager*: copied into a frame and sent.  A longer one is *offered*: the frame says where it lies,
  the receiver reads it with RDMA when it has room, straight into the memory that its user will
  see, and says so.  Offers take their turn among the messages, so the order is the same for both.
- A frame costs both ends the same whatever is in it: a work request, a completion, a receive, a
  credit.  So what is sent while a frame with messages is under way waits until the tasks of this
  turn of the loop have all had theirs, and goes in *bundles*; a message with nothing before it
  goes at once.  Who sends one message and waits for its answer thus loses no time.
- Memory under a posted request must stay.  An eager frame lives in its block until completion;
  an offered message stays registered (read-only for the peer) until the peer says it has read it.
- A slow reader must cost a bounded amount.  A data credit goes back only when the user has
  taken the message; offered messages are read ahead only up to `Config.fetch_ahead` bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from .._core import protocol
from .._core.credits import Credits
from .._core.frames import (
    HEADER_SIZE,
    MAX_BUNDLE,
    MESSAGES,
    FrameKind,
    bundled_size,
    pack_bundled,
    pack_header,
    unpack_bundle,
    unpack_header,
)
from .._core.receive_sizes import PeerReceives
from .._native import Run
from ..config import Config
from ..errors import ProtocolError, QuotaError, RDMAError
from ..mr_pool import Block
from .inbox import Inbox
from .incoming import Incoming
from .memory import Memory
from .message import Message
from .offers import Offers
from .outgoing import FrameSend, MessagesSend, Outgoing, OutgoingWrite, SpareSend
from .receives import Receive, Receives
from .work_queue import Work, WorkQueue

# Blocks that only control frames use, and only when the pool is exhausted: who holds all of it must
# not keep back the credits that the peer waits for.
SPARE_BLOCKS = 2

# Control messages that may wait for a credit without anybody here who awaits them: answers to what
# the peer asked and offered, and what follows from its answers.  Fewer for who keeps to
# MAX_UNANSWERED.
MAX_ANSWERS = 4 * protocol.MAX_UNANSWERED

BEFORE_THE_KEY = "the peer sent a message before it has shown that it has the key"


class Messages:
    """The two-sided traffic of one connection.

    `on_control` gets every control message that is not about messages; `on_protocol_error` is
    called when the peer does not keep to the protocol.
    """

    def __init__(
        self,
        *,
        queue: WorkQueue,
        memory: Memory,
        config: Config,
        on_control: Callable[[protocol.Message], None],
        on_protocol_error: Callable[[ProtocolError], None],
        waiter_error: Callable[[BaseException], BaseException],
    ) -> None:
        self._queue = queue
        self._pool = memory.pool
        # Each message must keep its place: the row waits for memory.
        self._frames = memory.supply(self.pump, brief=True)
        self._receives = Receives(
            arrivals=self,
            queue=queue,
            memory=memory,
            config=config,
            tell=self._tell,
            on_posted=self._posted,
        )
        self._config = config
        self._on_control = on_control
        self._on_protocol_error = on_protocol_error
        self._waiter_error = waiter_error
        self._loop = asyncio.get_running_loop()
        self._credits: Credits | None = None
        self._peer_receives = PeerReceives(0, 0)
        self._waiting: deque[Outgoing] = deque()
        self._control_waiting: deque[tuple[bytes, asyncio.Future[None] | None, int]] = deque()
        self._answers_waiting = 0
        self._offers = Offers(self._pool, config.max_message, self.request_id)
        self._spares: list[Block] = []
        self._next_request = 0
        self.under_way = 0
        """Frames with messages that have been posted and are not completed."""
        self._collecting = False  # what is sent in this turn of the loop
        self.inbox = Inbox(
            queue=queue,
            memory=memory,
            config=config,
            answer=self.send_control,
            on_taken=self._receives.taken,
            on_protocol_error=on_protocol_error,
            waiter_error=waiter_error,
        )
        self.peer_has_left = False
        """It has said goodbye: whatever else comes from it does not count."""
        self.gated = False
        """The peer has yet to show that it has the key: it may send no message."""
        self._ended: BaseException | None = None
        self._early: list[tuple[Receive, int, int | None]] = []
        self._drain_waiters: list[asyncio.Future[None]] = []

    # ---- bring-up ------------------------------------------------------------------------

    def post_receives(self) -> None:
        """Posts every receive; before the peer can send, and so before the handshake ends."""
        self._spares = [
            self._pool.block(HEADER_SIZE + protocol.MAX_LENGTH) for _ in range(SPARE_BLOCKS)
        ]
        self._receives.post_all()

    def start(self, peer_eager: int, peer_data: int, peer_control: int) -> None:
        """The handshake is done: what the peer has room for is known."""
        most = max(self._config.eager_size, self._config.max_eager_size)
        self._peer_receives = PeerReceives(peer_eager, most)
        self._credits = Credits(
            data_receives=self._config.data_receives,
            control_receives=self._config.control_receives,
            peer_data_receives=peer_data,
            peer_control_receives=peer_control,
        )
        early, self._early = self._early, []
        for receive, byte_len, imm in early:
            if imm is None:
                self.received(receive, byte_len)
            else:
                self.written(receive, byte_len, imm)

    # ---- sending -------------------------------------------------------------------------

    def send(self, view: memoryview, imm: int | None) -> asyncio.Future[None]:
        """Sends a message after those before it; the future ends with its delivery.

        `view` (bytes, contiguous) must stay as it is until then.  Cancelling the future takes the
        message back if it has not been posted yet, and nothing otherwise.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        self._send_in_turn(Outgoing(view, imm, future))
        return future

    def write(self, work: Work | Run, future: asyncio.Future[None]) -> None:
        """Posts a write with immediate data when its turn among the messages comes."""
        self._send_in_turn(OutgoingWrite(work, future))

    def _send_in_turn(self, outgoing: Outgoing) -> None:
        if self._ended is not None:
            outgoing.future.set_exception(self._waiter_error(self._ended))
            outgoing.drop()
        elif self._waiting or not self._can_send() or self._queue.backlogged:
            self._wait(outgoing)
        elif self.under_way:
            self._wait(outgoing)
            if not self._collecting:
                self._collecting = True
                self._loop.call_soon(self._collected)
        else:
            self._send(outgoing)

    def _wait(self, outgoing: Outgoing) -> None:
        outgoing.turn = self._queue.turn
        self._waiting.append(outgoing)

    def withdraw(self, future: asyncio.Future[None]) -> None:
        """Nobody waits for that message any more: unless it was posted, it is dropped."""
        for place, outgoing in enumerate(self._waiting):
            if outgoing.future is future:
                del self._waiting[place]
                outgoing.drop()
                self._check_drained()
                return

    def withdraw_control(self, future: asyncio.Future[None]) -> None:
        """The same for a control message that is not to be sent any more."""
        for place, (_, waiter, _) in enumerate(self._control_waiting):
            if waiter is future:
                del self._control_waiting[place]
                return

    def _collected(self) -> None:
        self._collecting = False
        self.pump()

    def send_control(
        self, message: protocol.Message, future: asyncio.Future[None] | None = None
    ) -> None:
        """Sends a control message as soon as there is a credit for it.

        One that nobody awaits is an answer: a peer that lets too many pile up is at fault.  What is
        awaited goes after the operations that were begun before it.
        """
        turn = 0
        if future is not None:
            turn = self._queue.turn
        else:
            self._answers_waiting += 1
            if self._answers_waiting > MAX_ANSWERS and not isinstance(message, protocol.Goodbye):
                self._on_protocol_error(
                    ProtocolError(
                        f"the peer has {MAX_ANSWERS} answers waiting here, and gives no credits "
                        f"to send them"
                    )
                )
                return
        self._control_waiting.append((protocol.encode(message), future, turn))
        self.pump()

    def request_id(self) -> int:
        """A number for a request, not 0 and not in use for 2^32 requests."""
        self._next_request = self._next_request % 0xFFFFFFFF + 1
        return self._next_request

    def _can_send(self) -> bool:
        credits = self._credits
        return (
            credits is not None
            and credits.data_credits > 0
            and not self._offers.full
            and self._queue.room > 0
            and not self._frames.waiting
        )

    def _send_waiting(self) -> None:
        waiting = self._waiting
        while waiting and self._can_send() and self._queue.is_turn(waiting[0].turn):
            outgoing = waiting.popleft()
            if outgoing.future.done():
                outgoing.drop()
            elif waiting and outgoing.can_be_bundled:
                self._send_with_followers(outgoing)
            else:
                self._send(outgoing)

    def _send_with_followers(self, first: Outgoing) -> None:
        """Sends a message, and in the same frame those behind it that fit."""
        waiting = self._waiting
        bundle = [first]
        size = HEADER_SIZE + bundled_size(first.view.nbytes)
        while waiting and len(bundle) < MAX_BUNDLE:
            follower = waiting[0]
            if follower.future.done():
                waiting.popleft().drop()
                continue
            longer = size + bundled_size(follower.view.nbytes)
            if longer > self._peer_receives.size or not follower.can_be_bundled:
                break
            if not self._queue.is_turn(follower.turn):
                break
            size = longer
            bundle.append(waiting.popleft())
        if len(bundle) == 1:
            self._send(first)
            return
        try:
            block = self._frames.block(size)
        except (RDMAError, OSError) as error:
            for outgoing in bundle:
                outgoing.future.set_exception(error)
            return
        if block is None:
            waiting.extendleft(reversed(bundle))
            return
        self._pack_header(block, FrameKind.BUNDLE)
        offset = HEADER_SIZE
        for outgoing in bundle:
            offset = pack_bundled(block.view, offset, outgoing.view, outgoing.imm)
        futures = [outgoing.future for outgoing in bundle]
        self._queue.post_frame(MessagesSend(self, block, size, futures))

    def _send(self, outgoing: Outgoing) -> None:
        if isinstance(outgoing, OutgoingWrite):
            assert self._credits is not None
            self._credits.spend_data_without_header()
            self._peer_receives.sent()
            self._queue.post_frame(outgoing.work)
            return
        view = outgoing.view
        length = HEADER_SIZE + view.nbytes
        try:
            if length <= self._peer_receives.size:
                block = self._frames.block(length)
                if block is None:
                    self._waiting.appendleft(outgoing)
                    return
                self._pack_header(block, FrameKind.DATA, outgoing.imm)
                block.view[HEADER_SIZE:length] = view
                self._queue.post_frame(MessagesSend(self, block, length, (outgoing.future,)))
            else:
                self._offer(outgoing)
        except (RDMAError, OSError, ValueError, BufferError) as error:
            # Nothing of it was posted: memory could not be leased or registered.
            if not outgoing.future.done():
                outgoing.future.set_exception(error)

    def _pack_header(self, block: Block, kind: FrameKind, imm: int | None = None) -> None:
        """Begins a frame that is posted next, and takes its credit."""
        credits = self._credits
        assert credits is not None
        if kind in MESSAGES:
            control, data = credits.spend_data()
        elif kind is FrameKind.CONTROL:
            control, data = credits.spend_control()
        else:
            control, data = credits.spend_credit()
        pack_header(block.view, 0, kind, control, data, imm=imm)
        self._peer_receives.sent()

    def _send_control_frame(
        self, kind: FrameKind, data: bytes, future: asyncio.Future[None] | None
    ) -> bool:
        """False when there is no memory now: a frame under way brings some back, and us here."""
        length = HEADER_SIZE + len(data)
        futures = () if future is None else (future,)
        try:
            block = self._pool.block(length)
            frame = FrameSend(block, length, futures)
        except QuotaError:
            if not self._spares:
                return False
            block = self._spares.pop()
            frame = SpareSend(self._spares, block, length, futures)
        self._pack_header(block, kind)
        block.view[HEADER_SIZE:length] = data
        self._queue.post_frame(frame)
        return True

    def _offer(self, outgoing: Outgoing) -> None:
        block = self._frames.block(HEADER_SIZE + protocol.MAX_LENGTH)
        if block is None:
            self._waiting.appendleft(outgoing)
            return
        try:
            offer = self._offers.make(outgoing)
        except BaseException:
            block.release()
            raise
        content = protocol.encode(offer)
        length = HEADER_SIZE + len(content)
        self._pack_header(block, FrameKind.OFFER)
        block.view[HEADER_SIZE:length] = content
        self._queue.post_frame(MessagesSend(self, block, length, ()))

    def pump(self) -> None:
        """Sends what credits and room allow; called whenever either may have grown."""
        credits = self._credits
        if credits is None or self._ended is not None:
            return
        queue = self._queue
        while self._control_waiting and credits.control_credits and queue.control_room:
            content, future, turn = self._control_waiting[0]
            if not queue.is_turn(turn):
                break
            self._control_waiting.popleft()
            if not self._send_control_frame(FrameKind.CONTROL, content, future):
                self._control_waiting.appendleft((content, future, turn))
                break
            self._answers_waiting -= future is None
        self._send_waiting()
        if credits.credit_frame_due and queue.control_room and self._ended is None:
            self._send_control_frame(FrameKind.CREDIT, b"", None)
        if self._drain_waiters:
            self._check_drained()

    # ---- receiving -----------------------------------------------------------------------

    def received(self, receive: Receive, byte_len: int) -> None:
        """A frame has arrived."""
        if self._credits is None:
            # The peer was quicker than our handshake.
            self._early.append((receive, byte_len, None))
            return
        if self._ended is not None or self.peer_has_left:
            receive.release()
            return
        block = receive.block
        try:
            kind, control, data, imm = unpack_header(block.view[:byte_len])
            self._credits.received(kind, control, data)
            if self.gated and kind in MESSAGES:
                raise ProtocolError(BEFORE_THE_KEY)
        except ProtocolError as error:
            block.release()
            self._on_protocol_error(error)
            return
        try:
            if kind is not FrameKind.OFFER:
                self._receives.used(receive, byte_len)
            if kind is FrameKind.DATA:
                message = Message(block, HEADER_SIZE, byte_len - HEADER_SIZE, imm)
                self.inbox.arrived(Incoming(message))
            elif kind is FrameKind.BUNDLE:
                self._unbundle(block, byte_len)
            else:
                content = block.view[HEADER_SIZE:byte_len].tobytes()
                if kind is FrameKind.OFFER:
                    block.release()
                    self._offered(receive, protocol.decode(content))
                else:
                    self._receives.repeat(receive)
                    self._credits.reposted_control()
                    if kind is FrameKind.CONTROL:
                        self._control(protocol.decode(content))
        except ProtocolError as error:
            self._on_protocol_error(error)
            return
        self.pump()

    def _unbundle(self, block: Block, byte_len: int) -> None:
        try:
            entries = list(unpack_bundle(block.view[:byte_len]))
        except ProtocolError:
            block.release()
            raise
        for _ in entries[1:]:
            block.lease()
        messages = [Message(block, start, length, imm) for start, length, imm in entries]
        for message in messages:
            self.inbox.arrived(Incoming(message, last=message is messages[-1]))

    def written(self, receive: Receive, byte_len: int, imm: int) -> None:
        """The peer has written to memory of this side, and says so with immediate data."""
        if self._credits is None:
            self._early.append((receive, byte_len, imm))
            return
        if self._ended is not None or self.peer_has_left:
            receive.release()
            return
        try:
            self._credits.received(FrameKind.DATA)
            if self.gated:
                raise ProtocolError(BEFORE_THE_KEY)
        except ProtocolError as error:
            receive.release()
            self._on_protocol_error(error)
            return
        self._receives.used(receive, 0)
        self.inbox.arrived(Incoming(Message(receive.block, 0, 0, imm, byte_len)))
        self.pump()

    def _control(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.RendezvousDone):
            self._offers.answered(message)
        elif isinstance(message, protocol.ReceiveSize):
            self._peer_receives.told(message.first, message.size)
        else:
            self._on_control(message)

    def _offered(self, receive: Receive, message: protocol.Message) -> None:
        offer = self._offers.checked(message)
        self._receives.used(receive, HEADER_SIZE + offer.length)
        self.inbox.arrived(Incoming(None, offer))

    def _posted(self, count: int) -> None:
        assert self._credits is not None
        self._credits.reposted_data(count)
        self.pump()

    def _tell(self, message: protocol.Message) -> bool:
        """Sends a control message now or never: False if it cannot be now."""
        credits = self._credits
        if (
            credits is None
            or self._control_waiting
            or not credits.control_credits
            or not self._queue.control_room
        ):
            return False
        return self._send_control_frame(FrameKind.CONTROL, protocol.encode(message), None)

    # ---- the end -------------------------------------------------------------------------

    def drained(self) -> asyncio.Future[None]:
        """A future for the moment when nothing is waiting to be sent or to be read by the peer."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._drain_waiters.append(future)
        self._check_drained()
        return future

    def _check_drained(self) -> None:
        if self._ended is None and (
            self._waiting or self._control_waiting or self._offers or self._queue.outstanding
        ):
            return
        waiters, self._drain_waiters = self._drain_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def end(self, error: BaseException) -> None:
        """No more messages: those that are here can still be taken, every waiter gets `error`."""
        if self._ended is not None:
            return
        self._ended = error
        self._receives.end()
        futures = [outgoing.future for outgoing in self._waiting]
        futures += [future for _, future, _ in self._control_waiting if future is not None]
        futures += self._offers.futures
        for outgoing in self._waiting:
            outgoing.drop()
        self._waiting.clear()
        self._control_waiting.clear()
        for future in futures:
            if not future.done():
                future.set_exception(self._waiter_error(error))
        self.inbox.end(error)
        self._check_drained()

    def close(self) -> None:
        """The queue pair is destroyed: nothing touches the memory any more.

        The parts let go of each other, so that they go with the connection and not some time later.
        """
        self.inbox.close()
        self._receives.close()
        self._offers.close()
        for receive, _, _ in self._early:
            receive.release()
        self._early.clear()
        for block in self._spares:
            block.release()
        self._spares.clear()
