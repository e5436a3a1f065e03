"""Connecting through the connection manager, never blocking.

Active side: resolve the address, resolve the route, make the queue pair, post the receives,
connect with our hello as private data; the answer's private data is the peer's hello.  Passive
side: the request's private data is the peer's hello; make the queue pair, post the receives,
accept with ours.  (rdma_cm(7))
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from .. import cm, verbs
from .._core.handshake import Hello
from .._core.refusal import pack_refusal, unpack_refusal
from .._loop.driver import Driver, EventDriver
from ..config import Config
from ..errors import ConnectionManagerError, ProtocolError, RDMAError, RejectedError
from ..verbs._qp.bring_up import ACK_TIMEOUT
from .connection import Connection
from .lifecycle import Address, weakly
from .places import Places
from .security import Security
from .side import RETRIES, Side

logger = logging.getLogger("aiordma.cm")

ENDED = frozenset({cm.EventType.DISCONNECTED, cm.EventType.DEVICE_REMOVAL})


class CMLink:
    """The connection-manager id of a connection, from its making to its end."""

    def __init__(self, events: EventDriver, id: cm.ConnectionId) -> None:
        """Takes over one use of `events`, and `id`."""
        self._events = events
        self.id = id
        self._loop = asyncio.get_running_loop()
        self._seen: asyncio.Queue[cm.ConnectionEvent] = asyncio.Queue()
        self._on_end: Callable[[str], None] | None = None
        self._connected = False
        self._local: Address | None = None
        self._peer: Address | None = None
        events.attach(id, self._on_event)

    @property
    def local_address(self) -> Address | None:
        return self._local

    @property
    def peer_address(self) -> Address | None:
        return self._peer

    def _on_event(self, event: cm.ConnectionEvent) -> None:
        if self._on_end is None:
            self._seen.put_nowait(event)
        elif event.type in ENDED:
            self._on_end(f"the peer disconnected without a goodbye ({event.type.name})")

    async def expect(self, wanted: cm.EventType) -> cm.ConnectionEvent:
        """The next event, which must be `wanted`; what it says otherwise is raised."""
        if self._seen.empty():
            self._events.take()  # within a host the answer may be there already
        event = await self._seen.get()
        if event.type is not wanted:
            raise told(event.error()) or ConnectionManagerError(
                f"{event.type.name} came instead of {wanted.name}",
                event=event.type.name,
                status=event.status,
            )
        return event

    def established(self, on_end: Callable[[str], None]) -> None:
        """The handshake is done; from now on `on_end` hears of a disconnect, once or never."""
        self._connected = True
        self._local = self.id.local_address
        self._peer = self.id.peer_address
        self._on_end = on_end
        while not self._seen.empty():
            self._on_event(self._seen.get_nowait())

    def close(self) -> None:
        if self._connected:
            try:
                self.id.disconnect()
            except (RDMAError, OSError) as error:
                logger.debug("disconnect: %s", error)  # the peer was quicker

    def release(self) -> None:
        self._events.detach(self.id)
        self.id.close()
        self._events.release()


def told(error: ConnectionManagerError | None) -> ConnectionManagerError | None:
    """With what the listener itself has said, if it was one of aiordma's."""
    if isinstance(error, RejectedError) and (why := unpack_refusal(error.private_data)):
        return RejectedError(
            why, reason=error.reason, private_data=error.private_data, event=error.event
        )
    return error


def parameters(side: Side, peer: Hello | None = None) -> cm.ConnectionParameters:
    """What is asked for; answering, no more than what the peer can serve and wants."""
    responder, initiator = side.max_dest_rd_atomic, side.max_rd_atomic
    if peer is not None:
        responder = min(responder, peer.max_rd_atomic)
        initiator = min(initiator, peer.max_dest_rd_atomic)
    return cm.ConnectionParameters(
        private_data=side.hello.pack(),
        responder_resources=responder,
        initiator_depth=initiator,
        retry_count=RETRIES,
        rnr_retry_count=7,
    )


def make_connection(link: CMLink, config: Config, security: Security) -> tuple[Side, Connection]:
    """The queue pair of a resolved id; the caller posts its receives."""
    context = link.id.context
    assert context is not None
    driver = Driver.for_context(context, config.pool_limit, config.polling)
    side = Side(driver, config, authenticates=security.auth is not None)
    try:
        pd = side.driver.pd
        side.create_qp(lambda cq, caps: link.id.create_qp(pd, cq, None, caps, reserved=True))
        # The connection manager's own would be seconds; with the retries, half a minute.
        link.id.set_ack_timeout(ACK_TIMEOUT)
        return side, Connection(side, config, security)
    except BaseException:
        side.close()
        raise


async def connect(
    library: verbs.Library,
    device: str | None,
    address: Address,
    source: Address | None,
    config: Config,
    security: Security,
) -> Connection:
    """Connects to one numeric address.  The caller bounds the time."""
    events = EventDriver.for_library(library)
    try:
        id = events.channel.create_id()
    except BaseException:
        events.release()
        raise
    link = CMLink(events, id)
    connection: Connection | None = None
    try:
        id.resolve_addr(address, source=source, timeout=config.connect_timeout)
        await link.expect(cm.EventType.ADDR_RESOLVED)
        check_device(id, device, address)
        id.resolve_route(timeout=config.connect_timeout)
        await link.expect(cm.EventType.ROUTE_RESOLVED)
        side, connection = make_connection(link, config, security)
        connection._post_receives()
        id.connect(parameters(side))
        event = await link.expect(cm.EventType.ESTABLISHED)
        peer = Hello.unpack(event.private_data)
        security.agree(peer)
        link.established(weakly(connection._disconnected))
        await connection._start(link, peer, client=True)
    except BaseException as error:
        if connection is None:
            link.release()
        else:
            connection._give_up(link, error)
        raise
    return connection


def check_device(id: cm.ConnectionId, device: str | None, address: Address) -> None:
    assert id.context is not None
    if device is not None and id.context.name != device:
        raise ConnectionManagerError(
            f"the way to {address[0]} is through device {id.context.name!r}, not {device!r}; "
            f"name that one, none, or a source address of {device!r}"
        )


class CMAcceptor:
    """Listens on one address and hands finished connections to `deliver`."""

    def __init__(
        self,
        library: verbs.Library,
        device: str | None,
        address: Address,
        backlog: int,
        config: Config,
        security: Security,
        deliver: Callable[[Connection], None],
    ) -> None:
        self._config = config
        self._security = security
        self._device = device
        self._deliver = deliver
        self._places = Places(config)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._requests: set[cm.ConnectionId] = set()  # whose handshake has not begun
        self._events = EventDriver.for_library(library)
        self._id: cm.ConnectionId | None = None
        try:
            self._id = id = self._events.channel.create_id()
            self._events.attach(id, self._on_event)
            id.set_reuseaddr(True)
            id.bind_addr(address)
            id.listen(backlog)
            self.address = id.local_address or address
        except BaseException:
            self.release()
            raise

    def _on_event(self, event: cm.ConnectionEvent) -> None:
        if event.type is not cm.EventType.CONNECT_REQUEST:
            logger.warning("listener on %s: %s", self.address, event.type.name)
            return
        if len(self._handshakes) >= self._config.max_handshakes:
            refuse(event.id, "too many handshakes are under way")
            event.id.close()
            return
        host = event.id.peer_address[0] if event.id.peer_address else ""
        why = self._places.take(host)
        if why is not None:
            logger.info("%s turned away: %s", host, why)
            refuse(event.id, why)
            event.id.close()
            return
        self._requests.add(event.id)
        task = asyncio.get_running_loop().create_task(self._accept(event, host))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _accept(self, event: cm.ConnectionEvent, host: str) -> None:
        id = event.id
        self._requests.discard(id)
        link = CMLink(EventDriver.for_library(id.channel.library), id)
        connection: Connection | None = None
        try:
            peer = Hello.unpack(event.private_data)
            check_device(id, self._device, self.address)
            side, connection = make_connection(link, self._config, self._security)
            connection._on_closed = partial(self._places.give_back, host)
            connection._post_receives()
            id.accept(parameters(side, peer))
            async with asyncio.timeout(self._config.handshake_timeout):
                await link.expect(cm.EventType.ESTABLISHED)
                self._security.agree(peer)  # by now the peer has heard what it must know
                link.established(weakly(connection._disconnected))
                await connection._start(link, peer, client=False)
        except BaseException as error:
            # The peer, or this machine, failed one handshake: the listener goes on.
            logger.info("handshake on %s failed: %s", self.address, error)
            if connection is None:
                refuse(id, str(error))
                link.release()
                self._places.give_back(host)
            else:
                connection._give_up(link, error)
            if not isinstance(error, (RDMAError, OSError, ProtocolError)):
                raise
        else:
            self._deliver(connection)

    def release(self) -> None:
        """Listens no more; all there is to do when the loop has been closed."""
        if self._id is not None:
            self._events.detach(self._id)
            self._id.close()
        self._events.release()

    async def close(self) -> None:
        """Listens no more; handshakes under way are given up."""
        self.release()
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        for id in self._requests:  # a task that was cancelled before its first step did nothing
            id.close()


def refuse(id: cm.ConnectionId, why: str) -> None:
    """Rejects a request, with the reason for the peer's log."""
    try:
        id.reject(pack_refusal(why))
    except (RDMAError, OSError) as error:
        logger.debug("reject: %s", error)
