"""Connections without the connection manager: endpoints are exchanged over a TCP socket.

This is the TCP bootstrap::

    client -> server   magic, endpoint, hello         the server makes its queue pair
    server -> client   magic, endpoint, hello         and connects it, then replies
    client -> server   READY                          the client has connected its own

A server that has too many connections replies with REFUSED and the reason instead.

With a key, the server creates nothing until the client has shown that it has the key, and nothing
is connected until both sides have proved it. Otherwise a peer could make the embedded device
connect to any address::

    client -> server   magic, endpoint, hello
    server -> client   magic, challenge, hello        of this socket alone (admission.py)
    client -> server   TICKET, ticket                 the server makes its queue pair
    server -> client   magic, endpoint, hello
    both ways          the proof of the key           as control messages (auth.py); the client
                                                      sends its first one with the ticket
    client -> server   READY                          the client has connected its queue pair
    server -> client   READY                          the server has connected its own

A challenge has the length of an endpoint. The client therefore reads the same number of bytes from
a server with and without a key, and the hello tells which of them it is.

All layouts have a fixed length, so an unknown peer cannot make this side allocate memory. If the
magic is wrong, the bootstrap ends. The socket stays open, because its end without a goodbye on the
connection shows immediately that the peer has died.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from .._core.handshake import ENDPOINT_SIZE, HELLO_SIZE, TICKET_SIZE, Endpoint, Hello
from .._loop.device_failures import FailureWatch
from .._loop.driver import Watch
from .._native import fork
from ..cm.address import Address
from ..errors import (
    TLS_HINT,
    AddressError,
    AuthenticationError,
    BusyError,
    ProtocolError,
    RDMAError,
    RouteError,
    VerbsError,
    host_port,
)
from . import connect_inband
from .acceptor import Acceptor, ConnectionLimitError, Request, packed_refusal
from .admission_control import SilentSockets
from .auth import new_ticket, new_ticket_office
from .connect_attempt import ConnectAttempt, Target
from .connection import Connection
from .connection_group import ConnectionGroup
from .endpoint import AddressedEndpoint, ForeignAddressError, make_hello
from .inspection import Way
from .tcp_link import REFUSED, SHORTAGES, TCPLink, accepted_link, address_of, open_link, socket_name

if TYPE_CHECKING:
    from .._core.admission import TicketOffice

logger = logging.getLogger("aiordma.tcp")

MAGIC = b"aiordma\x01"
READY = b"ready\x00\x00\x01"
TICKET = b"ticket\x00\x01"
MESSAGE_SIZE = len(MAGIC) + ENDPOINT_SIZE + HELLO_SIZE

# A listener that cannot accept tries again after this number of seconds.
ACCEPT_PAUSE = 0.1

# At most this many peers are accepted in one iteration of the loop.
ACCEPTS = 64


async def read_message(link: TCPLink) -> tuple[bytes, Hello]:
    """Read an endpoint or a challenge, and a hello."""
    data = await link.read(MESSAGE_SIZE, MAGIC)
    return data[:ENDPOINT_SIZE], Hello.unpack(data[ENDPOINT_SIZE:])


def unpack_offer(data: bytes) -> tuple[Endpoint, Hello]:
    return Endpoint.unpack(data[:ENDPOINT_SIZE]), Hello.unpack(data[ENDPOINT_SIZE:])


async def connect(to: Target) -> Connection:
    """Connect to a numeric address. The caller limits the time."""
    config, security = to.config, to.security
    if config.in_band and security.tls is None:
        connected = await connect_inband.connect(to)
        if connected is not None:
            return connected
    tcp = await open_link(to.address, to.source, security)
    with ConnectAttempt[AddressedEndpoint](tcp) as attempt:
        endpoint = attempt.take_over(
            AddressedEndpoint(to.devices, config, security, tcp.local_address), rails=to.rails
        )
        tcp.write(MAGIC + endpoint.packed(attempt.hello))
        attempt.make()  # in parallel with the other side
        answer, peer = await read_message(tcp)
        security.agree(peer, to.address)
        if security.auth is not None:
            tcp.write(TICKET + new_ticket(security.auth, answer, endpoint.packed(attempt.hello)))
            proof = attempt.begin_proof(tcp, client=True)
            answer, peer = await read_message(tcp)
        remote = Endpoint.unpack(answer)
        if security.auth is not None:
            await attempt.prove(tcp, proof, peer, remote.qp_num)
        endpoint.connect(remote, tcp.peer_address, proved=security.auth is not None)
        attempt.post_receives()
        tcp.write(READY)
        if security.auth is not None:
            await tcp.read(len(READY), READY)
        if not (config.in_band and peer.in_band):
            return await attempt.start(peer, to.devices, client=True)
        attempt.link = member = ConnectionGroup(tcp).join(0)
        connection = await attempt.start(peer, to.devices, client=True)
        connect_inband.add_group(to, member, attempt.control_channel)
        return connection


def listening_socket(address: Address) -> socket.socket:
    """Create a listening socket. Unlike in asyncio, "::" accepts IPv4 on the same port, too.

    The kernel's queue has its maximum length. If it overflows, a peer only tries again after a
    second. The number of silent sockets is limited by SilentSockets, not by this queue.
    """
    host, port = address
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    try:
        listening = socket.create_server(
            socket_name((host, port)),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=socket.SOMAXCONN,
            dualstack_ipv6=host == "::",
        )
    except OSError as error:
        raise AddressError(
            f"cannot listen on {host_port((host, port))}: {os.strerror(error.errno or 0)}",
            status=-(error.errno or 0),
        ) from error
    listening.setblocking(False)
    return listening


class TCPListener:
    """A listener on one address for the TCP bootstrap."""

    def __init__(self, address: Address, acceptor: Acceptor) -> None:
        self._acceptor = acceptor
        self._socket = listening_socket(address)
        self.address: Address = self._socket.getsockname()[:2]
        self._inode = fork.add_socket(self._socket.fileno())
        self._loop = asyncio.get_running_loop()
        self._silent = SilentSockets(acceptor.config)
        self._watch = Watch(self._socket.fileno(), self._accept)
        self._failure_watch = FailureWatch(
            (device.name for device in acceptor.devices), acceptor.fail
        )
        self._pause: asyncio.TimerHandle | None = None

    def _accept(self) -> None:
        """Accept all waiting peers. Called while the socket is readable."""
        for _ in range(ACCEPTS):
            try:
                accepted, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in SHORTAGES and self._silent.drop_oldest():
                    continue
                # Another attempt would fail immediately.
                logger.warning("accept on %s: %s", host_port(self.address), error)
                self._watch.close()
                self._pause = self._loop.call_later(ACCEPT_PAUSE, self._resume)
                return
            accepted.setblocking(False)
            with suppress(OSError):  # the peer may have reset it
                # Otherwise, a proof in two parts would wait 40 ms for an acknowledgement.
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = TCPRequest(accepted, address[:2])
            self._silent.add(accepted, address[:2], partial(self._on_first_bytes, request))

    def _on_first_bytes(self, request: TCPRequest) -> None:
        admit = partial(self._acceptor.admit, request)
        if (waiting := request.challenge(self._acceptor)) is not None:
            self._silent.add(*waiting, admit)
        else:
            admit()

    def _resume(self) -> None:
        self._watch = Watch(self._socket.fileno(), self._accept)

    def release(self) -> None:
        """Stop listening. After the loop has been closed, nothing else is necessary."""
        if self._pause is not None:
            self._pause.cancel()
        self._watch.close()
        self._failure_watch.close()
        self._silent.close()
        fork.remove_socket(self._inode)
        self._socket.close()


class TCPRequest(Request):
    """A request on an accepted socket."""

    via: Way = "tcp"

    def __init__(self, accepted: socket.socket, address: Address) -> None:
        self._socket: socket.socket | None = accepted  # None once it belongs to the link
        self._accepted_from = address
        self._address = address_of(address) or address
        self._tickets: TicketOffice | None = None  # set once the peer has been challenged
        self._offer = b""  # offer that was read before there was a link
        self._is_ours = False  # the peer's first bytes are those of aiordma
        self._tcp: TCPLink | None = None
        self._attempt = ConnectAttempt[AddressedEndpoint]()

    def __repr__(self) -> str:
        return f"<bootstrap with {host_port(self._address)}>"

    @property
    def peer_address(self) -> Address | None:
        return self._address

    def challenge(self, acceptor: Acceptor) -> tuple[socket.socket, Address] | None:
        """Challenge the peer, and return the socket and its address if it must wait for a ticket.

        This is only done if the first bytes are a complete and valid offer. The handshake handles
        everything else, such as an offer that is invalid, arrives in parts, or is encrypted.
        """
        security = acceptor.security
        if security.auth is None or security.tls is not None:
            return None
        assert self._socket is not None
        try:
            data = self._socket.recv(MESSAGE_SIZE, socket.MSG_PEEK)
            if len(data) < MESSAGE_SIZE or not data.startswith(MAGIC):
                return None
            _, peer = unpack_offer(data[len(MAGIC) :])
            security.agree(peer)
            self._socket.send(self._new_challenge(acceptor))
            self._offer = self._socket.recv(MESSAGE_SIZE)[len(MAGIC) :]
        except (RDMAError, OSError):
            return None
        return self._socket, self._accepted_from

    def _new_challenge(self, acceptor: Acceptor) -> bytes:
        config, security = acceptor.config, acceptor.security
        assert security.auth is not None
        self._tickets = new_ticket_office(security.auth)
        in_band = config.in_band and security.tls is None
        hello = make_hello(config, security, in_band=in_band)
        return MAGIC + self._tickets.challenge.pack() + hello.pack()

    def _check_tls(self, accepted: socket.socket) -> None:
        """Raise ProtocolError if the peer starts the bootstrap without TLS, and tell the peer."""
        with suppress(OSError):
            self._is_ours = accepted.recv(len(MAGIC), socket.MSG_PEEK) == MAGIC
            if self._is_ours:
                accepted.recv(MESSAGE_SIZE)  # closing a socket with unread bytes loses the refusal
        if self._is_ours:
            raise ProtocolError(
                f"the listener uses TLS for the bootstrap, but the connecting side does not: "
                f"{TLS_HINT}"
            )

    async def handshake(self, acceptor: Acceptor) -> Connection:
        assert self._socket is not None
        if acceptor.security.tls is not None:
            self._check_tls(self._socket)
        accepted, self._socket = self._socket, None
        attempt = self._attempt
        self._tcp = attempt.link = tcp = await accepted_link(accepted, acceptor.security)
        challenged = bool(self._offer)
        offer = self._offer or await tcp.read(MESSAGE_SIZE, MAGIC)
        self._is_ours = True
        remote, peer = unpack_offer(offer)
        config, security = acceptor.config, acceptor.security
        in_band = config.in_band and security.tls is None
        if security.auth is not None:
            if not challenged:
                tcp.write(self._new_challenge(acceptor))
                security.agree(peer)  # the peer has this side's hello and fails as well
            assert self._tickets is not None
            ticket = await tcp.read(len(TICKET) + TICKET_SIZE, TICKET)
            if not self._tickets.admits(ticket, offer):
                raise ProtocolError("the peer's ticket does not match this listener's challenge")
        devices, when_closed = acceptor.devices, acceptor.take_place()
        attempt.take_over(
            AddressedEndpoint(devices, config, security, tcp.local_address),
            in_band=in_band,
            rails=acceptor.takes_rails(peer),
        )
        attempt.make(when_closed)
        if security.auth is not None:
            tcp.write(MAGIC + attempt.endpoint.packed(attempt.hello))
            proof = attempt.begin_proof(tcp, client=False)
            await attempt.prove(tcp, proof, peer, remote.qp_num)
            await tcp.read(len(READY), READY)
            acceptor.proved()
            attempt.endpoint.connect(remote, tcp.peer_address, proved=True)
            attempt.post_receives()
            tcp.write(READY)
        else:
            attempt.endpoint.connect(remote, tcp.peer_address)
            attempt.post_receives()
            tcp.write(MAGIC + attempt.endpoint.packed(attempt.hello))
            security.agree(peer)  # the peer has this side's hello and fails as well
            await tcp.read(len(READY), READY)
        if in_band:
            group, channel = ConnectionGroup(tcp), attempt.control_channel
            attempt.link = member = group.join(0)
            member.attach(channel)
            channel.handle(connect_inband.Responder(channel, group, acceptor))
        return await attempt.start(peer, devices, client=False)

    def give_up(self, error: BaseException) -> None:
        # A peer with another release sends the magic, and then something that this side does not
        # expect. A peer that does not send the magic uses another protocol, and would take a
        # refusal for a response of that protocol. A wrong key is detected before there is an
        # attempt, or in the proof, which reports it.
        early = self._is_ours and not self._attempt.made
        early = early and isinstance(error, ProtocolError | AuthenticationError)
        told = BusyError | ConnectionLimitError | ForeignAddressError | RouteError | VerbsError
        if early or isinstance(error, told):
            self._tell(REFUSED + packed_refusal(error))
        self._attempt.give_up(error)
        if self._socket is not None:
            self._socket.close()

    def _tell(self, refusal: bytes) -> None:
        """Send a refusal if the peer can still be told."""
        with suppress(RDMAError, OSError):
            if self._tcp is not None:
                self._tcp.write(refusal)
            elif self._socket is not None:
                self._socket.send(refusal)
