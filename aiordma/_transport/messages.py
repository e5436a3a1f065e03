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
  goes at once.  A request and its reply thus lose no time.
- The fast path of all this is in C (native/fast/traffic.c): messages that wait for nothing but
  others, and valid frames with messages.  The methods here are for everything else.
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
from .._core.frames import (
    HEADER_SIZE,
    MESSAGES,
    FrameKind,
    pack_header,
    unpack_bundle,
    unpack_header,
)
from .._core.handshake import Hello
from .._core.receive_sizes import PeerReceives
from .._native import OFFER_ROOM, Counts, Frame, Incoming, Outgoing, Run, Traffic, Waiter
from ..config import Config
from ..errors import ProtocolError, QuotaError, RDMAError
from ..mr_pool import Block
from .account import Account
from .inbox import Inbox
from .memory import Memory
from .message import Message
from .offers import Offers
from .outgoing import OutgoingWrite
from .receives import Receives
from .work_queue import Work, WorkQueue

# Blocks that only control frames use, and only when the pool is exhausted: a user that holds all of
# it must not keep back the credits that the peer waits for.
SPARE_BLOCKS = 2

OK = int(protocol.ErrorCode.OK)

# Control messages that may wait for a credit without a task that awaits them: answers to what the
# peer asked and offered, and what follows from its answers.  A peer that keeps to MAX_UNANSWERED
# causes fewer.
MAX_ANSWERS = 4 * protocol.MAX_UNANSWERED

BEFORE_THE_KEY = "the peer sent a message before it has proved that it has the key"


class Messages(Traffic):
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
        self.queue = self._queue = queue
        self.shelf = self._pool = memory.pool
        # Each message must keep its place: the row waits for memory.
        self._frames = memory.block_source(self._memory_came, internal=True)
        self._receives = Receives(
            traffic=self,
            queue=queue,
            memory=memory,
            config=config,
            tell=self.tell,
            on_posted=self._posted,
        )
        self._config = config
        self._on_control = on_control
        self._on_protocol_error = on_protocol_error
        self._waiter_error = waiter_error
        self._loop = asyncio.get_running_loop()
        self._peer_receives = PeerReceives(0, 0)
        self.message_type = Message
        self.small_size = config.eager_size
        self.longest = config.max_message
        self.waiting: deque[Outgoing] = deque()
        self.controls: deque[tuple[bytes, Waiter | None, int]] = deque()
        self._answers_waiting = 0
        self.offers = Offers(memory.pd, config.max_message)
        self._spares: list[Block] = []
        self.inbox = Inbox(
            queue=queue,
            memory=memory,
            config=config,
            answer=self._answer,
            on_taken=self._receives.taken,
            refill=self._receives.refill,
            on_protocol_error=on_protocol_error,
            waiter_error=waiter_error,
        )
        self._peer_has_left = False
        self._gated = False
        self._ended: BaseException | None = None
        self._early: list[tuple[Block, int, int | None]] = []
        self.on_early: Callable[[], None] | None = None
        self._drain_waiters: list[asyncio.Future[None]] = []

    @property
    def peer_has_left(self) -> bool:
        """It has said goodbye: whatever else comes from it does not count."""
        return self._peer_has_left

    @peer_has_left.setter
    def peer_has_left(self, left: bool) -> None:
        self._peer_has_left = left
        self._look_whether_it_takes()

    @property
    def gated(self) -> bool:
        """The peer has yet to prove that it has the key: it may send no message."""
        return self._gated

    @gated.setter
    def gated(self, gated: bool) -> None:
        self._gated = gated
        self._look_whether_it_takes()

    def _look_whether_it_takes(self) -> None:
        self.takes = self.started and not (self.ended or self._peer_has_left or self._gated)

    def count_in(self, counts: Counts) -> None:
        """What is sent and received from now on is counted there."""
        self.counts = self.inbox.counts = counts

    # ---- bring-up ------------------------------------------------------------------------

    def post_receives(self) -> None:
        """Posts every receive; before the peer can send, and so before the handshake ends."""
        self._spares = [
            self._pool.block(HEADER_SIZE + protocol.MAX_LENGTH) for _ in range(SPARE_BLOCKS)
        ]
        self._receives.post_all()

    def start(self, peer: Hello) -> None:
        """The handshake is done: what the peer has room for is known."""
        self.max_message = peer.max_message
        most = max(self._config.eager_size, self._config.max_eager_size)
        self._peer_receives = PeerReceives(peer.eager_size, most)
        self.peer_size = self._peer_receives.size
        self.account: Account = Account(
            data_receives=self._config.data_receives,
            control_receives=self._config.control_receives,
            peer_data_receives=peer.data_receives,
            peer_control_receives=peer.control_receives,
        )
        self.begin()
        self.inbox.traffic = self
        self._look_whether_it_takes()
        early, self._early = self._early, []
        for block, byte_len, imm in early:
            if imm is None:
                self.take_frame(block, byte_len)
            else:
                self.written(block, byte_len, imm)

    # ---- sending -------------------------------------------------------------------------

    def send(self, data: bytes | memoryview | Message, imm: int | None, waiter: Waiter) -> None:
        """Sends a message after those before it; `waiter` hears of its delivery.

        The bytes (contiguous) must stay as they are until then.  Cancelling the waiter takes the
        message back if it has not been posted yet, and nothing otherwise.
        """
        if not self.send_plainly(data, imm, waiter):
            self._send_in_turn(Outgoing(data, imm, waiter))

    def write(self, work: Work | Run, future: asyncio.Future[None]) -> None:
        """Posts a write with immediate data when its turn among the messages comes."""
        self._send_in_turn(OutgoingWrite(work, future))

    def _send_in_turn(self, outgoing: Outgoing) -> None:
        if self._ended is not None:
            outgoing.future.set_exception(self._waiter_error(self._ended))
            outgoing.drop()
        elif self.waiting or not self._can_send() or self._queue.backlogged:
            self._wait(outgoing)
        elif self.under_way:
            self._wait(outgoing)
            self.collect_soon()
        else:
            self._send(outgoing)

    def _wait(self, outgoing: Outgoing) -> None:
        outgoing.turn = self._queue.turn
        self.waiting.append(outgoing)

    def withdraw(self, future: Waiter) -> None:
        """Drops a message that is not awaited any more, unless it was posted."""
        for place, outgoing in enumerate(self.waiting):
            if outgoing.future is future:
                del self.waiting[place]
                outgoing.drop()
                self._check_drained()
                return

    def withdraw_control(self, future: Waiter) -> None:
        """The same for a control message that is not to be sent any more."""
        for place, (_, waiter, _) in enumerate(self.controls):
            if waiter is future:
                del self.controls[place]
                return

    def send_control(self, message: protocol.Message, future: Waiter | None = None) -> None:
        """Sends a control message as soon as there is a credit for it.

        One without a future is an answer: a peer that lets too many pile up is at fault.  What is
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
        self.controls.append((protocol.encode(message), future, turn))
        self.pump()

    def _answer(self, request_id: int) -> None:
        """Says that an offered message has been read, and is needed no more."""
        if not self.answer(request_id):
            self.send_control(protocol.RendezvousDone(request_id, protocol.ErrorCode.OK))

    def _can_send(self) -> bool:
        return (
            self.started
            and self.account.data_credits > 0
            and not self.offers.full
            and self._queue.room > 0
            and not self._frames.waiting
        )

    def _send_first(self) -> bool:
        """The first that waits, which is not plain, if it can be now; whether to look again."""
        waiting = self.waiting
        if not (waiting and self._can_send() and self._queue.is_turn(waiting[0].turn)):
            return False
        outgoing = waiting.popleft()
        if outgoing.future.done():
            outgoing.drop()
        else:
            self._send(outgoing)
        return True

    def _make_block(self, size: int) -> Block | None:
        """For a frame, when none is ready."""
        try:
            return self._pool.block_if_first(size)
        except (RDMAError, OSError):
            return None  # `_send` meets it again, and tells

    def _block(self, size: int) -> Block | None:
        """For a frame; None, and nothing is sent until there is some, without memory for it."""
        block = self._frames.block(size)
        self.blocked = self._frames.waiting
        return block

    def _memory_came(self) -> None:
        self.blocked = False
        self.pump()

    def _send(self, outgoing: Outgoing) -> None:
        if isinstance(outgoing, OutgoingWrite):
            self.account.spend_data_without_header()
            self._count_sent(1)
            self._queue.post_frame(outgoing.work)
            return
        length = HEADER_SIZE + outgoing.length
        try:
            if length <= self.peer_size:
                block = self._block(length)
                if block is None:
                    self.waiting.appendleft(outgoing)
                    return
                self._pack_header(block, FrameKind.DATA, outgoing.imm)
                block.view[HEADER_SIZE:length] = outgoing.view
                self.post(Frame(block, length, outgoing.future), 1, outgoing.length)
            else:
                self._offer(outgoing)
        except (RDMAError, OSError, ValueError, BufferError) as error:
            # Nothing of it was posted: memory could not be leased or registered.
            if not outgoing.future.done():
                outgoing.future.set_exception(error)

    def _pack_header(self, block: Block, kind: FrameKind, imm: int | None = None) -> None:
        """Begins a frame that is posted next, and takes its credit."""
        credits = self.account
        if kind in MESSAGES:
            control, data = credits.spend_data()
        elif kind is FrameKind.CONTROL:
            control, data = credits.spend_control()
        else:
            control, data = credits.spend_credit()
        pack_header(block.view, 0, kind, control, data, imm=imm)

    def _count_sent(self, more: int = 0) -> None:
        """Tells what counts the peer's receives of the frames that have been sent."""
        count, self.sent = self.sent + more, 0
        self._peer_receives.sent(count)
        self._look_at_peer()

    def _look_at_peer(self) -> None:
        self.peer_size = self._peer_receives.size
        self.counting = self._peer_receives.changing

    def _send_control_frame(self, kind: FrameKind, data: bytes, future: Waiter | None) -> bool:
        """False when there is no memory now: a frame under way brings some back, and us here."""
        length = HEADER_SIZE + len(data)
        spares = None
        try:
            block = self._pool.block(length)
        except QuotaError:
            if not self._spares:
                return False
            spares = self._spares
            block = spares.pop()
        self._pack_header(block, kind)
        block.view[HEADER_SIZE:length] = data
        self._count_sent(1)
        self._queue.post_frame(Frame(block, length, future, spares))
        return True

    def _offer(self, outgoing: Outgoing) -> None:
        block = self._block(OFFER_ROOM)
        if block is None:
            self.waiting.appendleft(outgoing)
            return
        request_id = self.request_id()
        try:
            address, rkey = self.offers.open(request_id, outgoing)
        except BaseException:
            block.release()
            raise
        self.post_offer(block, request_id, address, rkey, outgoing.length, outgoing.imm)

    def _pump_controls(self) -> None:
        """Sends the control messages that credits and room allow."""
        credits = self.account
        queue = self._queue
        if credits.control_credits and not self.ended:
            # Before the answers to many offers, which else would take every credit that comes and
            # be the reason why there will be many more.
            self._receives.change_if_due()
        while self.controls and credits.control_credits and queue.control_room:
            content, future, turn = self.controls[0]
            if not queue.is_turn(turn):
                break
            self.controls.popleft()
            if not self._send_control_frame(FrameKind.CONTROL, content, future):
                self.controls.appendleft((content, future, turn))
                break
            self._answers_waiting -= future is None

    def _send_credits(self) -> None:
        """Such a frame is due."""
        if self._queue.control_room:
            self._send_control_frame(FrameKind.CREDIT, b"", None)

    # ---- receiving -----------------------------------------------------------------------

    def received(self, block: Block, byte_len: int) -> None:
        """A frame has arrived that the fast path does not take."""
        if not self.started:
            # The peer was quicker than our handshake.
            self._came_early(block, byte_len, None)
            return
        if self.ended or self._peer_has_left:
            block.release()
            return
        try:
            kind, control, data, _ = unpack_header(block.view[:byte_len])
            self.account.received(kind, control, data)
            if kind in MESSAGES and self._gated:
                raise ProtocolError(BEFORE_THE_KEY)
            if kind is FrameKind.BUNDLE:
                for _ in unpack_bundle(block.view[:byte_len]):
                    pass  # it raises what is wrong
        except ProtocolError as error:
            block.release()
            self._on_protocol_error(error)
            return
        content = block.view[HEADER_SIZE:byte_len].tobytes()
        try:
            if kind is FrameKind.OFFER:
                block.release()
                self._offered(block, protocol.decode(content))
            else:
                self._receives.used(block.posted, byte_len)
                self._receives.repeat(block)
                self.account.reposted_control()
                if kind is FrameKind.CONTROL:
                    self._control(protocol.decode(content))
        except ProtocolError as error:
            self._on_protocol_error(error)
            return
        self.pump()

    def _came_early(self, block: Block, byte_len: int, imm: int | None) -> None:
        self._early.append((block, byte_len, imm))
        if self.on_early is not None:
            self.on_early()

    def _count_used(self, posted: int, byte_len: int) -> None:
        self._receives.used(posted, byte_len)

    def written(self, block: Block, byte_len: int, imm: int) -> None:
        """The peer has written to memory of this side, and says so with immediate data."""
        if not self.started:
            self._came_early(block, byte_len, imm)
            return
        if self.ended or self._peer_has_left:
            block.release()
            return
        try:
            self.account.received(FrameKind.DATA)
            if self._gated:
                raise ProtocolError(BEFORE_THE_KEY)
        except ProtocolError as error:
            block.release()
            self._on_protocol_error(error)
            return
        self._receives.used(block.posted, 0)
        self.inbox.add(Message(block, 0, 0, imm, byte_len))
        self.pump()

    def _control(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.RendezvousDone):
            self._offer_over(message.request_id, message.status)
        elif isinstance(message, protocol.ReceiveSize):
            self._count_sent()
            self._peer_receives.told(message.first, message.size)
            self._look_at_peer()
        else:
            self._on_control(message)

    def _offer_over(self, request_id: int, status: int) -> None:
        error = None
        if status != OK:
            error = RDMAError(f"the peer could not take the message (code {status})")
        if not self.offer_over(request_id, error):
            raise ProtocolError("the peer says it has read a message that was not offered")

    def _answered(self, request_id: int, status: int) -> None:
        """The answer to an offer has arrived, not the plain one, and is read and counted."""
        try:
            self._offer_over(request_id, status)
        except ProtocolError as error:
            self._on_protocol_error(error)

    def _offered(self, block: Block, message: protocol.Message) -> None:
        offer = self.offers.checked(message)
        self._receives.used(block.posted, HEADER_SIZE + offer.length)
        self.offered(Incoming(*offer))

    def _posted(self, count: int) -> None:
        self.account.reposted_data(count)
        self.pump()

    @property
    def can_tell(self) -> bool:
        """Whether a control message could be sent now."""
        return (
            self.started
            and not self.ended
            and self.account.control_credits > 0
            and self._queue.control_room > 0
        )

    def tell(self, message: protocol.Message) -> bool:
        """Sends a control message now or never: False if it cannot be now."""
        if not self.can_tell:
            return False
        return self._send_control_frame(FrameKind.CONTROL, protocol.encode(message), None)

    # ---- the end -------------------------------------------------------------------------

    def drained(self) -> asyncio.Future[None]:
        """A future for the moment when nothing is waiting to be sent or to be read by the peer."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._drain_waiters.append(future)
        self.parting = True
        self._check_drained()
        return future

    def _check_drained(self) -> None:
        if self._ended is None and (
            self.waiting or self.controls or self.offers or self._queue.outstanding
        ):
            return
        self.parting = False
        waiters, self._drain_waiters = self._drain_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def end(self, error: BaseException) -> None:
        """No more messages: those that are here can still be taken, every waiter gets `error`."""
        if self._ended is not None:
            return
        self._ended = error
        self.ended = True
        self._look_whether_it_takes()
        self._receives.end()
        if self.waiting or self.controls or self.offers:
            self._forsake(error)
        self.inbox.end(error)
        self._check_drained()

    def _forsake(self, error: BaseException) -> None:
        futures: list[Waiter] = [outgoing.future for outgoing in self.waiting]
        futures += [future for _, future, _ in self.controls if future is not None]
        futures += self.offers.futures
        for outgoing in self.waiting:
            outgoing.drop()
        self.waiting.clear()
        self.controls.clear()
        for future in futures:
            if not future.done():
                future.set_exception(self._waiter_error(error))

    def close(self) -> None:
        """The queue pair is destroyed: nothing touches the memory any more.

        The parts let go of each other, so that they go with the connection and not some time later.
        """
        self.inbox.close()
        self._receives.close()
        self.offers.close()
        for block, _, _ in self._early:
            block.release()
        self._early.clear()
        for block in self._spares:
            block.release()
        self._spares.clear()
