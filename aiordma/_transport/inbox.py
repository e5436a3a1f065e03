"""Messages that have arrived, in order, and the tasks that wait for them.

Some facts, and what they mean here:

- A message that fits a receive is here when it is heard of.  A longer one is only offered: it is
  read with RDMA when there is room, ahead of its `recv` only up to `Config.fetch_ahead` bytes, so
  that a slow reader costs a bounded amount.
- `recv` returns memory of the pool; `recv_into` brings memory, and a long message is read straight
  into it.  That is possible only while the call waits, and must be undone when it is cancelled: so
  such a message is not answered for, and can be read once more, until it has been taken.
- Memory under a posted read must stay: it is pinned until the completion.
- The pool may have no memory now: then messages to be fetched into it wait, one behind another.
  What it can never have is an error of `recv`, and stays for `recv_into`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import cast

from .._native import TRANSFER_SIZE, Fetch, Incoming, Promise
from .._native import Inbox as NativeInbox
from ..config import Config
from ..errors import MessageTooLongError, ProtocolError, QuotaError, RDMAError
from ..mr_pool import Block, LocalMemory
from .memory import STAGING_LIMIT, Memory, quota_error
from .message import Message
from .target import Target
from .work_queue import WorkQueue, noop


class Inbox(NativeInbox):
    """`answer` says that an offered message has been read; `on_taken` hears of frames whose
    messages have been taken, `refill` at a time; `on_protocol_error` of a peer at fault.
    """

    def __init__(
        self,
        *,
        queue: WorkQueue,
        memory: Memory,
        config: Config,
        answer: Callable[[int], None],
        on_taken: Callable[[int], None],
        refill: int,
        on_protocol_error: Callable[[ProtocolError], None],
        waiter_error: Callable[[BaseException], BaseException],
    ) -> None:
        self._queue = queue
        self._memory = memory
        self._pool = memory.pool
        self._source = memory.block_source(self._fetch_ahead, internal=False)
        self.most_ahead = config.fetch_ahead
        self._answer = answer
        self._on_taken = on_taken
        self._on_protocol_error = on_protocol_error
        self._waiter_error = waiter_error
        self.table = queue.table
        self.incoming: deque[Message | Incoming] = deque()
        self.receivers: deque[Promise] = deque()
        self.refill = refill
        self._ended: BaseException | None = None

    # ---- arriving ------------------------------------------------------------------------

    def _fetch_ahead(self) -> None:
        """Starts reading offered messages: the first always, others within `fetch_ahead`."""
        if not self.unstarted:
            return
        for position, incoming in enumerate(self.incoming):
            if isinstance(incoming, Message) or incoming.started:
                continue
            length = len(incoming)
            wanted = self.receivers[0] if position == 0 and self.receivers else None
            if wanted is None and self.ahead + length > self.most_ahead:
                return
            target: Target | None = wanted.target if wanted is not None else None
            if target is not None and STAGING_LIMIT < length <= len(target.view):
                if not self._fetch_into(incoming, target):
                    return
            elif target is not None and length > len(target.view):
                self.wake_first()  # to be told that it is too long
                return
            elif not self._fetch(incoming):
                if wanted is not None and quota_error(self._pool, length) is not None:
                    self.wake_first()  # to be told
                return

    def _fetch(self, incoming: Incoming) -> bool:
        """False when those behind it must wait as well."""
        length = len(incoming)
        try:
            block = self._source.block(length)
        except QuotaError:
            return False
        except (RDMAError, OSError) as error:
            self._on_protocol_error(
                ProtocolError(f"no memory for a message of {length} bytes: {error}")
            )
            return False
        if block is None:
            return False
        incoming.message = Message(block, 0, length, incoming.imm)
        self._read(incoming, block)
        return True

    def _fetch_into(self, incoming: Incoming, target: Target) -> bool:
        try:
            memory = target.registered(self._memory)
        except (RDMAError, OSError) as error:
            if quota_error(self._pool, len(incoming)) is None:
                return self._fetch(incoming)  # the pool's memory will do
            target.refused = error
            self.wake_first()
            return False
        incoming.landing = target
        self._read(incoming, memory)
        return True

    def _read(self, incoming: Incoming, memory: Block | LocalMemory) -> None:
        whole = len(incoming)
        incoming.started = True
        self.unstarted -= 1
        self.ahead += whole
        starts = range(0, whole, TRANSFER_SIZE)
        incoming.reads_left = len(starts)
        for start in starts:
            length = min(TRANSFER_SIZE, whole - start)
            self._queue.post(Fetch(self, incoming, memory, start, length))

    def fetched(self, incoming: Incoming) -> None:
        """All of it is here, in the memory that a receiver has brought."""
        if incoming.landing is not None:
            self._wake()
        else:  # who brought it is gone: once more
            self._not_fetched(incoming)

    def _answer_for(self, incoming: Incoming) -> None:
        self._answer(incoming.request_id)

    def _not_fetched(self, incoming: Incoming) -> None:
        """It is as it was when it was offered."""
        incoming.started = False
        self.unstarted += 1
        self.ahead -= len(incoming)
        self._fetch_ahead()

    # ---- taking --------------------------------------------------------------------------

    def _ready(self) -> bool:
        return bool(self.incoming) and is_ready(self.incoming[0])

    def _wake(self) -> None:
        """Lets the receiver that waits longest look, if there is something to see."""
        if self._ready() or self._ended is not None:
            self.wake_first()

    def _tell_taken(self) -> None:
        count, self.taken = self.taken, 0
        self._on_taken(count)

    async def _first(self, target: Target | None, *, waited: bool = False) -> Message | Incoming:
        """The next message, still in its place, when it is this caller's turn."""
        while True:
            first = self.incoming[0] if self.incoming else None
            # What has been read into the memory of another is that one's, also in the moment
            # between its being told and its taking it.
            if isinstance(first, Incoming) and first.landing not in (None, target):
                first = None
            in_turn = waited or not (self.receivers or self.woken)
            if in_turn:
                if first is not None and is_ready(first):
                    return first
                if first is not None and self._refused(first, target) is not None:
                    return first
            first = None  # nor shall an exception from here keep it
            if self._ended is not None and (in_turn or not self.incoming):
                self._wake()  # those behind find the same
                raise self._waiter_error(self._ended)
            receiver = Promise(self.table)
            receiver.target = target
            if waited:
                self.receivers.appendleft(receiver)
            else:
                self.receivers.append(receiver)
            self._fetch_ahead()
            try:
                await receiver
            except BaseException:
                self._give_up(receiver)
                raise
            self.woken -= 1
            waited = True

    def _give_up(self, receiver: Promise) -> None:
        """It does not wait any more, whether it was told already or not."""
        if receiver in self.receivers:
            self.receivers.remove(receiver)
        elif receiver.done() and not receiver.cancelled():
            self.woken -= 1
            self._wake()  # the message was for this one: the next shall have it

    def _refused(self, incoming: Message | Incoming, target: Target | None) -> Exception | None:
        """Why it can never be taken in this way; it stays for the next."""
        length = len(incoming)
        if target is not None:
            if length > len(target.view):
                return MessageTooLongError(length, len(target.view), received=True)
            return target.refused
        if isinstance(incoming, Message) or incoming.started:
            return None
        return quota_error(self._pool, length)

    def _pass_on(self) -> None:
        """The first message stays where it is, for the next in line."""
        self._fetch_ahead()
        self._wake()

    async def recv(self) -> Message:
        """The next message.  Raises what the connection ended with once none is left.

        Cancelling loses nothing: the message stays for the next call.
        """
        message: Message | None = self.take()
        if message is not None:
            return message
        receiver = self.wait()
        return await (self._recv(waited=False) if receiver is None else self.recv_as(receiver))

    async def recv_as(self, receiver: Promise) -> Message:
        """The same for one who stands in line already (`wait`)."""
        try:
            await receiver
        except BaseException:
            self._give_up(receiver)
            raise
        message: Message | None = self.take_in_turn()
        return await self._recv(waited=True) if message is None else message

    async def _recv(self, *, waited: bool) -> Message:
        first = await self._first(None, waited=waited)
        if not isinstance(first, Message):
            refused = self._refused(first, None)
            assert refused is not None
            self._pass_on()
            try:
                raise refused
            finally:  # else it would keep itself, and the message's memory, by its traceback
                del refused, first
        return cast(Message, self.take_first())

    async def recv_into(self, target: Target) -> tuple[int, int | None]:
        """The next message's bytes into `target`: their number, and the immediate data.

        MessageTooLongError leaves the message where it is.
        """
        try:
            incoming = await self._first(target)
            length = len(incoming)
            refused = self._refused(incoming, target)
            if refused is not None:
                self._pass_on()
                try:
                    raise refused
                finally:  # as in `recv`
                    del refused, incoming
            if isinstance(incoming, Incoming):
                assert incoming.landing is target
                self._take_landed()
                self._answer_for(incoming)
                return length, incoming.imm
            with self.take_first() as message:
                target.view[:length] = message.data
                return length, message.imm
        finally:
            self._withdraw(target)
            target.close()

    def _withdraw(self, target: Target) -> None:
        """The target's owner is gone, with a message perhaps on its way there."""
        for incoming in self.incoming:
            if isinstance(incoming, Incoming) and incoming.landing is target:
                incoming.landing = None
                if not incoming.reads_left:
                    self._not_fetched(incoming)
                return

    def _take_landed(self) -> None:
        length = len(self.incoming.popleft())
        self.counts.messages_received += 1
        self.counts.bytes_received += length
        self.offers -= 1
        self.ahead -= length
        self.went(True)

    # ---- the end -------------------------------------------------------------------------

    def end(self, error: BaseException) -> None:
        """No more messages: those that are here can still be taken, every waiter gets `error`."""
        self._ended = error
        self.ended = True
        if self.incoming:
            # What stands behind one that will never be here cannot be had in its turn.
            ready = list(itertools.takewhile(is_ready, self.incoming))
            self.incoming.clear()
            self.incoming.extend(ready)
            self.offers = sum(isinstance(incoming, Incoming) for incoming in ready)
            self.unstarted = 0
        while self.receivers:
            self._wake()

    def close(self) -> None:
        """The queue pair is destroyed: what is left can be taken, and the peer hears of nothing."""
        self._answer = noop
        self.traffic = None
        del self._on_taken


def is_ready(incoming: Message | Incoming) -> bool:
    """All of it is here."""
    return isinstance(incoming, Message) or incoming.ready
