"""The rails of a connection with several devices: one queue pair on each of them.

The lead, rail 0, is the queue pair of the handshake, and all frames travel on it. Further rails are
added to the open connection with control messages on the lead::

    connecting side -> other side   RailOffer     the endpoint of a new queue pair
    other side -> connecting side   RailAnswer    the endpoint of a connected queue pair; or Error
    on the rail itself              a zero-byte write by the connecting side, once its queue pair is
                                    connected; the acknowledgement shows that the rail works
    connecting side -> other side   RailReady

If a rail breaks, this side stops it and sends RailDown, and the peer responds with RailDown. The
connection continues. If the lead breaks, another rail takes its place (failover.py). The connecting
side later offers another rail on the same device, either after a delay or as soon as the device's
port becomes active.

A drain dispatches completions to the queue pairs of an event loop (`drain_once` in
_datapath/work_queue.pyx). Functions that destroy a queue pair must not be called from within a
drain, because the drain may still use the queue pair afterwards.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from .. import verbs
from .._core import protocol
from .._core.fields import MAX_RAILS
from .._core.handshake_layout import Endpoint
from .._datapath.rail import SendQueue
from .._datapath.session import Session
from .._datapath.work_queue import RailObserver
from ..cm.address import Address
from ..config import Config
from ..errors import (
    ConnectionBrokenError,
    DeviceEventError,
    ProtocolError,
    RDMAError,
    RequestRefusedError,
    RetryExceededError,
    RNRRetryExceededError,
    RouteError,
    WorkCompletionError,
    cause_text,
)
from . import observation
from .admission_control import TokenBucket
from .auth import Security
from .endpoint import AddressedEndpoint, host_part, max_rails, open_driver
from .keep_alive import KeepAlive, Probe, start_keep_alive
from .rail_status import NO_TRANSFERS, PublicState, RailStatus, Transfers

if TYPE_CHECKING:
    from .._datapath.protocols import Owner
    from .._event_loop.driver import Driver

logger = logging.getLogger("aiordma.rails")

# Rate limit for a peer's offers (burst size, offers per second). Answering an offer creates a queue
# pair and may open a device.
OFFER_BURST, OFFER_RATE = MAX_RAILS, 1.0

# First and longest delay in seconds before another rail is offered on a device. The delay doubles
# after each failure.
FIRST_DELAY, MAX_DELAY = 0.25, 5.0

# These errors mean that this side cannot create a rail, because of the device, the route to the
# peer, or a lack of memory.
CREATION_ERRORS = (RDMAError, OSError, ValueError, MemoryError)


class RailState(Enum):
    """The state of a rail. Each value is a description of the state."""

    OFFERED = "the queue pair exists; waiting for the peer's response"
    CONNECTING = "both queue pairs are connected; waiting for the first write on the rail"
    UP = "the rail carries traffic of the connection"
    ABANDONED = "the rail broke on this side before the peer responded"
    STOPPED = "the rail is stopped on this side; waiting for the peer's confirmation"
    DOWN = "the rail is stopped on both sides"

    @property
    def public_state(self) -> PublicState:
        """The state as shown to users."""
        if self is RailState.UP:
            return "up"
        return "connecting" if self in (RailState.OFFERED, RailState.CONNECTING) else "down"


class RailEvent(Enum):
    """An event that can change a rail's state. Each value is a description of the event."""

    ANSWERED = "the peer has a queue pair for the rail"
    REFUSED = "the peer has no queue pair for the rail"
    READY = "the first write on the rail was acknowledged, on this side or at the peer"
    BROKE = "the rail failed on this side"
    DOWN = "the peer reports that the rail is stopped on its side"


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
        (_S.CONNECTING, _E.DOWN): _S.DOWN,
        (_S.UP, _E.BROKE): _S.STOPPED,
        (_S.UP, _E.DOWN): _S.DOWN,
        (_S.STOPPED, _E.READY): _S.STOPPED,  # the two messages have crossed
        (_S.STOPPED, _E.DOWN): _S.DOWN,
    }
)
"""The next state. The peer must not cause any other transition."""

AWAITED_STEPS: Mapping[RailState, str] = MappingProxyType(
    {
        _S.OFFERED: "responded to the offer of this rail",
        _S.CONNECTING: "shown that this rail works",
        _S.STOPPED: "confirmed that it has stopped this rail",
    }
)
"""The step that the peer must complete within a time limit, by state.

If the time limit expires, the rail breaks. A STOPPED rail cannot break again. Instead, it breaks
the connection if writes are waiting for the peer's message.
"""


Handlers = Mapping[type, Callable[..., bool | None]]

_UNKNOWN_CAUSE = protocol.RailCause.UNKNOWN


def cause_of(error: BaseException) -> protocol.RailCause:
    """Return the cause to report to the peer when `error` stops a rail."""
    causes = protocol.RailCause
    match error:
        case RetryExceededError():
            return causes.UNANSWERED
        case RNRRetryExceededError():
            return causes.NOT_READY
        case DeviceEventError(event="PORT_ERR"):
            return causes.PORT
        case DeviceEventError(event="DEVICE_FATAL"):
            return causes.DEVICE
        case DeviceEventError() | WorkCompletionError():
            return causes.QUEUE_PAIR
        case ConnectionBrokenError():
            return causes.SILENCE
    return causes.OTHER


@dataclass(eq=False, slots=True)
class Rail:
    """One rail of a connection. A rail that is down has no queue pair."""

    device: str
    state: RailState
    state_since: float
    number: int = -1
    """The number of the rail, or -1 if it was never offered and is down."""
    endpoint: AddressedEndpoint | None = None
    """The endpoint, or None if the rail is down.

    It is also None for the rail of the handshake, whose endpoint belongs to the connection.
    """
    queue: SendQueue | None = None
    """The send queue, or None if the rail is down."""
    offer_id: int = 0
    """The request id of this side's offer."""
    error: BaseException | None = None
    error_at: float = 0.0
    broke_at: float = 0.0
    """The time of the first error since the rail was last up."""
    bytes_received: int = 0
    bytes_sent: int = 0
    """The number of message bytes sent while the rail was the lead."""
    closed_transfers: Transfers = NO_TRANSFERS
    """The transfers of closed queue pairs on this device."""
    keep_alive: KeepAlive | None = None
    """The keep-alive timer since the rail came up, if the connection uses one."""
    left_by_peer: bool = False
    """Whether the peer left this rail while it was the lead. RailDown later reports the cause."""
    ready_expected: bool = False
    """Whether the peer's Resume moved this rail to UP before RailReady arrived."""
    step_timer: asyncio.Handle | None = None
    """The timer for the peer's next step (AWAITED_STEPS)."""

    @property
    def total_bytes_received(self) -> int:
        """The number of message bytes received over rails on this device. Thread-safe."""
        queue = self.queue
        return self.bytes_received + (queue.bytes_read if queue is not None else 0)

    @property
    def transfers(self) -> Transfers:
        """The byte counts of all one-sided operations on this device. Thread-safe."""
        closed, queue = self.closed_transfers, self.queue
        return closed if queue is None else closed.plus(queue)

    def release(self) -> None:
        """Destroy the queue pair. A second call has no effect.

        Do not call this from within a drain.
        """
        if self.keep_alive is not None:
            self.keep_alive.stop()
        queue, self.queue = self.queue, None
        endpoint, self.endpoint = self.endpoint, None
        with ExitStack() as steps:  # runs all steps in reverse order, even if one fails
            if endpoint is not None:
                steps.callback(endpoint.close)
            if queue is not None:
                self.bytes_received += queue.bytes_read
                self.closed_transfers = self.closed_transfers.plus(queue)
                steps.callback(queue.close)


class RailSlot:
    """A device that the connecting side wants to use for a rail.

    `offer` offers the peer a rail on this device, and `call_later` schedules a call in the event
    loop. The device stays open to report port events.
    """

    def __init__(
        self,
        device: verbs.Device,
        offer: Callable[[RailSlot], None],
        call_later: Callable[[float, Callable[[], None]], asyncio.Handle],
    ) -> None:
        self.device = device
        self._offer = offer
        self._call_later = call_later
        self._retry_delay = FIRST_DELAY
        self._stable_at = math.inf
        """The time from which the current rail counts as working."""
        self._retry_timer: asyncio.Handle | None = None
        """The timer for the next attempt while there is no rail."""
        self._driver: Driver | None = None
        self._subscription: object = None

    def watch_device(self, config: Config, opener: str) -> None:
        """Open the device and subscribe to its events, if it is not open yet. Raises on failure."""
        if self._driver is None:
            self._driver = open_driver((self.device,), config, None, opener)
            self._subscription = self._driver.subscribe(self._on_event)

    def on_rail_up(self, now: float) -> None:
        """Record that a rail is up. If it stays up for MAX_DELAY, the retry delay is reset."""
        self._stable_at = now + MAX_DELAY

    def retry_later(self, now: float) -> None:
        """Retry after a delay, because the device's rail has ended or could not be created."""
        if now >= self._stable_at:
            self._retry_delay = FIRST_DELAY
        self._stable_at = math.inf
        self._retry_timer = self._call_later(self._retry_delay, self._retry)
        self._retry_delay = min(2 * self._retry_delay, MAX_DELAY)

    def _retry(self) -> None:
        self._retry_timer = None
        self._offer(self)

    def _on_event(self, event: verbs.AsyncEvent) -> None:
        """Retry without delay when a port has become active. Release a device that has failed."""
        if event.type is verbs.EventType.DEVICE_FATAL:
            # The next offer opens the device with a new driver. Release this driver later, because
            # it is dispatching events.
            asyncio.get_running_loop().call_soon(self._release_driver)
        elif event.type is verbs.EventType.PORT_ACTIVE:
            self._retry_delay = FIRST_DELAY
            if self._retry_timer is not None:
                self._retry_timer.cancel()
                self._retry()

    def _release_driver(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.unsubscribe(self._subscription)
            driver.release()

    def close(self) -> None:
        """Stop offering rails, and release the device."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._release_driver()


@dataclass(eq=False)
class Rails:
    """The rails of a connection. This base class is common to both sides.

    `handle_control` processes the peer's messages. When the connection ends, it calls `end` and
    then `close`.
    """

    owner: Owner
    messages: Session
    observers: tuple[RailObserver, ...]
    """The parts of the connection that follow its rails, in the order in which they are called."""
    clock: Callable[[], float]
    config: Config
    security: Security
    devices: tuple[verbs.Device, ...]
    peer: Address | None
    call_later: Callable[[float, Callable[[], None]], asyncio.Handle]
    rails: list[Rail] = field(default_factory=list)
    latest_number: int = 0
    """The number of the latest rail offered."""
    max_rails: int = field(init=False)
    """The maximum number of rails at a time, including the lead."""
    lead_rail: Rail = field(init=False)
    """The lead. Initially, it is the rail of the handshake, rail 0."""
    broken_lead_rail: Rail = field(init=False)
    """The latest lead that broke."""
    step_timeout_field = "handshake_timeout"
    """The Config field that limits the time for each of the peer's steps to bring up a rail."""

    def __post_init__(self) -> None:
        self.max_rails = max_rails(self.config, self.devices)
        self._loop = asyncio.get_running_loop()
        lead = self.messages.lead
        self.lead_rail = Rail(lead.qp.context.name, _S.UP, self.clock(), 0, None, lead)
        self.rails.append(self.lead_rail)
        self.broken_lead_rail = self.lead_rail

    @property
    def _is_closing(self) -> bool:
        return self.messages.outbox.closing or self.messages.ended or self.messages.peer_has_left

    def _send(self, message: protocol.Message) -> None:
        if not self.messages.ended and not self.messages.peer_has_left:
            self.messages.controls.send(message)

    def _advance(self, rail: Rail, event: RailEvent) -> None:
        """Apply an event to a rail. Raises ProtocolError if the rail's state does not allow it."""
        following = TRANSITIONS.get((rail.state, event))
        if following is None:
            raise ProtocolError(
                f"unexpected {event.name} from the peer for rail {rail.number}, which is "
                f"{rail.state.name}"
            )
        if following.public_state != rail.state.public_state:
            rail.state_since = self.clock()
            if following is not _S.UP or rail.error is None:
                self._log(rail, f"is {following.public_state}", logging.INFO)
            else:
                outage = rail.state_since - rail.broke_at
                self._log(rail, f"is up again, {outage:.3g} s after it broke", logging.WARNING)
        if following is not rail.state:
            rail.state = following
            self._restart_step_timer(rail)
        if following is _S.UP:
            self._on_rail_up(rail)

    def _log(self, rail: Rail, text: str, level: int) -> None:
        name = f"rail {rail.number}" if rail.number >= 0 else "a rail"
        logger.log(level, "%s to %s on %s %s", name, self.owner.name, rail.device, text)

    def _record_error(self, rail: Rail, text: str, error: BaseException) -> None:
        """Record an error, and log it as a warning if the rail is up or had no error before.

        `text` says in the log what the error has done to the rail, such as "broke".
        """
        already_failing = rail.error is not None and rail.state is not _S.UP
        level = logging.INFO if already_failing else logging.WARNING
        self._log(rail, f"{text}: {cause_text(error)}", level)
        rail.error_at = self.clock()
        if not already_failing:
            rail.broke_at = rail.error_at
        rail.error = error.with_traceback(None)  # its traceback refers to this object
        if rail.state in (_S.CONNECTING, _S.UP):
            observation.rail_broke(rail.device)

    def _restart_step_timer(self, rail: Rail) -> None:
        """Stop the rail's timer, and restart it if the peer has to take the next step."""
        if rail.step_timer is not None:
            rail.step_timer.cancel()
        if rail.state in AWAITED_STEPS:
            name = "keep_alive_timeout" if rail.state is _S.STOPPED else self.step_timeout_field
            seconds: float = getattr(self.config, name)
            error = ConnectionBrokenError(
                f"the peer has not {AWAITED_STEPS[rail.state]} within {seconds:g} seconds "
                f"(Config.{name})"
            )
            rail.step_timer = self.call_later(
                seconds, partial(self._on_step_timeout, rail, rail.state, error)
            )

    def _on_step_timeout(self, rail: Rail, state: RailState, error: ConnectionBrokenError) -> None:
        self.messages.lead.driver.poll()  # the message may have arrived while this loop was busy
        if rail.state is not state:
            return
        if state is _S.STOPPED:
            # The chunks of a stopped rail are held until the peer confirms the stop. Until then,
            # they cannot be sent on another rail, because a late packet on the stopped rail could
            # overwrite newer bytes.
            if self.messages.outbox.stripes.has_held_chunks(rail.number):
                self.messages.lead.connection_broke(error)
        else:
            self._fail_rail(rail, error)

    def _on_rail_up(self, rail: Rail) -> None:
        """Start to use a rail for long messages and for access to shared memory."""
        assert rail.queue is not None
        assert rail.endpoint is not None
        for observer in self.observers:
            observer.rail_up(rail.queue)
        rail.keep_alive = start_keep_alive(rail.queue, rail.endpoint.driver.timers, self.config)

    def _add_rail(self, rail: Rail) -> None:
        """Add a rail.

        If a rail on the same device is down, replace it, but keep its error and counts.
        """
        for i, old in enumerate(self.rails):
            if old.device == rail.device and old.state is _S.DOWN:
                rail.error, rail.error_at, rail.broke_at = old.error, old.error_at, old.broke_at
                rail.bytes_sent, rail.bytes_received = old.bytes_sent, old.bytes_received
                rail.closed_transfers = old.transfers
                self.rails[i] = rail
                return
        self.rails.append(rail)

    def _create_rail(
        self, state: RailState, number: int, endpoint: AddressedEndpoint, offer_id: int = 0
    ) -> Rail:
        queue = endpoint.make_queue(self.owner)
        queue.number = number
        queue.count_in(self.messages.outbox.counts)
        device = endpoint.driver.context.name
        rail = Rail(device, state, self.clock(), number, endpoint, queue, offer_id)
        self._add_rail(rail)
        self._restart_step_timer(rail)
        return rail

    @property
    def _opener(self) -> str:
        """The connection, as described in warnings about devices that it has opened."""
        return f"the connection with {self.owner.peer_name}"

    def _create_endpoint(
        self, device: verbs.Device, peer_gid: verbs.GID | None
    ) -> AddressedEndpoint:
        # The extra receive is for the peer's Resume (`Session.prepare_rail`).
        return AddressedEndpoint(
            (device,),
            self.config,
            self.security,
            None,
            peer_gid,
            opener=self._opener,
            extra_receives=1,
        )

    def _connect_endpoint(self, endpoint: AddressedEndpoint, remote: Endpoint) -> None:
        # The peer was authenticated on the lead. If it has proved a key, it may use any address.
        has_key = self.security.auth is not None
        endpoint.connect_qp(remote, None if has_key else self.peer, peer_authenticated=True)

    def handle_control(self, message: protocol.Message) -> bool:
        """Process a message. Returns False if it does not concern the rails.

        Raises:
            ProtocolError: If the message is invalid.
        """
        handler = self.handlers.get(type(message))
        # A handler returns False if the message does not concern the rails, and None otherwise.
        return handler is not None and handler(self, message) is not False

    def _find_rail(self, number: int) -> Rail:
        for rail in self.rails:
            if rail.number == number:
                return rail
        raise ProtocolError(
            f"the peer sent a message about rail {number}, which this connection does not have"
        )

    def stop_failed(self) -> None:
        """Stop all rails whose queue pair has failed. Do not call this from within a drain."""
        for rail in self.rails:
            queue = rail.queue
            if (
                queue is None
                or not queue.failed
                or queue.suspended  # the lead, which `Failover` stops
                or rail.state.public_state == "down"
            ):
                continue
            assert queue.error is not None
            self._fail_rail(rail, queue.error)

    def _fail_rail(self, rail: Rail, error: BaseException) -> None:
        """Stop a rail that has failed on this side, and tell the peer."""
        self._record_error(rail, "broke", error)
        self._advance(rail, _E.BROKE)
        self._release(rail)
        # If the rail is ABANDONED instead, the peer has not answered the offer yet. RailDown may
        # only follow an answer, so `_on_answer` sends it.
        if rail.state is _S.STOPPED:
            self._send_rail_down(rail, error)

    def _send_rail_down(self, rail: Rail, error: BaseException | None) -> None:
        cause = _UNKNOWN_CAUSE if rail.left_by_peer or error is None else cause_of(error)
        self._send(protocol.RailDown(cause, rail.number))

    def stop_lead(self) -> None:
        """Stop the broken lead before another rail takes over.

        Do not call this from within a drain.
        """
        lead = self.lead_rail
        assert lead.queue is not None
        assert lead.queue.error is not None
        # Only the lead's bytes are derived from the connection's counts. Store them, because this
        # rail will no longer be the lead. `Rail.release` adds those that the queue has read.
        lead.bytes_sent, received = self._lead_bytes()
        lead.bytes_received = received - lead.queue.bytes_read
        self._fail_rail(lead, lead.queue.error)

    def probe(self) -> None:
        """Probe all rails that are up, to detect whether the peer has failed."""
        for rail in self.rails:
            if rail.state is _S.UP and rail.queue is not None and rail.queue.free:
                rail.queue.post_checked(Probe(lambda: None))

    def set_lead(self, rail: Rail) -> None:
        """Make `rail` the lead in place of one that broke."""
        if rail.state is _S.CONNECTING:
            # The peer's Resume has arrived on this rail before its RailReady, so the rail works.
            self._advance(rail, _E.READY)
            rail.ready_expected = True
        observation.lead_moved(self.lead_rail.device)
        self.broken_lead_rail, self.lead_rail, rail.state_since = self.lead_rail, rail, self.clock()
        for other in self.rails:  # restart their timers, because the peer needs a lead to send
            self._restart_step_timer(other)

    def log_lead_change(self, retransmissions: int) -> None:
        """Log that the peer uses the new lead, and the number of items to retransmit."""
        took = 1e3 * (self.clock() - self.broken_lead_rail.broke_at)
        text = (
            f"is the new lead, {took:.3g} ms after {self.broken_lead_rail.device} broke; "
            f"retransmitting {retransmissions} frames and requests"
        )
        self._log(self.lead_rail, text, logging.WARNING)

    def _on_rail_down(self, message: protocol.RailDown) -> None:
        """Stop a rail that the peer has stopped, or release one whose stop the peer confirms."""
        rail = self._find_rail(message.rail)
        if rail is self.lead_rail and rail.state is _S.UP:
            raise ProtocolError("the peer has stopped the lead rail")
        must_confirm = rail.state is not _S.STOPPED  # otherwise, this side has sent its RailDown
        cause = protocol.rail_cause_text(message.request_id)  # the field holds the cause, not an id
        if must_confirm:
            text = f"the peer has stopped this rail{': ' if cause else ''}{cause}"
            self._record_error(rail, "is down", ConnectionBrokenError(text))
        elif rail.left_by_peer and cause:
            rail.error = ConnectionBrokenError(f"{rail.error}: {cause}")
            self._log(rail, f"broke at the peer: {cause}", logging.WARNING)
        self._advance(rail, _E.DOWN)
        self._loop.call_soon(partial(self._release_ended, rail, confirm=must_confirm))

    def _release_ended(self, rail: Rail, *, confirm: bool) -> None:
        """Release a rail that has ended on both sides. If `confirm`, send RailDown to the peer."""
        self._release(rail)
        self.messages.outbox.stripes.release_held_chunks(rail.number)
        if confirm:
            self._send(protocol.RailDown(_UNKNOWN_CAUSE, rail.number))

    def _release(self, rail: Rail) -> None:
        """Release a rail. Do not call this from within a drain.

        Move the queue pair to ERR before closing its memory windows. Otherwise, a READ by the peer
        would fail with an access error and break the connection.
        """
        if (queue := rail.queue) is not None:
            assert rail.error is not None
            queue.fail(rail.error)
            with suppress(RDMAError, OSError):  # the device has failed
                queue.qp.to_error()
            for observer in self.observers:
                observer.rail_removed(queue)
        rail.release()

    def end(self, error: BaseException) -> None:
        """Stop all rails, because the connection has ended. Their queues post no more work."""
        for rail in self.rails:
            if rail.state.public_state != "down":
                rail.state_since, rail.error = self.clock(), error
                rail.error_at = rail.state_since
            rail.state = _S.DOWN
            self._restart_step_timer(rail)
            if rail.queue is not None:
                rail.queue.fail(error)

    def close_queues(self) -> None:
        """Destroy the queue pairs before the session releases the memory that they use."""
        with ExitStack() as steps:
            for rail in self.rails:
                if rail.queue is not None:
                    steps.callback(rail.queue.close)

    def close(self) -> None:
        with ExitStack() as steps:
            for rail in self.rails:
                steps.callback(rail.release)

    def _lead_bytes(self) -> tuple[int, int]:
        """Return the number of message bytes that the lead has sent and received.

        These are the connection's counts minus those of the other rails.
        """
        counts = self.messages.outbox.counts
        others = [it for it in self.rails if it is not self.lead_rail]
        sent = counts.bytes_sent - sum(rail.bytes_sent for rail in others)
        # Rails count the bytes of a message when they arrive, but the connection counts them when
        # the user receives the message. The difference can therefore be negative.
        received = counts.bytes_received - sum(rail.total_bytes_received for rail in others)
        return sent, max(0, received)

    def status(self) -> list[RailStatus]:
        """Return the status of all rails. Thread-safe."""
        lead, lead_bytes = self.lead_rail, self._lead_bytes()
        statuses = []
        for rail in list(self.rails):
            sent, received = (
                lead_bytes if rail is lead else (rail.bytes_sent, rail.total_bytes_received)
            )
            is_lead_up = rail is lead and rail.state is _S.UP
            status = RailStatus(
                device=rail.device,
                state="lead" if is_lead_up else rail.state.public_state,
                since=rail.state_since,
                error=rail.error,
                bytes_sent=sent,
                bytes_received=received,
                error_at=rail.error_at,
                **rail.transfers._asdict(),
            )
            statuses.append(status)
        return statuses

    def begin(self) -> None:
        """Do nothing. `OfferingRails` overrides this to offer rails once the connection is open."""

    handlers: ClassVar[Handlers] = {protocol.RailDown: _on_rail_down}
    """The handler for each message of the peer."""


@dataclass(eq=False)
class OfferingRails(Rails):
    """The rails of the connecting side."""

    step_timeout_field = "connect_timeout"

    slots: dict[str, RailSlot] = field(default_factory=dict)
    """The slots by device name."""
    waiting_slots: list[RailSlot] = field(default_factory=list)
    """Slots for which the peer has no room until another rail ends."""

    def begin(self) -> None:
        """Offer a rail on each further device, up to the maximum number."""
        others = [device for device in self.devices if device.name != self.lead_rail.device]
        for device in others[: self.max_rails - 1]:
            self._offer(self._add_slot(device))

    def _add_slot(self, device: verbs.Device) -> RailSlot:
        self.slots[device.name] = slot = RailSlot(device, self._offer, self.call_later)
        return slot

    def _on_rail_up(self, rail: Rail) -> None:
        super()._on_rail_up(rail)
        if (slot := self.slots.get(rail.device)) is not None:
            slot.on_rail_up(self.clock())

    def stop_lead(self) -> None:
        """Stop the lead, but first add a slot for its device, so that rails are offered on it."""
        for device in self.devices:
            if device.name == self.lead_rail.device and device.name not in self.slots:
                with suppress(RDMAError, OSError):  # the next offer tries again
                    self._add_slot(device).watch_device(self.config, self._opener)
        super().stop_lead()

    def _release_ended(self, rail: Rail, *, confirm: bool) -> None:
        super()._release_ended(rail, confirm=confirm)
        if self._is_closing or (slot := self.slots.get(rail.device)) is None:
            return
        self.waiting_slots.append(slot)
        # The end of a rail makes room at the peer, so all waiting slots retry. If the peer has
        # refused this rail because it had no room, the slot waits until another rail ends.
        error = rail.error
        peer_is_full = (
            isinstance(error, RequestRefusedError) and error.code == protocol.ErrorCode.QUOTA
        )
        if not peer_is_full:
            while self.waiting_slots:
                self.waiting_slots.pop(0).retry_later(self.clock())

    def close(self) -> None:
        with ExitStack() as steps:
            for each in self.slots.values():
                steps.callback(each.close)
            steps.callback(super().close)

    def _offer(self, slot: RailSlot) -> None:
        if self._is_closing:
            return
        name = slot.device.name
        try:
            slot.watch_device(self.config, self._opener)
            peer_gid = verbs.GID.from_ip(host_part(self.peer)) if self.peer is not None else None
            endpoint = self._create_endpoint(slot.device, peer_gid)
        except CREATION_ERRORS as error:
            rail = next((rail for rail in self.rails if rail.device == name), None)
            if rail is None:
                self._add_rail(rail := Rail(name, _S.DOWN, self.clock()))
            # An earlier rail on this device keeps its `state_since`.
            self._record_error(rail, "cannot be created", error)
            slot.retry_later(self.clock())
            return
        self.latest_number += 1
        offer_id = self.messages.controls.new_request_id()
        self._create_rail(_S.OFFERED, self.latest_number, endpoint, offer_id)
        self._send(protocol.RailOffer(offer_id, self.latest_number, endpoint.endpoint.pack()))

    def _on_answer(self, answer: protocol.RailAnswer) -> None:
        rail = self._find_rail(answer.rail)
        if rail.offer_id != answer.request_id:
            raise ProtocolError(
                f"the peer sent a response for rail {rail.number} with an unknown request number"
            )
        remote = Endpoint.unpack(answer.endpoint)
        self._advance(rail, _E.ANSWERED)
        if rail.state is _S.STOPPED:  # it broke on this side before the answer arrived
            self._send_rail_down(rail, rail.error)
        else:
            self._loop.call_soon(self._bring_up, rail, remote)

    def _bring_up(self, rail: Rail, remote: Endpoint) -> None:
        """Connect a rail that the peer has accepted, and check with a first write that it works."""
        if rail.endpoint is None or rail.queue is None or rail.state is not _S.CONNECTING:
            return  # it has ended in the meantime
        try:
            self._connect_endpoint(rail.endpoint, remote)
            self.messages.prepare_rail(rail.queue)
        except CREATION_ERRORS as error:
            self._fail_rail(rail, error)
        else:
            rail.queue.post(Probe(partial(self._on_probe_acknowledged, rail)))

    def _on_probe_acknowledged(self, rail: Rail) -> None:
        """Report RailReady to the peer, because the first write on the rail was acknowledged."""
        if rail.state is _S.CONNECTING:
            # The transition to UP sends memory keys for the rail. They must follow the RailReady.
            self._send(protocol.RailReady(0, rail.number))
        if rail.state is _S.CONNECTING:  # otherwise, sending has ended the connection
            self._advance(rail, _E.READY)
            if self.lead_rail.state is not _S.UP:  # the lead broke and has not been replaced yet
                self.messages.failover.on_rail_up()

    def _on_refusal(self, error: protocol.Error) -> bool:
        """Handle the refusal of an offer. Returns False if the error is not about an offer."""
        for rail in self.rails:
            if rail.offer_id == error.request_id and rail.state in (_S.OFFERED, _S.ABANDONED):
                if rail.state is _S.OFFERED:
                    peer = self.messages.lead.peer
                    refusal = RequestRefusedError(error.code, error.text, peer=peer)
                    self._record_error(rail, "is refused", refusal)
                self._advance(rail, _E.REFUSED)
                self._loop.call_soon(partial(self._release_ended, rail, confirm=False))
                return True
        return False

    handlers: ClassVar[Handlers] = {
        **Rails.handlers,
        protocol.RailAnswer: _on_answer,
        protocol.Error: _on_refusal,
    }


@dataclass(eq=False)
class AnsweringRails(Rails):
    """The rails of the accepting side."""

    offer_limit: TokenBucket = field(
        default_factory=lambda: TokenBucket(OFFER_BURST, OFFER_RATE, 0)
    )

    def _on_ready(self, ready: protocol.RailReady) -> None:
        rail = self._find_rail(ready.rail)
        expected, rail.ready_expected = rail.ready_expected, False
        if not expected:
            self._advance(rail, _E.READY)

    def _on_offer(self, offer: protocol.RailOffer) -> None:
        """Validate an offer and apply the rate limit. `_answer` then creates the rail."""
        if offer.rail != self.latest_number + 1:
            raise ProtocolError(
                f"the peer offered rail {offer.rail}, but rail {self.latest_number + 1} is next"
            )
        self.latest_number = offer.rail
        remote, now = Endpoint.unpack(offer.endpoint), self.clock()
        if self.offer_limit.wait_time(now):
            self._refuse(
                offer, protocol.ErrorCode.BUSY, "too many rails were offered in a short time"
            )
            return
        self.offer_limit.take(now)
        self._loop.call_soon(self._answer, offer, remote)  # opening a device takes a while

    def _refuse(self, offer: protocol.RailOffer, code: protocol.ErrorCode, why: str) -> None:
        if code == protocol.ErrorCode.QUOTA:
            logger.info("rejecting a rail offered by %s: %s", self.owner.peer_name, why)
        self._send(protocol.Error(offer.request_id, code, why))

    def _answer(self, offer: protocol.RailOffer, remote: Endpoint) -> None:
        """Create the rail that the peer has offered, or refuse the offer."""
        alive = [rail for rail in self.rails if rail.state is not _S.DOWN]
        if self._is_closing:
            self._refuse(offer, protocol.ErrorCode.CANCELLED, "the connection is being closed")
        elif len(alive) >= self.max_rails:
            text = (
                f"the connection already has {len(alive)} rails (Config.max_rails of the listener)"
            )
            self._refuse(offer, protocol.ErrorCode.QUOTA, text)
        else:
            try:
                endpoint = self._create_connected_endpoint(remote, {rail.device for rail in alive})
            except CREATION_ERRORS as error:
                self._refuse(offer, protocol.ErrorCode.INTERNAL, cause_text(error))
                return
            rail = self._create_rail(_S.CONNECTING, offer.rail, endpoint)
            failure: Exception | None = None
            try:
                assert rail.queue is not None
                self.messages.prepare_rail(rail.queue)
            except CREATION_ERRORS as error:
                failure = error
            # Answer even after a failure, because RailDown may only follow an answer.
            self._send(protocol.RailAnswer(offer.request_id, offer.rail, endpoint.endpoint.pack()))
            if failure is not None and rail.state is _S.CONNECTING:  # else the connection has ended
                self._fail_rail(rail, failure)

    def _create_connected_endpoint(
        self, remote: Endpoint, used_devices: set[str]
    ) -> AddressedEndpoint:
        """Create a queue pair and connect it to the peer's.

        Unused devices are tried first. If one of them fails but is likely to recover, the devices
        in use are not tried, because a second rail on them could not move to the recovered device
        later. The peer will offer a rail again. A device is likely to recover if its port is down,
        or if it has had a rail before. On failure, the first error is raised.
        """
        peer_gid = verbs.GID(remote.gid) if remote.is_global else None
        had_rail = {rail.device for rail in self.rails}
        errors: list[Exception] = []
        recovery_likely = False
        for device in sorted(self.devices, key=lambda device: device.name in used_devices):
            if recovery_likely and device.name in used_devices:
                break
            try:
                endpoint = self._create_endpoint(device, peer_gid)
                try:
                    self._connect_endpoint(endpoint, remote)
                except BaseException:
                    endpoint.close()
                    raise
            except CREATION_ERRORS as error:
                errors.append(error)
                port_is_down = isinstance(error, RouteError) and error.errno == errno.ENETDOWN
                if port_is_down or device.name in had_rail:
                    recovery_likely = True
            else:
                return endpoint
        try:
            raise errors[0]
        finally:
            errors.clear()  # their tracebacks refer to this frame

    handlers: ClassVar[Handlers] = {
        **Rails.handlers,
        protocol.RailOffer: _on_offer,
        protocol.RailReady: _on_ready,
    }
