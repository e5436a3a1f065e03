"""A queue pair with awaitable work requests, for programs that use verbs on an event loop.

::

    async with AsyncQueuePair(pd, QPCapabilities(max_send_wr=64)) as queue:
        queue.qp.connect(queue.qp.endpoint(), remote)
        received = queue.recv_nowait([room])            # a future; posted before the peer sends
        await queue.send([piece], imm=7)
        async with queue.batch() as batch:              # one doorbell, one await
            batch.write([piece], remote_addr, rkey, signaled=False)
            batch.read([other], remote_addr, rkey, wr_id=77)
        completion = await received

To connect through the connection manager, create the queue pair with
`AsyncConnectionId.create_qp`.

A completion has the same ``wr_id`` as its request. A request with ``signaled=False`` does not
generate a completion. Awaiting an unsignaled request returns None as soon as the request has been
posted. Its future is done at the same time as the next signaled request's. When several requests
are posted together, the last request is always signaled, so that unsignaled requests cannot fill
the send queue permanently.

If the send queue is full, tasks wait for a free slot in first-come, first-served order. A posted
request cannot be withdrawn. If you cancel the task awaiting a request, the device keeps accessing
the request's memory until the request completes or the queue pair is closed. If a request fails,
all other requests fail immediately, and the first failure becomes the cause of their exceptions.

This module does not provide flow control, and each message must fit into the receive it consumes.
For connections without these restrictions, see :mod:`aiordma.transport`.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeAlias, Unpack

from . import cm, verbs
from ._core.arguments import instance, integer
from ._core.async_only import AsyncContext, AsyncIteration
from ._event_loop import shutdown
from ._event_loop.affinity import LoopAffinity
from ._event_loop.driver import QP_ENDING_EVENTS, ContextEvents, Watch, affects
from ._event_loop.futures import settle
from .errors import BufferStateError, BusyError, QueueFullError, RDMAError, work_completion_error
from .verbs._device.context import event_error
from .verbs._qp.post_failures import MAX_MESSAGE_LENGTH
from .verbs._qp.work_request import wrong_requests

Completed: TypeAlias = asyncio.Future[verbs.WorkCompletion]
Pieces: TypeAlias = Sequence[verbs.ScatterGatherElement]
P = ParamSpec("P")

# The maximum number of completions to process per loop iteration. The limit lets other tasks run.
# The value is an educated guess.
_MAX_COMPLETIONS = 16

# The minimum size of the completion queue, unless the device supports fewer entries. With 32
# entries, rdma_rxe has been seen to report completions that do not belong to any request. The cause
# is unknown.
_MIN_CQ_ENTRIES = 256
_SIGNALED = int(verbs.SendFlags.SIGNALED)
_RECV_OF_WRITE = verbs.WCOpcode.RECV_RDMA_WITH_IMM
_FLUSHED = verbs.WCStatus.WR_FLUSH_ERR


def _awaitable(
    operation: Callable[Concatenate[verbs.SendBatch, P], None],
) -> Callable[Concatenate[AsyncQueuePair, P], Coroutine[Any, Any, verbs.WorkCompletion | None]]:
    """Convert a SendBatch method to a coroutine function that submits a single request.

    If the request is signaled, the coroutine waits for its completion and returns it.
    """

    @functools.wraps(operation)
    async def submit_one(
        self: AsyncQueuePair, /, *arguments: P.args, **keywords: P.kwargs
    ) -> verbs.WorkCompletion | None:
        completions = await self.submit(_collect_requests(operation, *arguments, **keywords))
        return completions[0] if completions else None

    return submit_one


def _posted(
    operation: Callable[Concatenate[verbs.SendBatch, P], None],
) -> Callable[Concatenate[AsyncQueuePair, P], Completed]:
    """Convert a SendBatch method to one that posts a single request and returns its future."""

    @functools.wraps(operation)
    def post_one(self: AsyncQueuePair, /, *arguments: P.args, **keywords: P.kwargs) -> Completed:
        return self.submit_nowait(_collect_requests(operation, *arguments, **keywords))[0]

    return post_one


def _collect_requests(
    operation: Callable[Concatenate[verbs.SendBatch, P], None],
    *arguments: P.args,
    **keywords: P.kwargs,
) -> list[verbs.SendWorkRequest]:
    requests: list[verbs.SendWorkRequest] = []
    with verbs.SendBatch(requests.extend) as batch:
        operation(batch, *arguments, **keywords)
    return requests


class AsyncQueuePair(shutdown.ClosesAtExit):
    """A queue pair for use in the running event loop, with its own completion queue.

    ``qp`` is the underlying queue pair. Use ``qp`` to connect and to query attributes, but not to
    post or poll. Create, use and close this object in the event loop's thread. If the object is
    still open when its last reference is dropped or the loop ends, it is closed, and a
    ResourceWarning is issued.

    Args:
        pd: The protection domain. If ``id`` is given, the domain must belong to the ID's context.
        capabilities: The requested queue sizes and limits.
        id: The connection ID that will own the queue pair. The connection manager then handles the
            queue pair's state transitions.
        **options: The options of :meth:`verbs.ProtectionDomain.create_qp` or, if ``id`` is given,
            of :meth:`cm.ConnectionId.create_qp`.
    """

    def __init__(
        self,
        pd: verbs.ProtectionDomain,
        capabilities: verbs.QPCapabilities | None = None,
        *,
        id: cm.ConnectionId | None = None,
        **options: Unpack[verbs.QPKeywords],
    ) -> None:
        loop = asyncio.get_running_loop()
        instance("pd", pd, verbs.ProtectionDomain, "a ProtectionDomain (Context.alloc_pd)")
        capabilities = verbs.QPCapabilities._convert(
            verbs.QPCapabilities() if capabilities is None else capabilities
        )
        self._channel = pd.context.create_comp_channel()
        try:
            entries = capabilities.max_send_wr + capabilities.max_recv_wr
            least = min(_MIN_CQ_ENTRIES, pd.context.query_device().max_cqe)
            self._cq = pd.context.create_cq(max(least, entries), self._channel)
            self.qp: verbs.QueuePair
            if id is None:
                self.qp = pd.create_qp(self._cq, capabilities=capabilities, **options)
            else:
                keywords: dict[str, Any] = {**options}
                self.qp = id.create_qp(pd, self._cq, capabilities=capabilities, **keywords)
            self._cq.req_notify()
        except BaseException:
            self._channel.close()
            raise
        self._owner_id: object = None
        self._loop = loop
        self._numbers = itertools.count()
        self._sends: dict[int, tuple[Completed, int]] = {}  # request number -> (future, wr_id)
        self._receives: dict[int, Completed] = {}
        self._rings: list[ReceiveRing] = []
        self._waiters: deque[
            tuple[Sequence[verbs.SendWorkRequest], asyncio.Future[list[Completed]]]
        ] = deque()
        self._cause: Exception | None = None  # why all further requests fail
        self._watch = Watch(self._channel.fd, shutdown.weak_method(self._on_completions))
        self._events = ContextEvents.for_context(pd.context)
        self._token = self._events.subscribe(shutdown.weak_method(self._on_event))
        self._affinity = LoopAffinity()
        self._loop_shutdown = shutdown.for_running_loop()
        if id is None:  # an AsyncConnectionId closes its queue pair
            self._loop_shutdown.add(self)

    # ---- sending -------------------------------------------------------------------------

    def submit_nowait(self, requests: Sequence[verbs.SendWorkRequest]) -> list[Completed]:
        """Post requests together without waiting, and return a future for each request.

        Each future's result is the completion of its request. For an unsignaled request, the result
        is a copy of the next signaled request's completion, with the unsignaled request's
        ``wr_id``. Raises the same exceptions as :meth:`verbs.QueuePair.post_send`.

        Raises:
            QueueFullError: If there are not enough free slots, or if other tasks are already
                waiting for slots. Nothing is posted in this case.
        """
        self._check_list(requests)
        if not self._has_room(requests):
            raise QueueFullError(
                "ibv_post_send",
                0,
                f"requested slots: {len(requests)}, free slots: {self.qp.free_send_slots}, "
                f"other waiting tasks: {len(self._waiters)} ({self.qp!r})",
            )
        return self._post(requests)

    async def submit(self, requests: Sequence[verbs.SendWorkRequest]) -> list[verbs.WorkCompletion]:
        """Post requests together once they all fit, and wait until the signaled requests complete.

        If this call is cancelled while waiting for free slots, nothing is posted, unless the slots
        have just become free. Cancelling the call after the requests have been posted does not stop
        the device.

        Returns:
            The completions of the signaled requests, in the order posted. Unsignaled requests that
            precede a signaled request have completed too.

        Raises:
            WorkCompletionError: If a request fails. The exception class depends on the status of
                the first failure.
            ValueError: If there are more requests than slots in the send queue.
        """
        self._check_list(requests)
        size = self.qp.capabilities.max_send_wr
        if len(requests) > size:
            raise ValueError(
                f"too many requests: {len(requests)} (the send queue of {self.qp!r} has {size} "
                "slots)"
            )
        all_signaled = self.qp.sq_sig_all
        signaled = [all_signaled or bool(request.send_flags & _SIGNALED) for request in requests]
        if self._has_room(requests):
            posted = self._post(requests)
        else:
            self.qp._check_sends(requests)
            waiter: asyncio.Future[list[Completed]] = self._loop.create_future()
            self._waiters.append((requests, waiter))
            try:
                posted = await waiter
            except asyncio.CancelledError:
                self._wake_waiters()  # the requests behind this one may fit now
                raise
            finally:
                del waiter  # the traceback of its error refers to this frame
        # Requests complete in order, so await their futures in this order. Do not store a future in
        # a local variable. The traceback of its error refers to this frame, so the variable would
        # create a reference cycle.
        posted = list(itertools.compress(posted, signaled))[::-1]
        completions = []
        while posted:
            completions.append(await posted.pop())
        return completions

    def batch(self) -> AsyncBatch:
        """Return an async context manager that collects requests and submits them on exit."""
        return AsyncBatch(self)

    send: Final = _awaitable(verbs.SendBatch.send)
    write: Final = _awaitable(verbs.SendBatch.write)
    read: Final = _awaitable(verbs.SendBatch.read)
    compare_and_swap: Final = _awaitable(verbs.SendBatch.compare_and_swap)
    fetch_and_add: Final = _awaitable(verbs.SendBatch.fetch_and_add)
    bind: Final = _awaitable(verbs.SendBatch.bind)
    invalidate: Final = _awaitable(verbs.SendBatch.invalidate)

    # These methods post one request without waiting and return a future, like `submit_nowait`.
    send_nowait: Final = _posted(verbs.SendBatch.send)
    write_nowait: Final = _posted(verbs.SendBatch.write)
    read_nowait: Final = _posted(verbs.SendBatch.read)

    def _has_room(self, requests: Sequence[verbs.SendWorkRequest]) -> bool:
        """Return whether the requests fit into the send queue and no others are waiting."""
        return not self._waiters and self.qp.free_send_slots >= len(requests)

    def _wake_waiters(self) -> None:
        """Post waiting requests that now fit into the send queue."""
        while self._waiters and not self._loop.is_closed():
            requests, waiter = self._waiters[0]
            if not waiter.done():
                if self.qp.free_send_slots < len(requests):
                    return
                try:
                    waiter.set_result(self._post(requests))
                except Exception as error:
                    waiter.set_exception(error)
            self._waiters.popleft()

    def _check_list(self, requests: object) -> None:
        self._check_usable()
        is_valid = isinstance(requests, list | tuple) and all(
            isinstance(request, verbs.SendWorkRequest) for request in requests
        )
        if not is_valid and (problem := wrong_requests(requests)):
            raise TypeError(f"{self.qp!r}: {problem}")

    def _post(self, requests: Sequence[verbs.SendWorkRequest]) -> list[Completed]:
        """Post the requests under numbers of this object, and return a future for each request."""
        wr_ids = [integer("wr_id", request.wr_id) for request in requests]
        numbered = [replace(request, wr_id=next(self._numbers)) for request in requests]
        # The completion of the last request also settles the futures of unsignaled requests.
        if numbered:
            numbered[-1].send_flags |= _SIGNALED
        self.qp.post_send(numbered)
        futures = [self._loop.create_future() for _ in requests]
        for posted, future, wr_id in zip(numbered, futures, wr_ids, strict=True):
            self._sends[posted.wr_id] = future, wr_id
        return futures

    # ---- receiving -----------------------------------------------------------------------

    def recv_nowait(self, sges: Pieces = ()) -> Completed:
        """Post a receive and return a future for its completion.

        Raises:
            QueueFullError: If the receive queue is full.
        """
        self._check_usable()
        number = next(self._numbers)
        self.qp.post_recv((verbs.ReceiveWorkRequest(number, sges),))
        future: Completed = self._loop.create_future()
        self._receives[number] = future
        return future

    async def recv(self, sges: Pieces = ()) -> verbs.WorkCompletion:
        """Post a receive and wait for its completion.

        Raises:
            QueueFullError: If the receive queue is full.
            WorkCompletionError: If the receive fails.
        """
        return await self.recv_nowait(sges)

    def receives(self, count: int, size: int) -> ReceiveRing:
        """Post ``count`` receives of ``size`` bytes each, and return them as a ring.

        The ring reposts each receive after use.

        Raises:
            ValueError: If ``count`` or ``size`` is out of range.
            QueueFullError: If the receives do not all fit into the receive queue. Nothing is posted
                in this case.
        """
        return ReceiveRing(self, count, size)

    # ---- completions ---------------------------------------------------------------------

    def _on_completions(self) -> None:
        if self._channel.closed:
            return
        if self._channel.get_event() is not None:  # at most one, because the queue was armed once
            self._cq.req_notify()
        found = self._cq.poll(_MAX_COMPLETIONS)
        if len(found) == _MAX_COMPLETIONS:
            self._loop.call_soon(self._on_completions)
        failed = self.qp.first_failure is not None
        # If the device reports a fatal event, its error is the cause of the flushed requests.
        # Deliver the other completions first, because handling the event fails all requests.
        if failed and self._cause is None and any(wc.status is _FLUSHED for wc in found):
            self._deliver_executed(found)
            self._events.take()  # receive the event that reports the error state
        self._deliver(found)
        if failed:
            self._fail(self._flush_error)
        else:
            self._wake_waiters()

    def _deliver(self, found: list[verbs.WorkCompletion]) -> None:
        """Settle the futures of the completed requests.

        A completion contains the number that `_receives` or `_sends` has for the request. In the
        result of a send, it is replaced by the user's wr_id.
        """
        for wc in found:
            if (waiting := self._receives.pop(wc.wr_id, None)) is not None:
                settle(waiting, wc, wc.error())
            while wc.wr_id in self._sends:
                number = next(iter(self._sends))
                future, wr_id = self._sends.pop(number)
                if number < wc.wr_id:  # an unsignaled request that completed earlier
                    done = wc._replace(wr_id=wr_id, status=verbs.WCStatus.SUCCESS, failure=None)
                    settle(future, done)
                    continue
                if wc.failure is not None:
                    wc.failure.wr_id = wr_id
                settle(future, wc._replace(wr_id=wr_id), wc.error())

    def _deliver_executed(self, found: list[verbs.WorkCompletion]) -> None:
        """Deliver the completions of requests that the device has executed, not flushed."""
        self._deliver([wc for wc in found if wc.status is not _FLUSHED])

    def _on_event(self, event: verbs.AsyncEvent) -> None:
        """Fail all waiters when the device reports a fatal event for this queue pair."""
        if event.type in QP_ENDING_EVENTS and affects(event, self.qp):
            self.fail(event_error(event, self.qp.context))

    def fail(self, cause: Exception) -> None:
        """Fail all waiting calls and all current and future requests.

        Call this method, for example, if the peer stops responding. Completions that have already
        arrived are still delivered. Other requests fail with a flush error, whose ``__cause__`` is
        the first failed request's error. If no request has failed yet, ``__cause__`` is ``cause``.
        The device may keep accessing the requests' memory until :meth:`close` is called. An
        :class:`AsyncConnectionId` calls this method when it is disconnected.
        """
        instance("cause", cause, Exception, "an exception")
        if self._cause is not None or self._channel.closed:
            return
        with suppress(OSError):  # the completion queue has failed
            while found := self._cq.poll(_MAX_COMPLETIONS):
                self._deliver_executed(found)
        first = self.qp.first_failure
        flushed = first is None or first.status is _FLUSHED
        self._cause = cause if flushed else first
        self._fail(self._flush_error)

    def _fail(self, error: Callable[[str], Exception]) -> None:
        """Fail all futures and waiting calls, because their completions may never arrive."""
        sends, self._sends = self._sends, {}
        receives, self._receives = self._receives, {}
        waiters, self._waiters = self._waiters, deque()
        for send, _ in sends.values():
            settle(send, None, error("work request"))
        for receive in receives.values():
            settle(receive, None, error("receive"))
        for _, waiter in waiters:
            settle(waiter, None, error("work request"))

    def _flush_error(self, operation: str) -> Exception:
        """Return the error of an operation that is flushed because the queue pair has failed."""
        return work_completion_error(
            _FLUSHED,
            operation=operation,
            qp_num=self.qp.qp_num,
            cause=self._cause or self.qp.first_failure,
        )

    # ---- the end -------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._channel.closed:
            raise BufferStateError(f"{self!r} is closed")

    def _check_usable(self) -> None:
        self._check_open()
        if self._cause is not None or self.qp.first_failure is not None:
            raise self._flush_error("work request")

    def close(self) -> None:
        """Destroy the queue pair and fail all waiting calls and pending requests.

        After this call, the device no longer accesses the requests' memory.
        """
        if self._channel.closed:
            return
        text = f"{self!r} was closed"
        self._fail(lambda _: BufferStateError(text))
        self._release()

    def _release(self) -> None:
        """Release the device's resources. Do not touch futures, because the loop may be closed."""
        self._loop_shutdown.remove(self)
        self._watch.close()
        self._events.unsubscribe(self._token)
        self._events.release()
        self._channel.close()  # also closes the completion queue and the queue pair
        for ring in self._rings:
            ring._region.close()
        self._rings.clear()  # break the reference cycles with the rings and the ID
        self._owner_id = None

    def _end_without_loop(self) -> None:
        if not self._channel.closed:
            self._release()

    def __repr__(self) -> str:
        return f"<AsyncQueuePair {self.qp.qp_num:#x}, {len(self._sends)} sends in flight>"


class ReceiveRing(AsyncIteration):
    """A fixed number of equally sized receives that are reposted after use.

    Use a ring if the peer may send at any time. A ring is created by
    :meth:`AsyncQueuePair.receives`. It has its own memory, which stays registered for local use
    until the queue pair is closed. Messages are returned in the order in which the receives were
    posted. Each call to :meth:`get` reposts the receive that was used for the previous message. If
    the receive queue is full, the next call tries to repost the receive again.
    """

    def __init__(self, queue: AsyncQueuePair, count: int, size: int) -> None:
        count, size = integer("count", count, None), integer("size", size, None)
        if count < 1 or not 1 <= size <= MAX_MESSAGE_LENGTH:
            raise ValueError(
                f"cannot post {count} receives of {size} bytes: count must be at least 1, and size "
                f"must be from 1 to {MAX_MESSAGE_LENGTH}"
            )
        queue._check_usable()
        limit = queue.qp.capabilities.max_recv_wr
        if queue.qp.srq is None and len(queue._receives) + count > limit:
            raise QueueFullError(
                "ibv_post_recv",
                0,
                f"requested slots: {count}, free slots: {limit - len(queue._receives)} of "
                f"{limit}, on {queue.qp!r}",
            )
        self._queue = queue
        self._size = size
        self._region = queue.qp.pd.reg_mr(count * size)
        self._memory = self._region.buf
        queue._rings.append(self)
        self._posted: deque[tuple[Completed, int]] = deque()  # posted receives with their slots
        self._free_slots: deque[int] = deque(range(count))  # slots to post
        self._is_waited_for = False
        self._post()

    def _post(self) -> None:
        """Post all free slots, including those that did not fit into the receive queue earlier."""
        region = self._region
        while self._free_slots:
            address = region.addr + self._free_slots[0] * self._size
            piece = verbs.ScatterGatherElement(address, self._size, region.lkey)
            self._posted.append((self._queue.recv_nowait((piece,)), self._free_slots.popleft()))

    async def get(self) -> tuple[verbs.WorkCompletion, memoryview]:
        """Wait for the next message, and return its completion and its data.

        The data is valid until the next call. A write with immediate data also completes a receive.
        The returned data is then empty, because a write stores its data at an address chosen by the
        peer. Cancelling this call does not lose a message.

        Raises:
            WorkCompletionError: If the receive fails.
            BufferStateError: If the queue pair is closed.
            QueueFullError: If none of the ring's receives is posted and the receive queue is full.
            BusyError: If another task is already waiting for a message from this ring.
        """
        if self._is_waited_for:
            raise BusyError(
                f"another task is already waiting for the next message on {self._queue!r}"
            )
        self._queue._check_open()
        try:
            self._post()
        except RDMAError:
            if not self._posted:
                raise
            # Ignore the error, because this call can still wait for the receives already posted.
            # The next call posts the free slots again.
        posted, slot = self._posted[0]
        if not posted.done():
            self._is_waited_for = True
            try:
                await asyncio.wait((posted,))  # cancelling this does not cancel the receive
            finally:
                self._is_waited_for = False
        if (error := posted.exception()) is not None:
            raise _copy_error(error)
        completion = posted.result()
        self._free_slots.append(slot)
        self._posted.popleft()
        start = slot * self._size
        length = 0 if completion.opcode is _RECV_OF_WRITE else completion.byte_len
        return completion, self._memory[start : start + length]

    async def __aiter__(self) -> AsyncIterator[tuple[verbs.WorkCompletion, memoryview]]:
        """Yield the completion and data of each message, like :meth:`get`."""
        while True:
            yield await self.get()


class AsyncBatch(AsyncContext, verbs.SendBatch):
    """A batch of requests, for use with ``async with``.

    At the end of the block, the batch posts its requests together and waits for their completions.
    If the block raises an exception, nothing is posted. After the block, ``completions`` contains
    the completions of the signaled requests, in the order posted.
    """

    def __init__(self, queue: AsyncQueuePair) -> None:
        self._collected: list[verbs.SendWorkRequest] = []
        super().__init__(self._collected.extend)
        self._queue = queue
        self.completions: list[verbs.WorkCompletion] = []

    async def __aenter__(self) -> Self:
        return verbs.SendBatch.__enter__(self)

    async def __aexit__(self, kind: object, *_: object) -> None:
        self._collected.clear()
        verbs.SendBatch.__exit__(self, kind)
        if self._collected:
            self.completions = await self._queue.submit(self._collected)


def _copy_error(error: BaseException) -> BaseException:
    """Return a copy of a future's error. Raising the original would add frames to its traceback."""
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again
