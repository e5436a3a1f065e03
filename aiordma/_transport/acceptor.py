"""The accepting side of a listener, for every way of connecting: admission, handshakes, limits."""

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
    """A peer is turned away: the text is the reason that its user reads."""


def refusal_text(error: BaseException) -> str:
    """The text that the peer's user reads of a handshake that this side gave up."""
    text = cause_text(error)
    # A verb that fails here is no verdict on the peer.
    return f"the listener's machine failed: {text}" if isinstance(error, VerbsError) else text


def packed_refusal(error: BaseException) -> bytes:
    return pack_refusal(refusal_text(error), of_key=isinstance(error, AuthenticationError))


class ConnectionLimits:
    """Counts the connections of one listener, and attempts, in all and of each host."""

    def __init__(self, config: Config) -> None:
        self._most = config.max_connections
        self._most_per_host = config.max_connections_per_host
        self._taken: Counter[str] = Counter()

    def check(self, host: str) -> None:
        """ConnectionLimitError if there may be no more of this host."""
        if self._most is not None and self._taken.total() >= self._most:
            raise ConnectionLimitError(
                f"the listener has as many connections as it takes ({self._most}), by its "
                f"Config.max_connections"
            )
        if self._most_per_host is not None and self._taken[host] >= self._most_per_host:
            raise ConnectionLimitError(
                f"the listener has as many connections with {host} as it takes "
                f"({self._most_per_host}), by its Config.max_connections_per_host"
            )

    def take(self, host: str) -> None:
        self.check(host)
        self._taken[host] += 1

    def give_back(self, host: str) -> None:
        self._taken[host] -= 1
        if not self._taken[host]:
            del self._taken[host]


class Request(Protocol):
    """A peer that wants a connection, in one of the ways of connecting."""

    via: Way

    @property
    def peer_address(self) -> Address | None:
        """None: it is gone, and no longer known."""

    def has_ticket(self, acceptor: Acceptor) -> bool:
        """True if the handshake may begin; always for a request whose `handshake` takes the ticket.

        False: the peer has been told to come again with a ticket, and the request is over.
        ProtocolError or AuthenticationError for a peer that is not let in.
        """
        return True

    async def handshake(self, acceptor: Acceptor) -> Connection:
        """Does the whole handshake; `Acceptor.take_place` comes before its connection is made."""

    def give_up(self, error: BaseException) -> None:
        """Tells the peer the reason if that is possible, and gives everything back.

        After a handshake that failed, or instead of one.  Never raises.
        """


class Place:
    """A peer's place among the connections; its connection refers to it, and to no Handshake."""

    def __init__(self, host: str, limits: ConnectionLimits) -> None:
        self._host = host
        self._limits = limits
        self._taken = self._ended = False

    def take(self) -> None:
        """Until `free`; ConnectionLimitError if all are taken."""
        if not self._taken and not self._ended:
            self._limits.take(self._host)
            self._taken = True

    def free(self) -> None:
        """The connection has ended, or is not to be."""
        self._ended = True
        if self._taken:
            self._taken = False
            self._limits.give_back(self._host)


@dataclass(eq=False)
class Handshake:
    """A handshake that is under way."""

    request: Request
    peer: str | None  # it may not be known any more when it fails
    host: str
    share: FairShare[Handshake]
    place: Place
    task: asyncio.Task[object] | None = None
    begun: bool = False
    dropped: RDMAError | None = None


class Acceptor:
    """The part that the listeners of all ways of connecting share.

    They call `admit` for each peer; `deliver` takes the connections that `on_request` does not
    refuse.  They call `fail` when no more peers can come, because the device has failed.
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
        """For requests that do not even hold a socket; None without a key."""
        most = places(config.max_handshakes)
        self._strangers: FairShare[Handshake] = FairShare(most)
        self._in_band: FairShare[Handshake] = FairShare(most, proved=True)
        self._handshakes: dict[asyncio.Task[object], Handshake] = {}

    def admit(
        self, request: Request, *, in_band: bool = False, time: TimeShare | None = None
    ) -> None:
        """Begins the handshake, outside the caller; it uses time of the share.  The caller charges
        the share for the time of this call.

        If there are as many as may be, another one is dropped for it.  `in_band`: it comes over a
        connection of this listener.  Such requests have places of their own, so that they and
        strangers keep each other from nothing; one that finds none uses a socket.
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
            error = BusyError(f"too many handshakes are under way ({setting(share.limit)})")
            self._give_up(request, peer, error, "turned away")
            return
        except RDMAError as error:
            self._count_failure(host, error)
            self._give_up(request, peer, error, "turned away")
            return
        if evicted is not None:
            why = f"it gave way to a newer handshake ({setting(share.limit)})"
            self._evict(evicted, BusyError(why))
        handshake = Handshake(request, peer, host, share, Place(host, self._limits))
        share.add(handshake, networks)
        serving = self._serve(handshake)
        work = serving if time is None else Timed(time, serving, time.now() - began)
        handshake.task = task = background(self._loop, work)
        self._handshakes[task] = handshake
        task.add_done_callback(self._handshakes.pop)

    def takes_rails(self, peer: Hello) -> bool:
        """Whether the connection is to have several rails."""
        return peer.rails and most_rails(self.config, self.devices) > 1

    @property
    def handshakes(self) -> int:
        """The number of those under way."""
        return len(self._handshakes)

    def _check_open(self, host: str, *, in_band: bool) -> None:
        """Raise ConnectionClosedError; BusyError for a host that failed too often without a key."""
        if self.closed:
            raise ConnectionClosedError("the listener is closed")
        if in_band or self.security.auth is None:
            return
        wait = self._failures.wait(host, self._loop.time())
        if wait:
            if self._failures.first_report(host):
                logger.warning("%s is turned away for a while: too many failed handshakes", host)
            raise BusyError(
                f"too many handshakes failed for want of the key: wait {wait:.1f} seconds"
            )

    def _give_up(self, request: Request, peer: str | None, error: BaseException, how: str) -> None:
        logger.info("%r %s: %r", request, how, error)
        observation.failed(peer, error, accepted=True)
        request.give_up(error)

    def _evict(self, handshake: Handshake, error: RDMAError) -> None:
        """Ends a handshake now; its place among the connections is free at once."""
        handshake.dropped = error
        handshake.share.remove(handshake)
        handshake.place.free()
        if not handshake.begun:  # else its task does it
            self._give_up(handshake.request, handshake.peer, error, "dropped")
        assert handshake.task is not None
        handshake.task.cancel()

    async def _serve(self, handshake: Handshake) -> bool:
        """Runs a handshake; True if its connection was admitted."""
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
            # The peer, or this machine, failed one handshake: the listener goes on.
            self._count_failure(handshake.host, error)
            handshake.place.free()
            self._give_up(request, handshake.peer, handshake.dropped or error, "failed")
            if not isinstance(handshake.dropped or error, (RDMAError, OSError)):
                raise
            return False
        else:
            if self.security.auth is not None:
                self._failures.succeeded(handshake.host)
                handshake.share.remove(handshake)  # it gives way to no stranger any more
            admitted = await self._admits(connection, handshake, limit)
            if admitted:
                connection._begin(accepted=True)
                self._deliver(connection)
            return admitted
        finally:
            handshake.share.remove(handshake)
            handshake.task = None  # which keeps the error that cancels it, whose frames have this

    async def _admits(self, connection: Connection, handshake: Handshake, limit: float) -> bool:
        """True if there is a place for the connection, and the application takes it.

        A peer that fails now has no way to be told why.
        """
        on_request, via = self._on_request, handshake.request.via
        try:
            handshake.place.take()
            return on_request is None or await admits(connection, via, on_request, limit)
        except (RDMAError, OSError) as error:
            logger.info("%r turned away: %r", handshake.request, error)
            observation.failed(handshake.peer, error, accepted=True)
            if isinstance(error, ConnectionLimitError):
                await refuse(connection, str(error))
            return False

    def _count_failure(self, host: str, error: BaseException) -> None:
        """A wrong proof.  A peer that has hung up or stayed silent has tried no key."""
        if self.security.auth is not None and isinstance(error, AuthenticationError):
            self._failures.failed(host, self._loop.time())

    def take_place(self) -> Callable[[], None]:
        """For the running handshake, before it makes its connection; what it returns frees the
        place at the connection's end.

        ConnectionLimitError if there are too many connections.  With a key, the peer has a place
        among them once it has proved the key (`proved`): a stranger takes none.
        """
        handshake = self._running()
        if self.security.auth is None:
            handshake.place.take()
        else:
            self._limits.check(handshake.host)
        return handshake.place.free

    def proved(self) -> None:
        """For a running handshake that can still tell its peer that all places are taken.

        ConnectionLimitError if they are.
        """
        self._running().place.take()

    def _running(self) -> Handshake:
        return self._handshakes[cast("asyncio.Task[object]", asyncio.current_task())]

    def cancel(self) -> None:
        """Admits no more peers; gives up the handshakes, in the loop's next iterations."""
        self.closed = True
        for task, handshake in list(self._handshakes.items()):
            if not handshake.begun:
                handshake.begun = True  # a second call gives nothing up again
                handshake.request.give_up(ConnectionClosedError("the listener is closed"))
            task.cancel()

    async def close(self) -> None:
        """As `cancel`, and waits until they are."""
        self.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
