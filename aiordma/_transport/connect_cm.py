"""Connecting through the connection manager, never blocking.

Active side: resolve the address, resolve the route, make the queue pair, post the receives,
connect with our hello as private data; the reply's private data is the peer's hello.  Passive
side: the request's private data is the peer's hello; make the queue pair, post the receives,
accept with ours.  (rdma_cm(7))
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

from .. import cm, verbs
from .._core.handshake import Hello
from .._core.refusal import pack_refusal, unpack_refusal
from .._loop.driver import Driver, EventDriver
from .._loop.id_events import ENDED, IdEvents, check_name, make_id
from ..config import Config
from ..errors import (
    UNANNOUNCED,
    ConnectionManagerError,
    RDMAError,
    RejectedError,
    add_hint,
    host_port,
)
from ..verbs._device.route_lookup import active_port
from .acceptor import Acceptor, refusal_text
from .auth import Security
from .connect_attempt import ConnectAttempt
from .connection import Connection
from .endpoint import LocalEndpoint, route_errors
from .inspection import Way
from .lifecycle import Address

logger = logging.getLogger("aiordma.cm")

VIA_HINT = 'is an aiordma listener running there, with via="cm" and not "tcp"?'

# Statuses of a failed connect: IBTA clause 12.6.7.2, and what the embedded device makes of bytes
# that are not those of its connection manager.
NO_LISTENER = 8
NOT_THIS_PROTOCOL = -errno.EPROTO


class CMLink(IdEvents):
    """The connection-manager id of a connection, from its making to its end."""

    def __init__(self, events: EventDriver, id: cm.ConnectionId) -> None:
        """Takes over one use of `events`, and `id`."""
        self._on_end: Callable[[str], None] | None = None
        self._connected = False
        self._local: Address | None = None
        self._peer: Address | None = None
        super().__init__(events, id)

    @property
    def local_address(self) -> Address | None:
        return self._local

    @property
    def peer_address(self) -> Address | None:
        return self._peer

    def _on_event(self, event: cm.ConnectionEvent) -> None:
        if self._on_end is None:
            super()._on_event(event)
        elif event.type in ENDED:
            self._on_end(f"{UNANNOUNCED} ({event.type.name})")

    def _explained(self, error: ConnectionManagerError | None) -> ConnectionManagerError | None:
        return explained(error)

    def established(self, on_end: Callable[[str], None]) -> None:
        """The handshake is done; from now on `on_end` is called on a disconnect, at most once."""
        self._connected = True
        self._local = self.id.local_address
        self._peer = self.id.peer_address
        self._on_end = on_end
        while not self._seen.empty():
            if (event := self._seen.get_nowait()) is not None:
                self._on_event(event)

    def close(self) -> None:
        if self._connected:
            try:
                self.id.disconnect()
            except (RDMAError, OSError) as error:
                logger.debug("disconnect: %s", error)  # the peer was quicker


def explained(error: ConnectionManagerError | None) -> ConnectionManagerError | None:
    """The error with the reason that a listener of aiordma has given, or with what to look at."""
    if isinstance(error, RejectedError) and (why := unpack_refusal(error.private_data)):
        return RejectedError(
            why, reason=error.reason, private_data=error.private_data, event=error.event
        )
    if error is not None and error.status in (NO_LISTENER, NOT_THIS_PROTOCOL):
        add_hint(error, VIA_HINT)
    return error


def parameters(endpoint: LocalEndpoint, peer: Hello | None = None) -> cm.ConnectionParameters:
    """What is asked for; in a reply, no more than what the peer can serve and wants."""
    responder, initiator = endpoint.max_dest_rd_atomic, endpoint.max_rd_atomic
    if peer is not None:
        responder = min(responder, peer.max_rd_atomic)
        initiator = min(initiator, peer.max_dest_rd_atomic)
    return cm.ConnectionParameters(
        private_data=endpoint.hello.pack(),
        responder_resources=responder,
        initiator_depth=initiator,
        retry_count=endpoint.config.retry_count,
        rnr_retry_count=endpoint.config.rnr_retry,
    )


def make_endpoint(id: cm.ConnectionId, config: Config, security: Security) -> LocalEndpoint:
    """The queue pair of a resolved id."""
    assert id.context is not None
    driver = Driver.for_context(id.context, config.pool_limit, config.polling, config.huge_pages)
    endpoint = LocalEndpoint(driver, config, security)
    try:
        endpoint.create_qp(lambda cq, caps: id.create_qp(driver.pd, cq, None, caps, reserved=True))
        # The connection manager's own would be seconds; with the retries, half a minute.
        id.set_ack_timeout(config.ack_timeout)
    except BaseException:
        endpoint.close()
        raise
    return endpoint


async def connect(
    library: verbs.Library,
    device: str | None,
    address: Address,
    source: Address | None,
    config: Config,
    security: Security,
) -> Connection:
    """Connects to one numeric address.  The caller bounds the time."""
    link = CMLink(*make_id(library, cm.PortSpace.TCP))
    id = link.id
    attempt: ConnectAttempt[LocalEndpoint] | None = None
    try:
        if config.type_of_service:
            id.set_tos(config.type_of_service)
        id.resolve_addr(address, source=source, timeout=config.connect_timeout)
        await link.expect(cm.EventType.ADDR_RESOLVED)
        check_device(id, device, address)
        id.resolve_route(timeout=config.connect_timeout)
        await link.expect(cm.EventType.ROUTE_RESOLVED)
        attempt = ConnectAttempt(make_endpoint(id, config, security))
        attempt.make()
        attempt.post_receives()
        id.connect(parameters(attempt.endpoint))
        event = await link.expect(cm.EventType.ESTABLISHED)
        attempt.endpoint.withhold_rights()  # which the connection manager has granted
        peer = Hello.unpack(event.private_data)
        security.agree(peer, address)
        link.established(attempt.on_disconnect)
        return await attempt.start(link, peer, client=True)
    except BaseException as error:
        if attempt is None:
            link.release()
        else:
            attempt.give_up(link, error)
        raise


def check_device(id: cm.ConnectionId, device: str | None, address: Address) -> None:
    """The device is the one that was named, and its port can carry the connection."""
    check_name(id, device, address)
    assert id.context is not None
    with route_errors():  # the connection manager itself does not mind a port that is down
        active_port(id.context, id.port_num)


class CMListener:
    """Listens on one address of the connection manager."""

    def __init__(
        self,
        library: verbs.Library,
        device: str | None,
        address: Address,
        backlog: int,
        acceptor: Acceptor,
    ) -> None:
        self.device = device
        self._acceptor = acceptor
        self._events = EventDriver.for_library(library)
        self._id: cm.ConnectionId | None = None
        try:
            self._id = id = self._events.channel.create_id()
            self._events.attach(id, self._on_event)
            id.set_reuseaddr(True)
            if acceptor.config.type_of_service:
                id.set_tos(acceptor.config.type_of_service)
            id.bind_addr(address)
            id.listen(backlog)
            self.address = id.local_address or address
        except BaseException:
            self.release()
            raise

    def _on_event(self, event: cm.ConnectionEvent) -> None:
        if event.type is cm.EventType.CONNECT_REQUEST:
            self._acceptor.admit(CMRequest(self, event))
        elif event.type is cm.EventType.DEVICE_REMOVAL:
            error = event.error()
            assert error is not None
            self._acceptor.fail(error)
        else:
            logger.warning("listener on %s: %s", host_port(self.address), event.type.name)

    def release(self) -> None:
        """Listens no more; all there is to do when the loop has been closed."""
        if self._id is not None:
            self._events.detach(self._id)
            self._id.close()
        self._events.release()


class CMRequest:
    """A connect request of the connection manager."""

    via: Way = "cm"

    def __init__(self, listener: CMListener, event: cm.ConnectionEvent) -> None:
        self._listener = listener
        self._event = event
        self._id = event.id
        self._link: CMLink | None = None
        self._attempt: ConnectAttempt[LocalEndpoint] | None = None

    def __repr__(self) -> str:
        return f"<connect request to {host_port(self._listener.address)}>"

    @property
    def peer_address(self) -> Address | None:
        return self._id.peer_address

    async def handshake(self, acceptor: Acceptor) -> Connection:
        id = self._id
        self._link = link = CMLink(EventDriver.for_library(id.channel.library), id)
        peer = Hello.unpack(self._event.private_data)
        check_device(id, self._listener.device, self._listener.address)
        self._attempt = attempt = acceptor.attempt(
            lambda: make_endpoint(id, acceptor.config, acceptor.security)
        )
        attempt.post_receives()
        id.accept(parameters(attempt.endpoint, peer))
        attempt.endpoint.withhold_rights()  # which the connection manager has granted
        await link.expect(cm.EventType.ESTABLISHED)
        acceptor.security.agree(peer)  # by now the peer has got our hello, and knows as well
        link.established(attempt.on_disconnect)
        return await attempt.start(link, peer, client=False)

    def give_up(self, error: BaseException) -> None:
        if self._attempt is not None:
            assert self._link is not None
            self._attempt.give_up(self._link, error)
            return
        try:
            self._id.reject(pack_refusal(refusal_text(error)))
        except (RDMAError, OSError) as failure:
            logger.debug("reject: %s", failure)
        if self._link is not None:
            self._link.release()
        else:
            self._id.close()
