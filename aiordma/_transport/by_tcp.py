"""Connecting without the connection manager: endpoints exchanged over a TCP socket.

    client -> server   greeting, endpoint, hello      the server makes its queue pair
    server -> client   greeting, endpoint, hello      and connects it, then answers
    client -> server   READY                          the client has connected its own

Fixed layouts of fixed length, so nothing that a stranger sends makes this side allocate; what is
no greeting of aiordma ends the exchange.  The socket stays open: its end, without a goodbye on the
connection itself, is how the death of the peer is noticed at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from .. import verbs
from .._core.handshake import ENDPOINT_SIZE, HELLO_SIZE, Endpoint, Hello
from ..config import Config
from ..driver import Driver
from ..errors import ProtocolError, RDMAError
from ..mr_pool import REMOTE_RIGHTS
from .connection import Address, Connection
from .side import Side

logger = logging.getLogger("aiordma.tcp")

GREETING = b"aiordma\x01"
READY = b"ready\x00\x00\x01"
OFFER_SIZE = len(GREETING) + ENDPOINT_SIZE + HELLO_SIZE


class TCPLink:
    """The socket of a connection, from its making to its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._watch: asyncio.Task[None] | None = None
        self._local: Address = writer.get_extra_info("sockname")[:2]
        self._peer: Address = writer.get_extra_info("peername")[:2]

    @property
    def local_address(self) -> Address | None:
        return self._local

    @property
    def peer_address(self) -> Address | None:
        return self._peer

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def read(self, size: int, greeting: bytes) -> bytes:
        """`size` bytes that begin with `greeting`; wrong ones are refused as soon as seen."""
        try:
            start = await self._reader.readexactly(len(greeting))
            if start != greeting:
                raise ProtocolError(
                    f"{self._peer} does not speak aiordma's exchange: it said {start!r}"
                )
            return await self._reader.readexactly(size - len(greeting))
        except asyncio.IncompleteReadError as error:
            raise ProtocolError(
                f"{self._peer} ended the exchange after {len(error.partial)} bytes"
            ) from error

    def established(self, on_end: Callable[[str], None]) -> None:
        """The exchange is done; from now on `on_end` hears of the socket's end."""
        self._watch = asyncio.get_running_loop().create_task(self._watch_end(on_end))

    async def _watch_end(self, on_end: Callable[[str], None]) -> None:
        try:
            data = await self._reader.read(1)
            reason = "spoke after the exchange" if data else "is gone without a goodbye"
        except OSError as error:
            reason = f"is gone: {error}"
        on_end(f"the peer {reason} (the socket that the endpoints were exchanged on)")

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def release(self) -> None:
        self._writer.close()


def make_connection(driver: Driver, config: Config) -> tuple[Side, Connection]:
    side = Side(driver, config)
    try:
        side.create_qp(lambda cq, caps: driver.pd.create_qp(cq, cq, caps))
        return side, Connection(side, config)
    except BaseException:
        side.close()
        raise


def local_endpoint(side: Side, address: Address | None) -> Endpoint:
    """The endpoint by the GID of the address that the socket uses, else the best GID there is."""
    assert side.qp is not None
    assert address is not None
    context = side.driver.context
    try:
        gid = context.find_gid(address[0].partition("%")[0])
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
    side.qp.connect(local, remote, access=REMOTE_RIGHTS)
    connection._post_receives()


async def connect(
    device: verbs.Device, host: str, port: int, source: Address | None, config: Config
) -> Connection:
    """Connects; the caller bounds the time."""
    reader, writer = await asyncio.open_connection(host, port, local_addr=source)
    link = TCPLink(reader, writer)
    connection: Connection | None = None
    try:
        driver = Driver.for_device(device, config.pool_limit)
        side, connection = make_connection(driver, config)
        endpoint = local_endpoint(side, link.local_address)
        await link.write(offer(endpoint, side))
        remote, peer = await read_offer(link)
        connect_qp(side, connection, endpoint, remote)
        await link.write(READY)
        connection._start(link, peer)
        link.established(connection._disconnected)
    except BaseException as error:
        if connection is None:
            link.release()
        else:
            connection._give_up(link, error)
        raise
    return connection


class TCPAcceptor:
    """Listens on TCP and hands finished connections to `deliver`."""

    def __init__(
        self,
        device: verbs.Device,
        config: Config,
        deliver: Callable[[Connection], None],
    ) -> None:
        self._device = device
        self._config = config
        self._deliver = deliver
        self._server: asyncio.Server | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self.address: Address = ("", 0)

    async def start(self, address: Address, backlog: int) -> None:
        self._server = await asyncio.start_server(self._on_peer, *address, backlog=backlog)
        self.address = self._server.sockets[0].getsockname()[:2]

    async def _on_peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._handshakes) >= self._config.max_handshakes:
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._handshakes.add(task)
        link = TCPLink(reader, writer)
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._config.handshake_timeout):
                remote, peer = await read_offer(link)
                driver = Driver.for_device(self._device, self._config.pool_limit)
                side, connection = make_connection(driver, self._config)
                endpoint = local_endpoint(side, link.local_address)
                connect_qp(side, connection, endpoint, remote)
                await link.write(offer(endpoint, side))
                await link.read(len(READY), READY)
            connection._start(link, peer)
            link.established(connection._disconnected)
        except BaseException as error:
            # The peer, or this machine, failed one handshake: the listener goes on.
            logger.info("exchange with %s failed: %s", link.peer_address, error)
            if connection is None:
                link.release()
            else:
                connection._give_up(link, error)
            if not isinstance(error, (RDMAError, OSError)):
                raise
        else:
            self._deliver(connection)
        finally:
            self._handshakes.discard(task)

    async def close(self) -> None:
        """Listens no more; exchanges under way are given up."""
        if self._server is not None:
            self._server.close()
        for task in list(self._handshakes):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*self._handshakes, return_exceptions=True)
