"""The rails of a connection that was given several devices: a queue pair on each of them.

The lead, rail 0, is the queue pair of the handshake, and all frames travel on it.  Further rails
are added to the open connection, each by control messages on the lead:

    connecting side -> other side   RailOffer     it has made a queue pair
    other side -> connecting side   RailAnswer    its partner, connected; or Error
    on the rail itself              a write of no bytes by the connecting side, which has connected
                                    its own; the acknowledgement shows that both work
    connecting side -> other side   RailReady

A rail that breaks is stopped, and the peer told by RailDown, which it answers by the same.  That
costs the connection nothing; where the lead breaks another rail becomes it (failover.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from .. import verbs
from .._core import protocol
from .._core.handshake import Endpoint
from .._datapath.rail import SendQueue
from .._datapath.session import Session
from ..cm.address import Address
from ..config import Config
from ..errors import (
    ConnectionBrokenError,
    ProtocolError,
    RDMAError,
    RequestRefusedError,
    cause_text,
    host_port,
)
from .admission_control import Bucket
from .auth import Security
from .endpoint import AddressedEndpoint, host_part
from .keep_alive import Probe

if TYPE_CHECKING:
    from .._datapath.protocols import Owner

logger = logging.getLogger("aiordma.rails")

# Offers that a peer may make at once, and how many more each second: what answers one makes a queue
# pair, and may open a device.
OFFER_BURST, OFFER_RATE = protocol.MAX_RAILS, 1.0

Shown = Literal["lead", "up", "connecting", "down"]


class RailState(Enum):
    """State of a rail, with what it means."""

    OFFERED = "its queue pair exists, and the peer's answer is awaited"
    CONNECTING = "both queue pairs are connected, and the first write by it is awaited"
    UP = "it carries what the connection gives it"
    ABANDONED = "it has broken here before the peer has answered"
    STOPPED = "it is stopped here, the peer was told, and its answer is awaited"
    DOWN = "it is over at both sides"

    @property
    def shown(self) -> Shown:
        """The state as users see it."""
        if self is RailState.UP:
            return "up"
        return "connecting" if self in (RailState.OFFERED, RailState.CONNECTING) else "down"


class RailEvent(Enum):
    """An event in the life of a rail."""

    ANSWERED = "the peer has a queue pair for it"
    REFUSED = "the peer has none"
    READY = "a write by it was acknowledged: here, or at the peer, which says so"
    BROKE = "it failed here"
    TOLD_DOWN = "the peer says that it is stopped there"


_S, _E = RailState, RailEvent

TRANSITIONS: Mapping[tuple[RailState, RailEvent], RailState] = MappingProxyType(
    {
        (_S.OFFERED, _E.ANSWERED): _S.CONNECTING,
        (_S.OFFERED, _E.REFUSED): _S.DOWN,
        (_S.OFFERED, _E.BROKE): _S.ABANDONED,
        (_S.ABANDONED, _E.ANSWERED): _S.STOPPED,
        (_S.ABANDONED, _E.REFUSED): _S.DOWN,
        (_S.CONNECTING, _E.READY): _S.UP,
        (_S.CONNECTING, _E.BROKE): _S.STOPPED,
        (_S.CONNECTING, _E.TOLD_DOWN): _S.DOWN,
        (_S.UP, _E.BROKE): _S.STOPPED,
        (_S.UP, _E.TOLD_DOWN): _S.DOWN,
        (_S.STOPPED, _E.READY): _S.STOPPED,  # they have crossed
        (_S.STOPPED, _E.TOLD_DOWN): _S.DOWN,
    }
)
"""The next state.  What is missing, a peer must not bring about."""


@dataclass(frozen=True, slots=True)
class RailStatus:
    """A rail as it was when `Connection.rails` was asked for."""

    device: str
    """The name of this side's device."""
    state: Shown
    """"lead": carries the messages; "up", "connecting", or "down"."""
    since: float
    """The time at which it came into that state, by `time.monotonic`."""
    error: BaseException | None
    """The reason why it is down."""
    bytes_sent: int
    """Bytes of messages to the peer: for the lead all of them, since the peer reads long ones."""
    bytes_received: int
    """Bytes of messages that it has carried from the peer."""


@dataclass(eq=False, slots=True)
class Rail:
    """One queue pair of a connection, besides the lead."""

    device: str
    state: RailState
    since: float
    number: int = 0
    """0: it was not even offered, and is down."""
    endpoint: AddressedEndpoint | None = None
    queue: SendQueue | None = None
    """None, as the endpoint: it is down."""
    offer_id: int = 0
    """The request id of the offer of this side."""
    error: BaseException | None = None
    bytes_sent: int = 0
    bytes_received: int = 0

    def release(self) -> None:
        """Destroys the queue pair, not from within a drain; again does nothing."""
        queue, self.queue = self.queue, None
        endpoint, self.endpoint = self.endpoint, None
        if queue is not None:
            self.bytes_received = queue.bytes_read
            queue.close()
        if endpoint is not None:
            endpoint.close()


@dataclass(eq=False)
class Rails:
    """The rails of a connection besides its lead.  `control` takes what the peer says of them.

    It does not know the connection, which ends it by `end` and then `close`.
    """

    owner: Owner
    messages: Session
    config: Config
    security: Security
    devices: tuple[verbs.Device, ...]
    home: str
    """The name of the device of the handshake's queue pair, the first lead."""
    peer: Address | None
    client: bool
    """Whether this side connects, and so offers."""
    clock: Callable[[], float]
    rails: list[Rail] = field(default_factory=list)
    latest: int = 0
    """The number of the latest rail that was offered."""
    offers: Bucket = field(init=False)
    lead: Rail | None = None
    """None: the queue pair of the handshake."""
    lead_is_down: bool = False
    """It broke, and no other one has become the lead."""
    home_error: BaseException | None = None
    """Why the queue pair of the handshake is down."""
    home_since: float = 0.0
    on_up: Callable[[], object] = lambda: None
    """Called for a rail that has come up while there is no lead."""

    def __post_init__(self) -> None:
        self.offers = Bucket(OFFER_BURST, OFFER_RATE, self.clock())
        self.loop = asyncio.get_running_loop()

    # ---- both sides ----------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        return self.messages.closing or self.messages.ended or self.messages.peer_has_left

    def _tell(self, message: protocol.Message) -> None:
        if not self.messages.ended and not self.messages.peer_has_left:
            self.messages.controls.send(message)

    def _advance(self, rail: Rail, event: RailEvent) -> None:
        """ProtocolError for what cannot be, which is the peer's fault."""
        following = TRANSITIONS.get((rail.state, event))
        if following is None:
            raise ProtocolError(
                f"rail {rail.number} is {rail.state.name}, and the peer has {event.name}"
            )
        if following.shown != rail.state.shown:
            rail.since = self.clock()
            logger.info("rail %d on %s is %s", rail.number, rail.device, following.shown)
        before, rail.state = rail.state, following
        if rail.queue is not None and before is not following:
            if following is _S.UP:
                self.messages.add_rail(rail.queue, rail.number)
            elif before is _S.UP:
                self.messages.remove_rail(rail.queue)

    def _new(self, rail: Rail) -> None:
        """Takes it in; of those that are over, one of each device is kept, for its error."""
        self.rails = [
            it for it in self.rails if it.device != rail.device or it.state is not _S.DOWN
        ]
        self.rails.append(rail)

    def _make(self, device: verbs.Device, to: verbs.GID | None) -> AddressedEndpoint:
        return AddressedEndpoint((device,), self.config, self.security, None, to, more_receives=1)

    def _connect(self, endpoint: AddressedEndpoint, remote: Endpoint) -> None:
        # With a key the peer has proved it, and may name any address.
        proved = self.security.auth is not None
        endpoint.connect(remote, None if proved else self.peer, proved=proved)

    def control(self, message: protocol.Message) -> bool:
        """False for a message about something else.  ProtocolError for a wrong one."""
        match message:
            case protocol.RailOffer() if not self.client:
                self._offered(message)
            case protocol.RailAnswer() if self.client:
                self._answered(message)
            case protocol.RailReady() if not self.client:
                self._advance(self._rail(message.rail), _E.READY)
            case protocol.RailDown():
                self._told_down(self._rail(message.rail))
            case protocol.Error():
                return self._refused(message)
            case _:
                return False
        return True

    def _rail(self, number: int) -> Rail:
        for rail in self.rails:
            if rail.number == number:
                return rail
        raise ProtocolError(f"the peer speaks of rail {number}, which is none of this connection")

    def hear(self) -> None:
        """A queue pair has failed: stops the rails whose that is.  Not from within a drain."""
        for rail in self.rails:
            if rail is self.lead and self.lead_is_down:
                continue
            if (
                rail.queue is not None
                and rail.queue.failed
                and not rail.queue.suspended
                and rail.state.shown != "down"
            ):
                assert rail.queue.error is not None
                self._broke(rail, rail.queue.error)

    def _broke(self, rail: Rail, error: BaseException) -> None:
        rail.error = error.with_traceback(None)  # whose frames have this
        self._advance(rail, _E.BROKE)
        rail.release()
        logger.warning("rail %d on %s broke: %s", rail.number, rail.device, cause_text(error))
        if rail.state is _S.STOPPED:
            self._tell(protocol.RailDown(0, rail.number))

    def lead_broke(self, queue: SendQueue) -> None:
        """The lead has broken, and another rail is to take over.  Not from within a drain."""
        assert queue.error is not None
        self.lead_is_down = True
        if self.lead is not None:
            self._broke(self.lead, queue.error)
            return
        self.home_error, self.home_since = queue.error.with_traceback(None), self.clock()
        logger.warning("rail 0 on %s broke: %s", self.home, cause_text(queue.error))
        self.messages.remove_rail(queue)
        queue.close()

    def lead_on(self, rail: Rail) -> None:
        """The rail is the lead from now on."""
        if rail.state is _S.CONNECTING:  # the peer has found that it works
            self._advance(rail, _E.READY)
        self.lead, self.lead_is_down, rail.since = rail, False, self.clock()

    def _told_down(self, rail: Rail) -> None:
        answers = rail.state is _S.STOPPED
        self._advance(rail, _E.TOLD_DOWN)
        if not answers:
            rail.error = ConnectionBrokenError("the peer has stopped this rail")
            self.loop.call_soon(self._stopped, rail)

    def _stopped(self, rail: Rail) -> None:
        rail.release()
        self._tell(protocol.RailDown(0, rail.number))

    def end(self, error: BaseException) -> None:
        """The connection has ended, and with it the rails: nothing more is posted."""
        for rail in self.rails:
            if rail.state.shown != "down":
                rail.since, rail.error = self.clock(), error
            rail.state = _S.DOWN
            if rail.queue is not None:
                rail.queue.fail(error)

    def close(self) -> None:
        """Gives everything back."""
        self.on_up = lambda: None  # which refers to this
        for rail in self.rails:
            rail.release()

    def status(self) -> list[RailStatus]:
        return [
            RailStatus(
                rail.device,
                "lead" if rail is self.lead and rail.state is _S.UP else rail.state.shown,
                rail.since,
                rail.error,
                rail.bytes_sent,
                rail.bytes_received if rail.queue is None else rail.queue.bytes_read,
            )
            for rail in self.rails
        ]

    def _prepare(self, queue: SendQueue, number: int) -> None:
        if self.messages.failover is not None:
            self.messages.prepare_rail(queue, number)

    # ---- the connecting side -------------------------------------------------------------

    def begin(self) -> None:
        """The connection is open, and its user gets it: offers a rail for each further device."""
        if not self.client or self._over:
            return
        to = verbs.GID.from_ip(host_part(self.peer)) if self.peer is not None else None
        for device in self.devices:
            if device.name != self.home:
                self._offer(device, to)

    def _offer(self, device: verbs.Device, to: verbs.GID | None) -> None:
        rail = Rail(device.name, _S.OFFERED, self.clock())
        self._new(rail)
        try:
            rail.endpoint = endpoint = self._make(device, to)
        except (RDMAError, OSError, ValueError) as error:
            logger.warning("no rail on %s: %s", device.name, cause_text(error))
            rail.state, rail.error = _S.DOWN, error.with_traceback(None)
            return
        rail.queue = endpoint.make_queue(self.owner)
        self.latest += 1
        rail.number, rail.offer_id = self.latest, self.messages.controls.new_request_id()
        self._tell(protocol.RailOffer(rail.offer_id, rail.number, endpoint.endpoint.pack()))

    def _answered(self, answer: protocol.RailAnswer) -> None:
        rail = self._rail(answer.rail)
        if rail.offer_id != answer.request_id:
            raise ProtocolError(f"the peer answers another request with rail {rail.number}")
        remote = Endpoint.unpack(answer.endpoint)
        self._advance(rail, _E.ANSWERED)
        if rail.state is _S.STOPPED:
            self._tell(protocol.RailDown(0, rail.number))
        else:
            self.loop.call_soon(self._bring_up, rail, remote)

    def _bring_up(self, rail: Rail, remote: Endpoint) -> None:
        if rail.endpoint is None or rail.queue is None or rail.state is not _S.CONNECTING:
            return  # it has ended meanwhile
        try:
            self._connect(rail.endpoint, remote)
            self._prepare(rail.queue, rail.number)
        except (RDMAError, OSError) as error:
            self._broke(rail, error)
        else:
            rail.queue.post(Probe(partial(self._acknowledged, rail)))

    def _acknowledged(self, rail: Rail) -> None:
        if rail.state is _S.CONNECTING:
            self._advance(rail, _E.READY)
            self._tell(protocol.RailReady(0, rail.number))
            if self.lead_is_down:
                self.on_up()

    def _refused(self, error: protocol.Error) -> bool:
        for rail in self.rails:
            if rail.offer_id == error.request_id and rail.state in (_S.OFFERED, _S.ABANDONED):
                self._advance(rail, _E.REFUSED)
                peer = host_port(self.peer) if self.peer is not None else ""
                rail.error = rail.error or RequestRefusedError(error.code, error.text, peer=peer)
                self.loop.call_soon(rail.release)
                return True
        return False

    # ---- the other side ------------------------------------------------------------------

    def _offered(self, offer: protocol.RailOffer) -> None:
        if offer.rail != self.latest + 1:
            raise ProtocolError(
                f"the peer offers rail {offer.rail}, and the next one is {self.latest + 1}"
            )
        self.latest = offer.rail
        remote, now = Endpoint.unpack(offer.endpoint), self.clock()
        if self.offers.wait(now):
            self._refuse(offer, protocol.ErrorCode.BUSY, "too many rails were offered of late")
            return
        self.offers.take(now)
        self.loop.call_soon(self._answer, offer, remote)  # to open a device takes a while

    def _refuse(self, offer: protocol.RailOffer, code: protocol.ErrorCode, why: str) -> None:
        self._tell(protocol.Error(offer.request_id, code, why))

    def _answer(self, offer: protocol.RailOffer, remote: Endpoint) -> None:
        alive = [rail for rail in self.rails if rail.state is not _S.DOWN]
        if self._over:
            self._refuse(offer, protocol.ErrorCode.CANCELLED, "the connection is being closed")
        elif len(alive) + 1 >= protocol.MAX_RAILS:
            self._refuse(offer, protocol.ErrorCode.QUOTA, f"there are {len(alive) + 1} rails")
        else:
            try:
                endpoint = self._partner(remote, {self.home, *(rail.device for rail in alive)})
            except (RDMAError, OSError, ValueError) as error:
                logger.info("rail %d is refused: %s", offer.rail, cause_text(error))
                self._refuse(offer, protocol.ErrorCode.INTERNAL, cause_text(error))
                return
            queue = endpoint.make_queue(self.owner)
            self._prepare(queue, offer.rail)
            device = endpoint.driver.context.name
            self._new(Rail(device, _S.CONNECTING, self.clock(), offer.rail, endpoint, queue))
            self._tell(protocol.RailAnswer(offer.request_id, offer.rail, endpoint.endpoint.pack()))

    def _partner(self, remote: Endpoint, used: set[str]) -> AddressedEndpoint:
        """A queue pair that is connected to the peer's: on a device that the connection does not
        use, if one has a route; else on one that it uses.

        Raises the error of the first one.
        """
        to = verbs.GID(remote.gid) if remote.is_global else None
        errors: list[Exception] = []
        for device in sorted(self.devices, key=lambda device: device.name in used):
            try:
                endpoint = self._make(device, to)
                try:
                    self._connect(endpoint, remote)
                except BaseException:
                    endpoint.close()
                    raise
            except (RDMAError, OSError, ValueError) as error:
                errors.append(error)
            else:
                return endpoint
        try:
            raise errors[0]
        finally:
            errors.clear()  # their frames have this one
