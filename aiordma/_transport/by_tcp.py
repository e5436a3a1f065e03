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
from errno import ECONNREFUSED
from functools import partial

from .. import inherited, verbs
from .._core.handshake import ENDPOINT_SIZE, HELLO_SIZE, Endpoint, Hello
from .._core.refusal import REFUSAL_SIZE, pack_refusal, unpack_refusal
from ..config import Config
from ..driver import Driver
from ..errors import AddressError, ProtocolError, RDMAError, RejectedError, UnreachableError
from ..mr_pool import REMOTE_RIGHTS
from .connection import Connection
from .life import Address, weakly
from .places import Places
from .security import Security
from .side import RETRIES, Side

logger = logging.getLogger("aiordma.tcp")

GREETING = b"aiordma\x01"
READY = b"ready\x00\x00\x01"
REFUSED = b"refused\x01"
OFFER_SIZE = len(GREETING) + ENDPOINT_SIZE + HELLO_SIZE

# IBTA clause 12.6.7.2, as by the connection manager.
REJECTED_BY_APPLICATION = 28

# Seconds until a listener tries again when it cannot accept.
ACCEPT_PAUSE = 0.1


def address_of(name: tuple[str, int] | tuple[str, int, int, int] | None) -> Address | None:
    """Host and port; IPv4 as such, also on a socket that takes both.  None: already reset."""
    if not name:
        return None
    host = name[0]
    return host.removeprefix("::ffff:") if "." in host else host, name[1]


def socket_name(address: Address) -> tuple[str, int] | tuple[str, int, int, int]:
    """For `bind` and `connect`, which want the interface of a link-local address apart."""
    host, _, interface = address[0].partition("%")
    if not interface:
        return address
    scope = int(interface) if interface.isdecimal() else socket.if_nametoindex(interface)
    return host, address[1], 0, scope


class TCPLink:
    """The socket of a connection, from its making to its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.Task[None] | None = None
        self._inode = inherited.add(writer.get_extra_info("socket").fileno())
        self._local = address_of(writer.get_extra_info("sockname"))
        self._peer = address_of(writer.get_extra_info("peername"))

    @property
    def local_address(self) -> Address | None:
        return self._local

    @property
    def peer_address(self) -> Address | None:
        return self._peer

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        try:
            await self._writer.drain()
        except OSError as error:
            raise self._broken_off(error) from error

    async def read(self, size: int, greeting: bytes) -> bytes:
        """`size` bytes that begin with `greeting`; wrong ones are refused as soon as seen."""
        try:
            start = await self._reader.readexactly(len(greeting))
            if start == greeting:
                return await self._reader.readexactly(size - len(greeting))
            said = await self._reader.readexactly(REFUSAL_SIZE) if start == REFUSED else b""
        except asyncio.IncompleteReadError as error:
            raise ProtocolError(
                f"{self._peer} ended the exchange after {len(error.partial)} bytes"
            ) from error
        except OSError as error:
            raise self._broken_off(error) from error
        if start == REFUSED:
            raise refusal(said)
        raise ProtocolError(f"{self._peer} does not speak aiordma's exchange: it said {start!r}")

    def _broken_off(self, error: OSError) -> ProtocolError:
        return ProtocolError(f"{self._peer} broke the exchange off: {error}")

    def established(self, on_end: Callable[[str], None]) -> None:
        """The exchange is done; from now on `on_end` hears of the socket's end."""
        self._watch = self._loop.create_task(self._watch_end(on_end))

    async def _watch_end(self, on_end: Callable[[str], None]) -> None:
        try:
            data = await self._reader.read(1)
            reason = "spoke after the exchange" if data else "is gone without a goodbye"
        except OSError as error:
            reason = f"is gone: {error}"
        on_end(f"the peer {reason} (the socket that the endpoints were exchanged on)")

    def close(self) -> None:
        if self._watch is not None and not self._loop.is_closed():
            self._watch.cancel()

    def release(self) -> None:
        inherited.remove(self._inode)
        if not self._loop.is_closed():  # else the socket goes with its transport
            self._writer.close()


def refusal(data: bytes) -> RejectedError | ProtocolError:
    """What a listener that has turned us away has said."""
    why = unpack_refusal(data)
    if why is None:
        return ProtocolError(f"a refusal without a reason: {data[:8]!r}")
    why = why or "the connection was rejected"
    return RejectedError(why, reason=REJECTED_BY_APPLICATION, private_data=data, event="")


def make_connection(driver: Driver, config: Config, security: Security) -> tuple[Side, Connection]:
    side = Side(driver, config, authenticates=security.auth is not None)
    try:
        side.create_qp(lambda cq, caps: driver.pd.create_qp(cq, cq, caps, reserved=True))
        return side, Connection(side, config, security)
    except BaseException:
        side.close()
        raise


def local_endpoint(side: Side, address: Address | None) -> Endpoint:
    """The endpoint by the GID of the address that the socket uses, else the best GID there is."""
    assert side.qp is not None
    context = side.driver.context
    try:
        gid = context.find_gid(address[0].partition("%")[0]) if address else context.choose_gid()
    except ValueError:
        gid = context.choose_gid()
    return side.qp.endpoint(
        gid, max_rd_atomic=side.max_rd_atomic, max_dest_rd_atomic=side.max_dest_rd_atomic
    )


def offer(endpoint: Endpoint, side: Side) -> bytes:
    return GREETING + endpoint.pack() + side.hello.pack()


async def read_offer(link: TCPLink) -> tuple[Endpoint, Hello]:
    data = await link.read(OFFER_SIZE, GREETING)
    return Endpoint.unpack(data[:ENDPOINT_SIZE]), Hello.unpack(data[ENDPOINT_SIZE:])


def connect_qp(side: Side, connection: Connection, local: Endpoint, remote: Endpoint) -> None:
    """Ready to send and receive; the peer must not send before it is told."""
    assert side.qp is not None
    try:
        side.qp.connect(local, remote, access=REMOTE_RIGHTS, retry_cnt=RETRIES)
    except ValueError as error:
        raise ProtocolError(f"the peer's queue pair does not fit: {error}") from error
    connection._post_receives()


async def connected_socket(address: Address, source: Address | None) -> socket.socket:
    """Not by the loop's `create_connection`, which may itself be over RDMA."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    connecting = socket.socket(family, socket.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        if source is not None:
            connecting.bind(socket_name(source))
        await asyncio.get_running_loop().sock_connect(connecting, socket_name(address))
    except BaseException:
        connecting.close()
        raise
    return connecting


async def open_link(address: Address, source: Address | None, security: Security) -> TCPLink:
    """The socket, or the exception of the connection manager that means the same."""
    try:
        connected = await connected_socket(address, source)
    except ConnectionRefusedError as error:
        raise RejectedError(
            f"nobody listens on {address[0]} port {address[1]}",
            reason=-(error.errno or ECONNREFUSED),
            event="",
        ) from error
    except OSError as error:
        begin = f" from {source[0]}" if source else ""
        raise UnreachableError(
            f"no way{begin} to {address[0]} port {address[1]}: {error}", status=-(error.errno or 0)
        ) from error
    tls = security.tls
    try:
        reader, writer = await asyncio.open_connection(
            sock=connected, ssl=tls, server_hostname=security.hostname if tls else None
        )
    except OSError as error:
        connected.close()
        raise ProtocolError(f"no TLS with {address[0]} port {address[1]}: {error}") from error
    except BaseException:
        connected.close()
        raise
    return TCPLink(reader, writer)


async def accepted_link(accepted: socket.socket, security: Security) -> TCPLink:
    """The other side of `open_link`."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    try:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, accepted, ssl=security.tls
        )
    except BaseException:
        accepted.close()
        raise
    return TCPLink(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


async def connect(
    device: verbs.Device,
    address: Address,
    source: Address | None,
    config: Config,
    security: Security,
) -> Connection:
    """Connects to one numeric address.  The caller bounds the time."""
    link = await open_link(address, source, security)
    connection: Connection | None = None
    try:
        driver = Driver.for_device(device, config.pool_limit, config.polling)
        side, connection = make_connection(driver, config, security)
        endpoint = local_endpoint(side, link.local_address)
        await link.write(offer(endpoint, side))
        remote, peer = await read_offer(link)
        if remote == endpoint:
            raise ProtocolError(f"{link.peer_address} sends back what it is told: an echo server?")
        security.agree(peer)
        connect_qp(side, connection, endpoint, remote)
        await link.write(READY)
        link.established(weakly(connection._disconnected))
        await connection._start(link, peer, client=True)
    except BaseException as error:
        if connection is None:
            link.release()
        else:
            connection._give_up(link, error)
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
        self._device = device
        self._security = security
        self._config = config
        self._deliver = deliver
        self._places = Places(config)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepted: set[socket.socket] = set()  # whose handshake has not begun
        self._socket = listening_socket(address, backlog)
        self.address: Address = self._socket.getsockname()[:2]
        self._closed = False
        self._inode = inherited.add(self._socket.fileno())
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._closed:
            try:
                peer, address = await loop.sock_accept(self._socket)
            except OSError as error:
                if self._closed:
                    return
                # Out of file descriptors, most likely; it would fail again at once.
                logger.warning("accept on %s port %s: %s", *self.address, error)
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            if len(self._handshakes) >= self._config.max_handshakes:
                logger.info("%s turned away: too many handshakes are under way", address)
                peer.close()
                continue
            self._accepted.add(peer)
            task = loop.create_task(self._serve(peer))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _serve(self, peer_socket: socket.socket) -> None:
        self._accepted.discard(peer_socket)
        link: TCPLink | None = None
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._config.handshake_timeout):
                link = await accepted_link(peer_socket, self._security)
                remote, peer = await read_offer(link)
                host = link.peer_address[0] if link.peer_address else ""
                if (why := self._places.take(host)) is not None:
                    await link.write(REFUSED + pack_refusal(why))
                    raise RejectedError(why, reason=REJECTED_BY_APPLICATION, event="")
                try:
                    driver = Driver.for_device(
                        self._device, self._config.pool_limit, self._config.polling
                    )
                    side, connection = make_connection(driver, self._config, self._security)
                except BaseException:
                    self._places.give_back(host)
                    raise
                connection._on_closed = partial(self._places.give_back, host)
                endpoint = local_endpoint(side, link.local_address)
                connect_qp(side, connection, endpoint, remote)
                await link.write(offer(endpoint, side))
                self._security.agree(peer)  # by now the peer has heard what it must know
                await link.read(len(READY), READY)
                link.established(weakly(connection._disconnected))
                await connection._start(link, peer, client=False)
        except BaseException as error:
            # The peer, or this machine, failed one handshake: the listener goes on.
            logger.info("exchange with %s failed: %s", link and link.peer_address, error)
            if connection is not None:
                assert link is not None
                connection._give_up(link, error)
            elif link is not None:
                link.release()
            if not isinstance(error, (RDMAError, OSError)):
                raise
        else:
            self._deliver(connection)

    def release(self) -> None:
        """Listens no more; all there is to do when the loop has been closed."""
        self._closed = True
        inherited.remove(self._inode)
        self._socket.close()

    async def close(self) -> None:
        """Listens no more; exchanges under way are given up."""
        self._closed = True
        # It ends the accept under way; a cancellation would lose a peer accepted at this moment.
        self._socket.shutdown(socket.SHUT_RDWR)
        await asyncio.gather(self._accepting, return_exceptions=True)  # cancelled by the loop's end
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        for accepted in self._accepted:
            accepted.close()
        self.release()
