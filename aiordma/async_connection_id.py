"""asyncio connections and listeners for any RDMA protocol, using the connection manager.

::

    async with AsyncConnectionId() as id:
        await id.resolve_addr(("10.9.9.1", 20049))
        await id.resolve_route()
        queue = id.create_qp(QPCapabilities(max_send_wr=64, max_recv_wr=64))
        receives = queue.receives(64, 4096)             # posted before the peer may send
        event = await id.connect(cm.ConnectionParameters(b"hello"))
        completion, data = await receives.get()

    async with AsyncConnectionId() as listener:
        listener.id.bind_addr(("10.9.9.1", 20049))
        listener.listen()
        async for request in listener:                  # an AsyncConnectionId
            group.create_task(serve(request))           # create_qp, accept; close at the end

Each coroutine waits for the event that completes its operation. When the connection ends, all calls
waiting on the queue pair fail. A listener should serve each request in its own task, because
`accept` waits for the peer to respond, and fails if the peer has given up.

This module does not provide flow control, and each message must fit into the receive it consumes.
For connections without these restrictions, see :mod:`aiordma.transport`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Unpack

from . import cm, verbs
from ._core.arguments import integer
from ._core.async_only import AsyncIteration
from ._event_loop import shutdown
from ._event_loop.affinity import LoopAffinity
from ._event_loop.driver import EventDriver
from ._event_loop.id_events import ENDED, IdEvents, check_device_name, make_id
from ._event_loop.wait_queue import WaitQueue
from .async_queue_pair import AsyncQueuePair
from .errors import BufferStateError, ConnectionManagerError, VerbsError, host_port
from .verbs._device.device import name_or_variable, specific_device_name

# Connection events that no method waits for.
_IGNORED = frozenset({cm.EventType.ADDR_CHANGE, cm.EventType.TIMEWAIT_EXIT})
# The time limit for resolving an address or a route, in seconds. The value is an educated guess.
# Callers can set a shorter limit with asyncio.timeout.
_RESOLVE_TIMEOUT = 10.0
_PARAMETERS = cm.ConnectionParameters()


class AsyncConnectionId(IdEvents, shutdown.ClosesAtExit, AsyncIteration):
    """An asyncio connection or listener that uses the connection manager.

    ``id`` is the underlying :class:`cm.ConnectionId`. Use ``id`` directly to get addresses, set
    options, and make other calls that do not wait, such as ``join_multicast``. If a call fails or
    is cancelled, the ID is no longer usable, and you must close this object.

    Create, use and close this object in the event loop's thread. If the object is still open when
    its last reference is dropped or the loop ends, the object and its queue pair are closed, and a
    ResourceWarning is issued.

    Args:
        device: The name of the device to use. The default is the device named by the environment
            variable AIORDMA_DEVICE or, if the variable is not set, the default device. The
            connection manager chooses a device by address. If it chooses a different device,
            ``resolve_addr`` raises ConnectionManagerError.
        port_space: The type of service, such as connections (TCP) or datagrams (UDP).

    Raises:
        DeviceNotFoundError: If there is no device with this name.
    """

    def __init__(
        self, device: str | None = None, port_space: cm.PortSpace = cm.PortSpace.TCP
    ) -> None:
        # If no device is given, AIORDMA_DEVICE may name one, which selects the library to use.
        device = name_or_variable(device)
        library = verbs.find_device(device).library
        self._begin(*make_id(library, port_space), specific_device_name(device))

    def _begin(self, events: EventDriver, id: cm.ConnectionId, device: str | None = None) -> None:
        self._device = device
        self._pd: verbs.ProtectionDomain | None = None
        self._closed = False
        self._ended: ConnectionManagerError | None = None
        self._backlog = 0
        self._requests: deque[AsyncConnectionId] = deque()
        self._waiters = WaitQueue()
        self.queue: AsyncQueuePair | None = None
        """The queue pair created by :meth:`create_qp`, or None."""
        self.request: cm.ConnectionEvent | None = None
        """The CONNECT_REQUEST event of an ID from a listener, with the peer's private data."""
        super().__init__(events, id)
        self._affinity = LoopAffinity()
        self._loop_shutdown = shutdown.for_running_loop()
        self._loop_shutdown.add(self)

    def _on_event(self, event: cm.ConnectionEvent) -> None:
        """Queue an event for `expect`, unless it is a request or ends a connection or listener."""
        if event.type is cm.EventType.CONNECT_REQUEST:
            self._on_request(event)
        elif event.type in ENDED and (self._connected or self._backlog):
            peer = self.id.peer_address
            text = f"{host_port(peer) if peer else 'the peer'} disconnected"
            name = f"RDMA_CM_EVENT_{event.type.name}"
            disconnect_error = ConnectionManagerError(text, event=name, status=event.status)
            self._end(event.error() or disconnect_error)
        elif event.type not in _IGNORED:
            self._connected |= event.type is cm.EventType.ESTABLISHED
            super()._on_event(event)

    def _end(self, error: ConnectionManagerError) -> None:
        """Fail all waiting calls with `error`, because no further events will arrive."""
        self._ended = error
        if self.queue is not None:
            self.queue.fail(error)
        self._disconnect()
        self._waiters.wake_all()

    # ---- connecting ----------------------------------------------------------------------

    async def resolve_addr(self, address: cm.Address, source: cm.Address | None = None) -> None:
        """Find the device that has a route to ``address``.

        ``address`` is a (host, port) pair, where the host is an IP address.
        ``source`` is the local address to use. By default, the route determines the local address.
        The call gives up after 10 seconds. Use ``asyncio.timeout`` for a shorter limit.

        Raises:
            AddressError: If no device has a route to the address, or if none was found in time.
            ConnectionManagerError: If the route uses a device other than the requested one.
        """
        self.id.resolve_addr(address, source, _RESOLVE_TIMEOUT)
        await self.expect(cm.EventType.ADDR_RESOLVED)
        check_device_name(self.id, self._device and (self._device,), address)

    async def resolve_route(self) -> None:
        """Find the route to the peer. Call this after resolving the peer's address.

        Raises:
            RouteError: If there is no route, or if none was found within 10 seconds.
        """
        self.id.resolve_route(_RESOLVE_TIMEOUT)
        await self.expect(cm.EventType.ROUTE_RESOLVED)

    @property
    def pd(self) -> verbs.ProtectionDomain:
        """A protection domain on the ID's device, created on first use and closed with the ID.

        Raises:
            ValueError: If the address has not been resolved.
        """
        if self._pd is None:
            if self.id.context is None:
                raise ValueError(
                    f"{self!r} is not bound to a device yet; call resolve_addr() first"
                )
            self._pd = self.id.context.alloc_pd()
        return self._pd

    def create_qp(
        self, capabilities: verbs.QPCapabilities | None = None, **options: Unpack[verbs.QPKeywords]
    ) -> AsyncQueuePair:
        """Create the ID's queue pair in :attr:`pd`. Closing the ID also closes the queue pair.

        Call this after ``resolve_addr`` or, for a connection request, before ``accept``. Post
        receives before the connection is established, because the peer may start sending
        immediately. This method raises the same exceptions as :meth:`cm.ConnectionId.create_qp`.
        """
        self.queue = AsyncQueuePair(self.pd, capabilities, id=self.id, **options)
        self.queue._owner_id = self  # the program may keep only the queue pair
        return self.queue

    async def connect(
        self, parameters: cm.ConnectionParameters = _PARAMETERS
    ) -> cm.ConnectionEvent:
        """Connect to the resolved address and wait until the connection is established.

        If the peer does not respond, the connection manager gives up after about a minute. Use
        ``asyncio.timeout`` for a shorter limit.

        Returns:
            The ESTABLISHED event, which carries the peer's private data and parameters.

        Raises:
            RejectedError: If the peer rejects the request. The exception carries the peer's private
                data.
            UnreachableError: If the peer does not respond.
            LimitError: If the private data is too long.
        """
        self.id.connect(parameters)
        return await self.expect(cm.EventType.ESTABLISHED)

    # ---- listening -----------------------------------------------------------------------

    def listen(self, backlog: int = 128) -> None:
        """Start listening. Use ``async for`` or :meth:`get_request` to receive connection requests.

        Args:
            backlog: The maximum number of pending connection requests. Additional requests are
                rejected. On the embedded device, requests whose peers have given up are dropped
                first to make room.

        Raises:
            ValueError: If ``backlog`` is less than 1. For other exceptions, see
                :meth:`cm.ConnectionId.listen`.
        """
        if integer("backlog", backlog, None) < 1:
            raise ValueError(f"backlog must be at least 1, not {backlog}")
        self.id.listen(backlog)
        self._backlog = backlog

    def _on_request(self, event: cm.ConnectionEvent) -> None:
        if len(self._requests) >= self._backlog:
            self._drop_withdrawn()
        if len(self._requests) >= self._backlog:
            event.id.close()  # the peer sees a rejection
            return
        request = AsyncConnectionId.__new__(AsyncConnectionId)
        request._begin(EventDriver.for_library(self.id.library), event.id)
        request.request = event
        self._requests.append(request)
        self._waiters.wake_all()  # all, because one may be waiting for the listener to end

    def _drop_withdrawn(self) -> None:
        """Drop requests that their peers have withdrawn, to make room for new requests."""
        waiting, self._requests = self._requests, deque()
        for request in waiting:
            if request.id._withdrawn:
                request.close()
            else:
                self._requests.append(request)

    async def get_request(self) -> AsyncConnectionId:
        """Wait for the next connection request and return it.

        You must accept or reject each request. Cancelling this call does not lose a request.

        Raises:
            BufferStateError: If the listener is closed, even while this call is waiting.
            ConnectionManagerError: If the listener's device has been removed.
            ValueError: If :meth:`listen` has not been called.
        """
        while not self._requests:
            if self._closed:
                raise BufferStateError(f"{self!r} is closed")
            if self._ended is not None:
                raise self._ended
            if not self._backlog:
                raise ValueError(f"{self!r} is not listening; call listen() first")
            await self._waiters.wait()
        return self._requests.popleft()

    async def __aiter__(self) -> AsyncIterator[AsyncConnectionId]:
        """Yield connection requests until the listener is closed."""
        with suppress(BufferStateError):
            while True:
                yield await self.get_request()

    async def accept(
        self, parameters: cm.ConnectionParameters = _PARAMETERS
    ) -> cm.ConnectionEvent | None:
        """Accept this connection request and wait until the connection is established.

        For a datagram service, return None immediately.

        Returns:
            The ESTABLISHED event, or None for a datagram service.

        Raises:
            VerbsError: With EINVAL, if the peer has given up in the meantime.
            LimitError: If the private data is too long.
        """
        self.id.accept(parameters)
        if self.id.port_space.datagrams:
            return None
        return await self.expect(cm.EventType.ESTABLISHED)

    def reject(self, private_data: bytes = b"") -> None:
        """Reject this connection request and close this object.

        This method also works if the peer has already given up.

        Raises:
            LimitError: If the private data is too long. You can then call this method again with
                less data.
        """
        try:
            self.id.reject(private_data)
        except VerbsError:
            # The peer of a connection request has given up. Any other ID cannot be rejected.
            if self.request is None:
                raise
        self.close()

    # ---- the end -------------------------------------------------------------------------

    def disconnect(self) -> None:
        """End the connection. Pending work requests fail on both sides.

        This call has no effect if there is no connection or if the connection has already ended.
        """
        self._affinity.check(self)
        if self._connected:
            self._end(ConnectionManagerError(f"{self!r} was disconnected by this side"))

    async def wait_disconnected(self) -> ConnectionManagerError:
        """Wait until either side ends the connection, and return the reason as an exception.

        Raises:
            BufferStateError: If this object is closed first.
        """
        while self._ended is None:
            if self._closed:
                raise BufferStateError(f"{self!r} is closed")
            await self._waiters.wait()
        return self._ended

    def close(self) -> None:
        """Disconnect, close the queue pair and :attr:`pd`, and destroy the ID, without waiting.

        All waiting calls fail, and pending connection requests are rejected. After this call, the
        device no longer accesses memory used by work requests. In a forked child process, this call
        has no effect, because the ID belongs to the parent process.
        """
        if self._closed or self._affinity.is_after_fork:
            return
        self._affinity.check(self)
        self._loop_shutdown.remove(self)
        self._disconnect()
        if self.queue is not None:
            self.queue.close()
        self._destroy()
        for request in self._requests:
            request.close()
        self._requests.clear()
        self._waiters.wake_all()

    def _destroy(self) -> None:
        self._closed = True
        if self._pd is not None:
            self._pd.close()
        self.release()

    def _end_without_loop(self) -> None:
        if self.queue is not None:
            self.queue._release()
        self._destroy()

    def __repr__(self) -> str:
        return f"<Async{repr(self.id)[1:]}"
