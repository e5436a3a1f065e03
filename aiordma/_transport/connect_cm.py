"""Non-blocking connections through the RDMA connection manager (rdma_cm(7)).

The active side resolves the address and the route, creates the queue pair, posts the receives, and
connects with its hello as private data. The private data of the reply is the peer's hello. On the
passive side, the private data of the request is the peer's hello. It creates the queue pair, posts
the receives, and accepts with its own hello.

With a key, the listener creates nothing for a request without a ticket (admission.py). The active
side therefore first connects without a queue pair. The listener rejects this request, with a
challenge and its hello as private data. The active side then connects again. It needs a new id for
that, because a rejected id cannot be reused.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Collection
from typing import Never

from .. import cm
from .._core.handshake_layout import CHALLENGE_MAGIC, CHALLENGE_SIZE, HELLO_SIZE, TICKET_SIZE, Hello
from .._core.refusal import is_missing_key_refusal, unpack_refusal
from .._event_loop.driver import Driver, EventDriver, RequestDriver
from .._event_loop.id_events import ENDED, IdEvents, check_device_name, make_id
from ..cm.address import Address
from ..config import Config
from ..errors import (
    UNANNOUNCED,
    AuthenticationError,
    ConnectionManagerError,
    ProtocolError,
    RDMAError,
    RejectedError,
    add_hint,
    host_port,
)
from ..verbs._device.route_lookup import active_port
from .acceptor import Acceptor, Request, packed_refusal
from .auth import NOT_THE_SAME_KEY, Security, new_ticket
from .connect_attempt import ConnectAttempt, Target
from .connection import Connection
from .endpoint import RailEndpoint, listener_name, make_hello, route_errors
from .handshake import Handshake, Message, check_compatible
from .inspection import ConnectionMethod
from .lifecycle import NoLink

logger = logging.getLogger("aiordma.cm")

VIA_HINT = 'is an aiordma listener running there, with via="cm" and not "tcp"?'

NO_LISTENER = 8  # reject reason "invalid service ID" (IBTA section 12.6.7.2)
# The embedded device reports this status if the response does not come from a connection manager.
NOT_THIS_PROTOCOL = -errno.EPROTO

# A client with a key sends two requests: the first one gets a challenge, and the second one carries
# a ticket. A third request is needed if the challenge has expired in between, which happens after
# many other clients have been admitted.
TRIES = 3


class CMLink(IdEvents):
    """The connection-manager ID of a connection, from creation to destruction."""

    def __init__(self, events: EventDriver, id: cm.ConnectionId) -> None:
        """Take ownership of `id` and of one reference to `events`."""
        self._on_end: Callable[[str], None] | None = None
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

    def _explained(self, error: ConnectionManagerError | None) -> RDMAError | None:
        return explained(error)

    def established(self, on_end: Callable[[str], None]) -> None:
        """Finish the handshake. `on_end` is called when the peer disconnects or the device is lost.

        If the peer has already disconnected, the call is scheduled with `call_soon`, so that the
        connection can first process the frames that the peer sent before it disconnected.
        """
        self._connected = True
        self._local = self.id.local_address
        self._peer = self.id.peer_address
        self._on_end = on_end
        # Process the events of the handshake that `expect` has not taken. Skip a None, which only
        # told `expect` that the id was closed.
        while self._seen:
            if (event := self._seen.popleft()) is not None:
                asyncio.get_running_loop().call_soon(self._on_event, event)

    def close(self) -> None:
        self._disconnect()


class ChallengedError(ConnectionManagerError):
    """The listener requires a ticket."""

    def __init__(self, challenge: bytes, listener: Hello) -> None:
        super().__init__("the listener asked for a ticket too many times", event="REJECTED")
        self.challenge = challenge
        self.listener = listener


def explained(error: ConnectionManagerError | None) -> RDMAError | None:
    """Return an error with the listener's reason if it sent one, or else `error` with a hint."""
    data = error.private_data if isinstance(error, RejectedError) else b""
    if data.startswith(CHALLENGE_MAGIC):
        return ChallengedError(data[:CHALLENGE_SIZE], Hello.unpack(data[CHALLENGE_SIZE:]))
    if is_missing_key_refusal(data):
        return AuthenticationError(NOT_THE_SAME_KEY)
    if isinstance(error, RejectedError) and (why := unpack_refusal(data)):
        return RejectedError(
            why, reason=error.reason, private_data=error.private_data, event=error.event
        )
    if error is not None and error.status in (NO_LISTENER, NOT_THIS_PROTOCOL):
        add_hint(error, VIA_HINT)
    return error


def parameters(
    endpoint: RailEndpoint, private_data: bytes, peer: Hello | None = None
) -> cm.ConnectionParameters:
    """Return the parameters of a request, or of a reply if `peer` is given.

    A reply limits the number of outstanding reads and atomics to the values in the peer's hello.
    """
    responder, initiator = endpoint.max_dest_rd_atomic, endpoint.max_rd_atomic
    if peer is not None:
        responder = min(responder, peer.max_rd_atomic)
        initiator = min(initiator, peer.max_dest_rd_atomic)
    return cm.ConnectionParameters(
        private_data=private_data,
        responder_resources=responder,
        initiator_depth=initiator,
        retry_count=endpoint.config.retry_count,
    )


def make_endpoint(
    id: cm.ConnectionId, config: Config, security: Security, opener: str
) -> RailEndpoint:
    """Create an endpoint with the queue pair of a resolved id for the connection or listener."""
    assert id.context is not None
    driver = Driver.for_context(id.context, config, opener)
    endpoint = RailEndpoint(driver, config, security)
    try:
        endpoint.create_qp(lambda cq, caps: id.create_qp(driver.pd, cq, None, caps, reserved=True))
        # The connection manager's default timeout is several seconds for each retry, so the device
        # would take half a minute to report that the peer does not respond.
        id.set_ack_timeout(config.ack_timeout)
    except BaseException:
        endpoint.close()
        raise
    return endpoint


async def connect(target: Target) -> Connection:
    """Connect to a numeric address. The caller enforces the timeout."""
    challenge = b""
    for tries_left in reversed(range(TRIES)):
        link = await _resolve(target)
        try:
            if target.security.auth is not None and not challenge:
                await _request_challenge(link, target)
            return await _connect(link, target, challenge)
        except ChallengedError as error:
            check_compatible(target.security, error.listener, target.address)
            if not tries_left:
                raise
            challenge = error.challenge
    raise AssertionError("unreachable")


async def _resolve(target: Target) -> CMLink:
    """Return a link whose id has a resolved address and route."""
    link = CMLink(*make_id(target.devices[0].library, cm.PortSpace.TCP))
    id, config = link.id, target.config
    try:
        if config.type_of_service:
            id.set_tos(config.type_of_service)
        id.resolve_addr(target.address, source=target.source, timeout=config.connect_timeout)
        await link.expect(cm.EventType.ADDR_RESOLVED)
        check_device(id, target.allowed_devices, target.address)
        id.resolve_route(timeout=config.connect_timeout)
        await link.expect(cm.EventType.ROUTE_RESOLVED)
    except BaseException:
        link.release()
        raise
    return link


async def _request_challenge(link: CMLink, target: Target) -> Never:
    """Request a challenge, and raise it as ChallengedError. Takes ownership of `link`."""
    try:
        hello = make_hello(target.config, target.security)
        link.id.connect(cm.ConnectionParameters(private_data=hello.pack()))
        # `expect` raises ChallengedError if the listener requires a key. A listener without a key
        # accepts the request. The event is CONNECT_RESPONSE, because the id has no queue pair.
        event = await link.expect(cm.EventType.CONNECT_RESPONSE)
        check_compatible(target.security, Hello.unpack(event.private_data), target.address)
        raise ProtocolError(
            f"{host_port(target.address)} requires a key, but did not send a challenge"
        )
    finally:
        link.release()


async def _connect(link: CMLink, target: Target, challenge: bytes) -> Connection:
    """Connect, with a ticket for `challenge` if a key is used. Takes ownership of `link`."""
    id, security = link.id, target.security
    handshake = Handshake("cm", security, client=True, address=target.address)
    with ConnectAttempt[RailEndpoint](link) as attempt:
        attempt.take_over(
            make_endpoint(id, target.config, security, target.opener),
            handshake,
            rails=target.will_use_rails,
        )
        attempt.create_connection()
        attempt.post_receives()
        request = handshake.send_bytes()
        if security.auth is not None:
            request += new_ticket(security.auth, challenge, request)
        id.connect(parameters(attempt.endpoint, request))
        event = await link.expect(cm.EventType.ESTABLISHED)
        attempt.connected_by_cm()
        handshake.receive(Message.REPLY, event.private_data)
        handshake.compare()
        return await attempt.start(target.devices)


def check_device(
    id: cm.ConnectionId, allowed_devices: Collection[str] | None, address: Address
) -> None:
    """Raise if the device is not one of the allowed devices or its port is not active."""
    check_device_name(id, allowed_devices, address)
    assert id.context is not None
    with route_errors():  # the connection manager does not check whether the port is up
        active_port(id.context, id.port_num)


class CMListener:
    """A connection-manager listener on one address."""

    def __init__(
        self,
        allowed_devices: Collection[str] | None,
        address: Address,
        backlog: int,
        acceptor: Acceptor,
    ) -> None:
        self.allowed_devices = allowed_devices
        self._acceptor = acceptor
        self._events = RequestDriver.for_library(acceptor.devices[0].library)
        self._id: cm.ConnectionId | None = None
        try:
            self._id = id = self._events.channel.create_id()
            self._events.attach(id, self._on_event)
            id.set_reuseaddr(True)
            if acceptor.config.type_of_service:
                id.set_tos(acceptor.config.type_of_service)
            id.bind_addr(address)
            if id.context is not None:  # None for a wildcard address, which belongs to no device
                check_device_name(id, allowed_devices, address)
            id.listen(backlog)
            self.address = id.local_address or address
        except BaseException:
            self.release()
            raise

    def _on_event(self, event: cm.ConnectionEvent) -> None:
        if event.type is cm.EventType.CONNECT_REQUEST:
            self._acceptor.admit(CMRequest(self, event), time_share=self._events.share)
        elif event.type is cm.EventType.DEVICE_REMOVAL:
            error = event.error()
            assert error is not None
            self._acceptor.fail(error)
        else:
            logger.warning("listener on %s: %s", host_port(self.address), event.type.name)

    def release(self) -> None:
        """Stop listening. Can also be called after the loop has been closed."""
        try:
            if self._id is not None:
                self._events.detach(self._id)
                self._id.close()
        finally:
            self._events.release()


class CMRequest(Request):
    """A connection request that arrived through the connection manager."""

    via: ConnectionMethod = "cm"

    def __init__(self, listener: CMListener, event: cm.ConnectionEvent) -> None:
        self._listener = listener
        self._event = event
        self._id = event.id
        self._handshake: Handshake | None = None  # set once the request has been parsed
        self._attempt = ConnectAttempt[RailEndpoint]()

    def __repr__(self) -> str:
        return f"<connect request to {host_port(self._listener.address)}>"

    @property
    def peer_address(self) -> Address | None:
        return self._id.peer_address

    def check_ticket_or_challenge(self, acceptor: Acceptor) -> bool:
        data, tickets = self._event.private_data, acceptor.tickets
        self._handshake = handshake = Handshake("cm", acceptor.security, client=False)
        handshake.receive(Message.OFFER, data if tickets is None else data[:HELLO_SIZE])
        if tickets is None:
            return True
        # The first request of a client is shorter, because it has no ticket.
        ticket = data[HELLO_SIZE:][:TICKET_SIZE].ljust(TICKET_SIZE, b"\0")
        if handshake.peer.authenticates and tickets.validate(ticket, data[:HELLO_SIZE]):
            return True
        hello = make_hello(acceptor.config, acceptor.security)
        self._reject(tickets.challenge.pack() + hello.pack())
        # Fail only now: the peer needs the hello in the challenge to find the mismatch as well.
        check_compatible(acceptor.security, handshake.peer)
        self._id.close()
        return False

    async def handshake(self, acceptor: Acceptor) -> Connection:
        id, attempt, handshake = self._id, self._attempt, self._handshake
        assert handshake is not None
        peer = handshake.peer
        events = EventDriver.for_library(id.channel.library)
        attempt.link = link = CMLink(events, id)
        id.migrate(events.channel)  # the listener's channel can pause, when its time is used up
        check_device(id, self._listener.allowed_devices, self._listener.address)
        release_place = acceptor.reserve_place()
        attempt.take_over(
            make_endpoint(id, acceptor.config, acceptor.security, listener_name(id.local_address)),
            handshake,
            rails=acceptor.will_use_rails(peer),
        )
        attempt.create_connection(release_place)
        attempt.post_receives()
        id.accept(parameters(attempt.endpoint, handshake.send_bytes(), peer))
        attempt.connected_by_cm()
        await link.expect(cm.EventType.ESTABLISHED)
        handshake.compare()
        return await attempt.start(acceptor.devices)

    def give_up(self, error: BaseException) -> None:
        if not self._attempt.has_connection:
            self._reject(packed_refusal(error))
        if isinstance(self._attempt.link, NoLink):  # otherwise, a CMLink owns the id and closes it
            self._id.close()
        self._attempt.give_up(error)

    def _reject(self, private_data: bytes) -> None:
        try:
            self._id.reject(private_data)
        except (RDMAError, OSError) as failure:
            logger.debug("reject: %s", failure)
