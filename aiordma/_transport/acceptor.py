"""The accepting side of a listener for all connection methods: admission, handshakes, limits."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from .. import verbs
from .._core.handshake_layout import Hello
from .._core.refusal import pack_refusal
from .._event_loop.shutdown import background
from .._event_loop.time_share import Timed, TimeShare
from ..cm.address import Address
from ..config import Config
from ..errors import (
    AuthenticationError,
    BusyError,
    ConnectionClosedError,
    RDMAError,
    VerbsError,
    cause_text,
    host_port,
)
from . import observation
from .admission_control import (
    FailureLimit,
    FairShare,
    NoRoomError,
    limit_text,
    max_places,
    networks_of,
)
from .auth import Security, new_ticket_validator
from .connection import Connection
from .endpoint import max_rails
from .inspection import ConnectionMethod, OnRequest, inspect_connection, refuse

if TYPE_CHECKING:
    from .._core.admission import TicketValidator

logger = logging.getLogger("aiordma.acceptor")


class ConnectionLimitError(RDMAError):
    """A peer was rejected because of a connection limit. The error text is sent to the peer."""


def refusal_text(error: BaseException) -> str:
    """Return the text that tells the peer why its handshake failed."""
    text = cause_text(error)
    # Name this host, because the peer could mistake a verbs error for a fault of its own device.
    return f"the listener's host failed: {text}" if isinstance(error, VerbsError) else text


def packed_refusal(error: BaseException) -> bytes:
    return pack_refusal(refusal_text(error), key_missing=isinstance(error, AuthenticationError))


class ConnectionLimits:
    """The limits on the connections of one listener, in total and per host."""

    def __init__(self, config: Config) -> None:
        self._max_connections = config.max_connections
        self._max_per_host = config.max_connections_per_host
        self._reserved_places: Counter[str] = Counter()

    def check(self, host: str) -> None:
        """Raise ConnectionLimitError if this host may not have another connection."""
        if (
            self._max_connections is not None
            and self._reserved_places.total() >= self._max_connections
        ):
            raise ConnectionLimitError(
                f"the listener has reached its limit of {self._max_connections} connections "
                f"(set by Config.max_connections)"
            )
        if self._max_per_host is not None and self._reserved_places[host] >= self._max_per_host:
            raise ConnectionLimitError(
                f"the listener has reached its limit of {self._max_per_host} connections from "
                f"{host} (set by Config.max_connections_per_host)"
            )

    def reserve(self, host: str) -> None:
        self.check(host)
        self._reserved_places[host] += 1

    def release(self, host: str) -> None:
        self._reserved_places[host] -= 1
        if not self._reserved_places[host]:
            del self._reserved_places[host]


class Request(Protocol):
    """A peer's connection request. Each connection method implements this protocol."""

    via: ConnectionMethod

    @property
    def peer_address(self) -> Address | None:
        """The address of the peer, or None if it has disconnected and its address is unknown."""

    def check_ticket_or_challenge(self, acceptor: Acceptor) -> bool:
        """Check the request's ticket. If it is missing or invalid, send the peer a challenge.

        A ticket proves that the peer has the key, before this side allocates resources for it.
        Requests that need no ticket, or whose `handshake` checks it, need no check here.

        Returns:
            True if the request can be admitted. False if a challenge was sent: the peer answers it
            with a new request, so this one needs no further handling.

        Raises:
            ProtocolError: If the peer violates the protocol.
            AuthenticationError: If the peer does not have the key.
        """
        return True

    async def handshake(self, acceptor: Acceptor) -> Connection:
        """Run the handshake. Call `Acceptor.reserve_place` before creating the connection."""

    def give_up(self, error: BaseException) -> None:
        """Send the reason to the peer if possible, and release all resources.

        This method is called after a failed handshake, or instead of a handshake. It never raises.
        """


class Place:
    """A peer's place in `ConnectionLimits`. It outlives the Handshake if the peer is admitted."""

    def __init__(self, host: str, limits: ConnectionLimits) -> None:
        self._host = host
        self._limits = limits
        self._reserved = self._ended = False

    def reserve(self) -> None:
        """Reserve the place until `release`. Raises ConnectionLimitError if no place is free."""
        if not self._reserved and not self._ended:
            self._limits.reserve(self._host)
            self._reserved = True

    def release(self) -> None:
        """Release the place after the connection has ended or the handshake has failed."""
        self._ended = True
        if self._reserved:
            self._reserved = False
            self._limits.release(self._host)


@dataclass(eq=False)
class PendingHandshake:
    request: Request
    peer: str | None  # saved because the address may be unknown after a failure
    host: str
    table: FairShare[PendingHandshake]
    place: Place
    task: asyncio.Task[object] | None = None
    begun: bool = False  # a task that is cancelled before that runs no code
    eviction_error: RDMAError | None = None


class Acceptor:
    """The part of a listener that is the same for all connection methods.

    A listener calls `admit` for each peer. `deliver` is called with each connection that
    `on_request` accepts. If the device has failed and no more peers can arrive, the listener calls
    `fail`.
    """

    def __init__(
        self,
        config: Config,
        security: Security,
        devices: tuple[verbs.Device, ...],
        deliver: Callable[[Connection], None],
        fail: Callable[[Exception], None] = lambda _: None,
        on_request: OnRequest | None = None,
    ) -> None:
        self.config = config
        self.security: Security = replace(security, inspects=True) if on_request else security
        self.devices: tuple[verbs.Device, ...] = devices
        self.closed: bool = False
        self.fail = fail
        self._deliver = deliver
        self._on_request = on_request
        self._loop = asyncio.get_running_loop()
        self._limits = ConnectionLimits(config)
        self._failures = FailureLimit(self._loop.time())
        key = security.auth
        self.tickets: TicketValidator | None = (
            new_ticket_validator(key) if key is not None else None
        )
        """Checks the tickets of connection manager requests. None without a key."""
        max_handshakes = max_places(config.max_handshakes)
        self._unknown_peers: FairShare[PendingHandshake] = FairShare(max_handshakes)
        self._in_band: FairShare[PendingHandshake] = FairShare(max_handshakes, trusted=True)
        self._handshakes: dict[asyncio.Task[object], PendingHandshake] = {}

    def admit(
        self, request: Request, *, in_band: bool = False, time_share: TimeShare | None = None
    ) -> None:
        """Start the handshake in a task.

        If the maximum number of handshakes is in progress, an earlier handshake is dropped, or the
        request is rejected.

        Args:
            request: The request of the peer.
            in_band: Whether the request arrived over an existing connection. In-band requests have
                separate places, so that they and unknown peers cannot block each other. If no
                place is free, the peer falls back to a socket.
            time_share: The time share to charge for the handshake's task, if any. The caller must
                charge the time that this call takes.
        """
        table = self._in_band if in_band else self._unknown_peers
        address = request.peer_address
        peer = host_port(address) if address else None
        networks = networks_of(address[0]) if address else ("",)  # one host for all unknown peers
        host = networks[-1]  # the smallest network, which is treated as one host
        began = time_share.now() if time_share is not None else 0.0
        try:
            self._check_open(host, in_band=in_band)
            if not request.check_ticket_or_challenge(self):
                return  # the peer answers the challenge with a new request
            evicted = table.make_room(networks)
        except NoRoomError:
            error = BusyError(f"too many handshakes are in progress ({limit_text(table.limit)})")
            self._give_up(request, peer, error, "rejected")
            return
        except RDMAError as error:
            self._count_failure(host, error)
            self._give_up(request, peer, error, "rejected")
            return
        if evicted is not None:
            limit = limit_text(table.limit)
            why = f"the handshake was dropped to make room for a newer one ({limit})"
            self._evict(evicted, BusyError(why))
        handshake = PendingHandshake(request, peer, host, table, Place(host, self._limits))
        table.add(handshake, networks)
        serving: Coroutine[Any, Any, bool] = self._serve(handshake)
        if time_share is not None:
            serving = Timed(time_share, serving, used=time_share.now() - began)
        handshake.task = task = background(self._loop, serving)
        self._handshakes[task] = handshake
        task.add_done_callback(self._handshakes.pop)

    def will_use_rails(self, peer: Hello) -> bool:
        """Return whether a connection to this peer will have several rails.

        The listener's own devices do not limit the number, because a device may have several rails.
        """
        return peer.rails and max_rails(self.config, self.devices) > 1

    @property
    def handshakes(self) -> int:
        """The number of handshakes in progress."""
        return len(self._handshakes)

    def _check_open(self, host: str, *, in_band: bool) -> None:
        """Check that the listener is open, and that the host has not failed too many handshakes.

        Raises:
            ConnectionClosedError: If the listener is closed.
            BusyError: If too many handshakes of the host have failed.
        """
        if self.closed:
            raise ConnectionClosedError("the listener is closed")
        if in_band or self.security.auth is None:
            return
        wait = self._failures.wait_time(host, self._loop.time())
        if wait:
            if self._failures.mark_reported(host):
                logger.warning(
                    "rejecting handshakes from %s for a while: too many have failed", host
                )
            raise BusyError(
                f"too many handshakes have used a wrong key; try again in {wait:.1f} seconds"
            )

    def _give_up(
        self, request: Request, peer: str | None, error: BaseException, outcome: str
    ) -> None:
        logger.info("%r %s: %r", request, outcome, error)
        observation.connection_failed(peer, error, accepted=True)
        request.give_up(error)

    def _evict(self, handshake: PendingHandshake, error: RDMAError) -> None:
        """Cancel a handshake, and free its places without waiting for its task to end."""
        handshake.eviction_error = error
        handshake.table.remove(handshake)
        handshake.place.release()
        if not handshake.begun:  # otherwise, its task does this
            self._give_up(handshake.request, handshake.peer, error, "dropped")
        assert handshake.task is not None
        handshake.task.cancel()

    async def _serve(self, handshake: PendingHandshake) -> bool:
        """Run a handshake. Returns whether its connection was admitted."""
        handshake.begun = True
        request = handshake.request
        deadline = self._loop.time() + self.config.handshake_timeout
        try:
            try:
                async with asyncio.timeout_at(deadline):
                    connection = await request.handshake(self)
            except TimeoutError as error:
                limit_name = f"Config.handshake_timeout, {self.config.handshake_timeout:g} seconds"
                raise TimeoutError(f"the handshake took longer than {limit_name}") from error
        except BaseException as error:
            self._count_failure(handshake.host, error)
            handshake.place.release()
            self._give_up(request, handshake.peer, handshake.eviction_error or error, "failed")
            if not isinstance(handshake.eviction_error or error, (RDMAError, OSError)):
                raise
            return False
        else:
            if self.security.auth is not None:
                self._failures.record_success(handshake.host)
                handshake.table.remove(handshake)  # new peers can no longer evict it
            admitted = await self._admit_connection(connection, handshake, deadline)
            if admitted:
                connection._begin(accepted=True)
                self._deliver(connection)
            return admitted
        finally:
            handshake.table.remove(handshake)
            handshake.task = None  # the frames of its cancellation error refer to this object

    async def _admit_connection(
        self, connection: Connection, handshake: PendingHandshake, deadline: float
    ) -> bool:
        """Reserve a place, and ask the application to accept the connection.

        Returns whether both have succeeded.

        If a connection limit has been reached, the peer is notified. Any other error means that the
        connection is broken, so the reason cannot be sent.
        """
        on_request, via = self._on_request, handshake.request.via
        try:
            handshake.place.reserve()
            return on_request is None or await inspect_connection(
                connection, via, on_request, deadline
            )
        except (RDMAError, OSError) as error:
            logger.info("%r rejected: %r", handshake.request, error)
            observation.connection_failed(handshake.peer, error, accepted=True)
            if isinstance(error, ConnectionLimitError):
                await refuse(connection, str(error))
            return False

    def _count_failure(self, host: str, error: BaseException) -> None:
        """Count a failure if the peer used a wrong key. Disconnects and timeouts do not count."""
        if self.security.auth is not None and isinstance(error, AuthenticationError):
            self._failures.record_failure(host, self._loop.time())

    def reserve_place(self) -> Callable[[], None]:
        """Reserve a place for the running handshake before it creates the connection.

        If the listener has a key, this method only checks the limits. `reserve_place_of_peer` then
        reserves the place, so that unauthenticated peers do not occupy places.

        Returns:
            A function that frees the place when the connection ends.

        Raises:
            ConnectionLimitError: If a connection limit has been reached.
        """
        handshake = self._current_handshake()
        if self.security.auth is None:
            handshake.place.reserve()
        else:
            self._limits.check(handshake.host)
        return handshake.place.release

    def reserve_place_of_peer(self) -> None:
        """Reserve a place for the peer, which has proved the key if one is required.

        Call this while the handshake can still be rejected. A second call has no effect.

        Raises:
            ConnectionLimitError: If a connection limit has been reached.
        """
        self._current_handshake().place.reserve()

    def _current_handshake(self) -> PendingHandshake:
        return self._handshakes[cast("asyncio.Task[object]", asyncio.current_task())]

    def cancel(self) -> None:
        """Stop admitting peers, and cancel all handshakes without waiting for them to end."""
        self.closed = True
        for task, handshake in list(self._handshakes.items()):
            if not handshake.begun:
                handshake.begun = True  # a second call must not give it up again
                handshake.request.give_up(ConnectionClosedError("the listener is closed"))
            task.cancel()

    async def close(self) -> None:
        """Call `cancel`, and wait until all handshakes have ended."""
        self.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
