"""The accepting side of a listener for all connection methods: admission, handshakes, limits."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

from .. import verbs
from .._core.handshake import Hello
from .._core.refusal import pack_refusal
from .._loop.shutdown import background
from .._loop.time_share import Timed, TimeShare
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
from .admission_control import FailureLimit, FairShare, NoRoomError, networks_of, places, setting
from .auth import Security, new_ticket_office
from .connection import Connection
from .endpoint import most_rails
from .inspection import OnRequest, Way, admits, refuse

if TYPE_CHECKING:
    from .._core.admission import TicketOffice

logger = logging.getLogger("aiordma.acceptor")


class ConnectionLimitError(RDMAError):
    """A peer was rejected because of a limit. The text is the reason that its user sees."""


def refusal_text(error: BaseException) -> str:
    """Return the text that the peer's user sees when this side gives up a handshake."""
    text = cause_text(error)
    # A verb that fails on this host says nothing about the peer.
    return f"the listener's host failed: {text}" if isinstance(error, VerbsError) else text


def packed_refusal(error: BaseException) -> bytes:
    return pack_refusal(refusal_text(error), of_key=isinstance(error, AuthenticationError))


class ConnectionLimits:
    """Counters for the connections and attempts of one listener, in total and per host."""

    def __init__(self, config: Config) -> None:
        self._most = config.max_connections
        self._most_per_host = config.max_connections_per_host
        self._taken: Counter[str] = Counter()

    def check(self, host: str) -> None:
        """Raise ConnectionLimitError if this host may not have another connection."""
        if self._most is not None and self._taken.total() >= self._most:
            raise ConnectionLimitError(
                f"the listener has reached its limit of {self._most} connections "
                f"(set by Config.max_connections)"
            )
        if self._most_per_host is not None and self._taken[host] >= self._most_per_host:
            raise ConnectionLimitError(
                f"the listener has reached its limit of {self._most_per_host} connections from "
                f"{host} (set by Config.max_connections_per_host)"
            )

    def take(self, host: str) -> None:
        self.check(host)
        self._taken[host] += 1

    def give_back(self, host: str) -> None:
        self._taken[host] -= 1
        if not self._taken[host]:
            del self._taken[host]


class Request(Protocol):
    """A peer that requests a connection with one of the connection methods."""

    via: Way

    @property
    def peer_address(self) -> Address | None:
        """The address of the peer, or None if it has disconnected and its address is unknown."""

    def has_ticket(self, acceptor: Acceptor) -> bool:
        """Return whether the handshake may begin.

        If False, the peer has been asked to come back with a ticket, and this request is done. It
        is always True for a request whose `handshake` checks the ticket.

        Raises:
            ProtocolError: If the peer violates the protocol.
            AuthenticationError: If the peer does not have the key.
        """
        return True

    async def handshake(self, acceptor: Acceptor) -> Connection:
        """Run the whole handshake, calling `Acceptor.take_place` before creating the connection."""

    def give_up(self, error: BaseException) -> None:
        """Tell the peer the reason if possible, and release everything.

        This is called after a failed handshake, or instead of a handshake. It never raises.
        """


class Place:
    """A peer's place among the connections. The connection refers to it, but not to a Handshake."""

    def __init__(self, host: str, limits: ConnectionLimits) -> None:
        self._host = host
        self._limits = limits
        self._taken = self._ended = False

    def take(self) -> None:
        """Take the place until `free`. Raises ConnectionLimitError if all are taken."""
        if not self._taken and not self._ended:
            self._limits.take(self._host)
            self._taken = True

    def free(self) -> None:
        """Free the place, because the connection has ended or will not be created."""
        self._ended = True
        if self._taken:
            self._taken = False
            self._limits.give_back(self._host)


@dataclass(eq=False)
class Handshake:
    """A handshake in progress."""

    request: Request
    peer: str | None  # kept, because it may be unknown when the handshake fails
    host: str
    share: FairShare[Handshake]
    place: Place
    task: asyncio.Task[object] | None = None
    begun: bool = False
    dropped: RDMAError | None = None


class Acceptor:
    """The part that the listeners of all connection methods share.

    A listener calls `admit` for each peer. `deliver` gets the connections that `on_request`
    accepts. If the device has failed and no more peers can arrive, the listener calls `fail`.
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
        self.tickets: TicketOffice | None = new_ticket_office(key) if key is not None else None
        """Checks tickets before a request even gets a socket; None without a key."""
        most = places(config.max_handshakes)
        self._strangers: FairShare[Handshake] = FairShare(most)
        self._in_band: FairShare[Handshake] = FairShare(most, proved=True)
        self._handshakes: dict[asyncio.Task[object], Handshake] = {}

    def admit(
        self, request: Request, *, in_band: bool = False, time: TimeShare | None = None
    ) -> None:
        """Start the handshake in a task.

        If the maximum number of handshakes is in progress, one of them is dropped.

        Args:
            request: The request of the peer.
            in_band: Whether it arrived over a connection of this listener. These requests have
                their own places, so that they and unknown peers cannot block each other. If no
                place is free, the peer uses a socket.
            time: The share of time that the handshake uses. The caller charges it for this call.
        """
        share = self._in_band if in_band else self._strangers
        address = request.peer_address
        peer = host_port(address) if address else None
        networks = networks_of(address[0]) if address else ("",)
        host = networks[-1]
        began = time.now() if time is not None else 0.0
        try:
            self._check_open(host, in_band=in_band)
            if not request.has_ticket(self):
                return
            evicted = share.make_room(networks)
        except NoRoomError:
            error = BusyError(f"too many handshakes are in progress ({setting(share.limit)})")
            self._give_up(request, peer, error, "rejected")
            return
        except RDMAError as error:
            self._count_failure(host, error)
            self._give_up(request, peer, error, "rejected")
            return
        if evicted is not None:
            why = f"the handshake was dropped to make room for a newer one ({setting(share.limit)})"
            self._evict(evicted, BusyError(why))
        handshake = Handshake(request, peer, host, share, Place(host, self._limits))
        share.add(handshake, networks)
        serving = self._serve(handshake)
        work = serving if time is None else Timed(time, serving, time.now() - began)
        handshake.task = task = background(self._loop, work)
        self._handshakes[task] = handshake
        task.add_done_callback(self._handshakes.pop)

    def takes_rails(self, peer: Hello) -> bool:
        """Return whether the connection will have several rails."""
        return peer.rails and most_rails(self.config, self.devices) > 1

    @property
    def handshakes(self) -> int:
        """The number of handshakes in progress."""
        return len(self._handshakes)

    def _check_open(self, host: str, *, in_band: bool) -> None:
        """Raise if the listener is closed, or if the host failed too often to prove the key.

        Raises:
            ConnectionClosedError: If the listener is closed.
            BusyError: If too many handshakes of the host failed.
        """
        if self.closed:
            raise ConnectionClosedError("the listener is closed")
        if in_band or self.security.auth is None:
            return
        wait = self._failures.wait(host, self._loop.time())
        if wait:
            if self._failures.first_report(host):
                logger.warning(
                    "rejecting handshakes from %s for a while: too many have failed", host
                )
            raise BusyError(
                f"too many handshakes have used a wrong key; try again in {wait:.1f} seconds"
            )

    def _give_up(self, request: Request, peer: str | None, error: BaseException, how: str) -> None:
        logger.info("%r %s: %r", request, how, error)
        observation.failed(peer, error, accepted=True)
        request.give_up(error)

    def _evict(self, handshake: Handshake, error: RDMAError) -> None:
        """End a handshake now, and free its place among the connections immediately."""
        handshake.dropped = error
        handshake.share.remove(handshake)
        handshake.place.free()
        if not handshake.begun:  # otherwise, its task gives it up
            self._give_up(handshake.request, handshake.peer, error, "dropped")
        assert handshake.task is not None
        handshake.task.cancel()

    async def _serve(self, handshake: Handshake) -> bool:
        """Run a handshake. Returns whether its connection was admitted."""
        handshake.begun = True
        request = handshake.request
        limit = self._loop.time() + self.config.handshake_timeout
        try:
            try:
                async with asyncio.timeout_at(limit):
                    connection = await request.handshake(self)
            except TimeoutError as error:
                limited = f"Config.handshake_timeout, {self.config.handshake_timeout:g} seconds"
                raise TimeoutError(f"the handshake took longer than {limited}") from error
        except BaseException as error:
            # The peer or this machine has failed one handshake, and the listener continues.
            self._count_failure(handshake.host, error)
            handshake.place.free()
            self._give_up(request, handshake.peer, handshake.dropped or error, "failed")
            if not isinstance(handshake.dropped or error, (RDMAError, OSError)):
                raise
            return False
        else:
            if self.security.auth is not None:
                self._failures.succeeded(handshake.host)
                handshake.share.remove(handshake)  # it can no longer be evicted for a stranger
            admitted = await self._admits(connection, handshake, limit)
            if admitted:
                connection._begin(accepted=True)
                self._deliver(connection)
            return admitted
        finally:
            handshake.share.remove(handshake)
            handshake.task = None  # the frames of its cancellation error refer to this object

    async def _admits(self, connection: Connection, handshake: Handshake, limit: float) -> bool:
        """Return whether there is a place for the connection and the application accepts it.

        If the peer fails at this point, it cannot be told why.
        """
        on_request, via = self._on_request, handshake.request.via
        try:
            handshake.place.take()
            return on_request is None or await admits(connection, via, on_request, limit)
        except (RDMAError, OSError) as error:
            logger.info("%r rejected: %r", handshake.request, error)
            observation.failed(handshake.peer, error, accepted=True)
            if isinstance(error, ConnectionLimitError):
                await refuse(connection, str(error))
            return False

    def _count_failure(self, host: str, error: BaseException) -> None:
        """Count a wrong proof. A peer that disconnects or stays silent has not tried a key."""
        if self.security.auth is not None and isinstance(error, AuthenticationError):
            self._failures.failed(host, self._loop.time())

    def take_place(self) -> Callable[[], None]:
        """Take a place for the running handshake, before it creates its connection.

        With a key, the peer only gets the place when it has proved the key (`proved`), so that
        unknown peers take no places.

        Returns:
            A function that frees the place when the connection ends.

        Raises:
            ConnectionLimitError: If there are too many connections.
        """
        handshake = self._running()
        if self.security.auth is None:
            handshake.place.take()
        else:
            self._limits.check(handshake.host)
        return handshake.place.free

    def proved(self) -> None:
        """Take the place for a peer that has proved the key and can still be told of a refusal.

        Raises:
            ConnectionLimitError: If there are too many connections.
        """
        self._running().place.take()

    def _running(self) -> Handshake:
        return self._handshakes[cast("asyncio.Task[object]", asyncio.current_task())]

    def cancel(self) -> None:
        """Stop admitting peers, and cancel all handshakes. They end in the next loop iterations."""
        self.closed = True
        for task, handshake in list(self._handshakes.items()):
            if not handshake.begun:
                handshake.begun = True  # a second call must not give it up again
                handshake.request.give_up(ConnectionClosedError("the listener is closed"))
            task.cancel()

    async def close(self) -> None:
        """Stop as `cancel` does, and wait until the handshakes have ended."""
        self.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
