"""Connecting without the connection manager: endpoints exchanged over a TCP socket.

    client -> server   greeting, endpoint, hello      the server makes its queue pair
    server -> client   greeting, endpoint, hello      and connects it, then answers
    client -> server   READY                          the client has connected its own

A server that has no place answers REFUSED and the reason instead of an offer.

Fixed layouts of fixed length, so nothing that a stranger sends makes this side allocate; what is
no greeting of aiordma ends the exchange.  The socket stays open: its end, without a goodbye on the
connection itself, is how the death of the peer is noticed at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from .. import verbs
from .._core.handshake import ENDPOINT_SIZE, HELLO_SIZE, Endpoint, Hello
from .._core.refusal import pack_refusal
from .._loop.driver import Driver, Watch
from .._native import fork
from ..config import Config
from ..errors import AddressError, ProtocolError, RDMAError
from . import kin
from .connection import Connection
from .family import Family
from .half import Half
from .lifecycle import Address, Link, weakly
from .reception import NoPlaceError, Reception
from .security import Security
from .tcp_link import (
    REFUSED,
    TCPLink,
    accepted_link,
    open_link,
    socket_name,
)

logger = logging.getLogger("aiordma.tcp")

GREETING = b"aiordma\x01"
READY = b"ready\x00\x00\x01"
OFFER_SIZE = len(GREETING) + ENDPOINT_SIZE + HELLO_SIZE

# Seconds until a listener tries again when it cannot accept.
ACCEPT_PAUSE = 0.1

# Peers that are taken in one turn of the loop.
ACCEPTS = 64


def offer(half: Half) -> bytes:
    return GREETING + half.endpoint.pack() + half.hello.pack()


async def read_offer(link: TCPLink) -> tuple[Endpoint, Hello]:
    data = await link.read(OFFER_SIZE, GREETING)
    return Endpoint.unpack(data[:ENDPOINT_SIZE]), Hello.unpack(data[ENDPOINT_SIZE:])


async def connect(
    device: verbs.Device,
    address: Address,
    source: Address | None,
    config: Config,
    security: Security,
) -> Connection:
    """Connects to one numeric address.  The caller bounds the time."""
    if config.in_band and security.tls is None:
        asked = await kin.connect(device, address, source, config, security)
        if asked is not None:
            return asked
    link = await open_link(address, source, security)
    end: Link = link
    half: Half | None = None
    try:
        driver = Driver.for_device(device, config.pool_limit, config.polling)
        half = Half(driver, config, security, link.local_address)
        link.write(offer(half))
        connection = half.make()  # while the other side makes its own
        remote, peer = await read_offer(link)
        if remote == half.endpoint:
            raise ProtocolError(f"{link.peer_address} sends back what it is told: an echo server?")
        security.agree(peer)
        half.connect(remote)
        link.write(READY)
        if config.in_band and peer.takes_asks:
            end = member = Family(link).join(0)
            member.watched(weakly(connection._disconnected))
            await connection._start(member, peer, client=True)
            kin.found(member, connection, device, address, source, security)
        else:
            link.established(weakly(connection._disconnected))
            await connection._start(link, peer, client=True)
    except BaseException as error:
        if half is None:
            link.release()
        else:
            half.give_up(end, error)
        raise
    return connection


def listening_socket(address: Address, backlog: int) -> socket.socket:
    """A listening socket; "::" takes IPv4 as well, on the same port, which asyncio's does not."""
    host, port = address
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    try:
        listening = socket.create_server(
            socket_name((host, port)),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=backlog,
            dualstack_ipv6=host == "::",
        )
    except OSError as error:
        raise AddressError(
            f"cannot listen on {host} port {port}: {error}", status=-(error.errno or 0)
        ) from error
    listening.setblocking(False)
    return listening


class TCPAcceptor:
    """Listens on one address and hands finished connections to `deliver`."""

    def __init__(
        self,
        device: verbs.Device,
        address: Address,
        backlog: int,
        config: Config,
        security: Security,
        deliver: Callable[[Connection], None],
    ) -> None:
        self._reception = Reception(device, config, security, deliver)
        self._accepted: set[socket.socket] = set()  # whose handshake has not begun
        self._socket = listening_socket(address, backlog)
        self.address: Address = self._socket.getsockname()[:2]
        self._inode = fork.add_socket(self._socket.fileno())
        self._loop = asyncio.get_running_loop()
        self._watch = Watch(self._socket.fileno(), self._accept)
        self._pause: asyncio.TimerHandle | None = None

    def _accept(self) -> None:
        """Takes the peers that are there; called while there are some."""
        for _ in range(ACCEPTS):
            try:
                peer, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of file descriptors, most likely; it would fail again at once.
                logger.warning("accept on %s port %s: %s", *self.address, error)
                self._watch.close()
                self._pause = self._loop.call_later(ACCEPT_PAUSE, self._resume)
                return
            if self._reception.full:
                logger.info("%s turned away: too many handshakes are under way", address)
                peer.close()
                continue
            peer.setblocking(False)
            self._accepted.add(peer)
            self._reception.begin(self._serve(peer))

    def _resume(self) -> None:
        self._watch = Watch(self._socket.fileno(), self._accept)

    async def _serve(self, peer_socket: socket.socket) -> None:
        self._accepted.discard(peer_socket)
        reception = self._reception
        link: TCPLink | None = None
        end: Link | None = None
        connection: Connection | None = None
        try:
            async with asyncio.timeout(reception.config.handshake_timeout):
                end = link = await accepted_link(peer_socket, reception.security)
                remote, peer = await read_offer(link)
                try:
                    half, connection = reception.take(link.local_address, link.peer_address)
                except NoPlaceError as error:
                    link.write(REFUSED + pack_refusal(str(error)))
                    raise
                half.connect(remote)
                link.write(offer(half))
                reception.security.agree(peer)  # by now the peer has heard what it must know
                await link.read(len(READY), READY)
                if reception.takes_asks:
                    family = Family(link)
                    end = member = family.join(0)
                    member.belongs_to(connection)
                    connection._kin = kin.Answering(
                        reception, family, connection._messages, awaits_ready=False
                    )
                    member.watched(weakly(connection._disconnected))
                else:
                    link.established(weakly(connection._disconnected))
                await connection._start(end, peer, client=False)
        except BaseException as error:
            # The peer, or this machine, failed one handshake: the listener goes on.
            logger.info("exchange with %s failed: %s", link and link.peer_address, error)
            if connection is not None:
                assert end is not None
                connection._give_up(end, error)
            elif link is not None:
                link.release()
            if not isinstance(error, (RDMAError, OSError)):
                raise
        else:
            reception.deliver(connection)

    def release(self) -> None:
        """Listens no more; all there is to do when the loop has been closed."""
        if self._pause is not None:
            self._pause.cancel()
        self._watch.close()
        fork.remove_socket(self._inode)
        self._socket.close()
        self._reception.closed = True

    async def close(self) -> None:
        """Listens no more; exchanges under way are given up."""
        self.release()
        await self._reception.close()
        for accepted in self._accepted:
            accepted.close()
