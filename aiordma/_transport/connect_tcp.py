"""Connections without the connection manager: endpoints are exchanged over a TCP socket.

This is the TCP bootstrap. Its messages and their order are defined in handshake.py. The messages
that prove the key are control messages, which contain their length (tcp_link.py). Each other
message has a fixed length and consists of a magic and its contents:

- OFFER and REPLY contain an endpoint and a hello, and CHALLENGE contains a challenge and a hello. A
  challenge has the length of an endpoint. The client therefore reads the same number of bytes from
  a server with and without a key. The server's hello shows whether it has a key.
- TICKET contains a ticket. READY is empty.

A server that does not accept the connection sends REFUSED and the reason instead of its next
message, or a Goodbye instead of its next message of the proof. The length of every message is
limited, so an unknown peer cannot make this side allocate much memory. If the magic is wrong, the
bootstrap ends.

After the bootstrap, the socket stays open. If it closes before a goodbye arrives on the connection,
the peer has died.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import suppress
from errno import EALREADY, ECONNREFUSED, EINPROGRESS, EISCONN, EMFILE, ENFILE, ENOBUFS, ENOMEM
from functools import partial
from ssl import SSLCertVerificationError, SSLEOFError

from .._core import protocol
from .._core.handshake_layout import ENDPOINT_SIZE, HELLO_SIZE, TICKET_SIZE
from .._event_loop.device_failures import FailureWatch
from .._event_loop.driver import Watch, writable
from .._native import fork
from .._native.calls import failure
from ..cm.address import Address, scope_id
from ..errors import (
    ON_LOOPBACK,
    TLS_HINT,
    AddressError,
    AuthenticationError,
    BusyError,
    HandshakeBrokenError,
    ProtocolError,
    RDMAError,
    RejectedError,
    RouteError,
    UnreachableError,
    VerbsError,
    cause_text,
    host_port,
)
from . import connect_inband
from .acceptor import Acceptor, ConnectionLimitError, Request, packed_refusal
from .admission_control import SilentSockets
from .auth import Security
from .connect_attempt import ConnectAttempt, Target
from .connection import Connection
from .connection_group import ConnectionGroup
from .endpoint import AddressedEndpoint, ForeignAddressError, listener_name, make_hello
from .handshake import PROOF, Action, Direction, Handshake, Message
from .inspection import ConnectionMethod
from .tcp_link import REFUSED, VIA_HINT, TCPLink, address_of

logger = logging.getLogger("aiordma.tcp")

MAGIC = b"aiordma\x01"
READY = b"ready\x00\x00\x01"
TICKET = b"ticket\x00\x01"
MESSAGE_SIZE = len(MAGIC) + ENDPOINT_SIZE + HELLO_SIZE

MAGICS = {
    Message.OFFER: MAGIC,
    Message.CHALLENGE: MAGIC,
    Message.TICKET: TICKET,
    Message.REPLY: MAGIC,
    Message.READY: READY,
}
SIZES = {MAGIC: MESSAGE_SIZE, TICKET: len(TICKET) + TICKET_SIZE, READY: len(READY)}

# asyncio raises one of these errors if the socket is closed during the TLS handshake.
TLS_BROKEN = (ConnectionError, SSLEOFError)

# The errno values for exhausted resources in this process. They do not mean that the peer or the
# route is at fault.
SHORTAGES = frozenset({EMFILE, ENFILE, ENOBUFS, ENOMEM})

# Delay in seconds before a listener tries again after accept() has failed.
ACCEPT_PAUSE = 0.1

# Maximum number of sockets that a listener accepts per iteration of the event loop.
ACCEPTS = 64


def socket_name(address: Address) -> tuple[str, int] | tuple[str, int, int, int]:
    """Convert an address for `bind` and `connect`, which take the scope ID as a separate field."""
    host, _, interface = address[0].partition("%")
    if not interface:
        return address
    return host, address[1], 0, scope_id(interface)


def send(tcp: TCPLink, handshake: Handshake, kind: Message) -> None:
    """Send the next message of the handshake."""
    message = handshake.send()
    if isinstance(message, bytes):
        tcp.write(MAGICS[kind] + message)
    else:
        tcp.send_control(message)


async def receive(tcp: TCPLink, handshake: Handshake, kind: Message) -> None:
    """Receive the next message of the handshake. Raises the reason if the peer refuses."""
    if kind in PROOF:
        handshake.receive_control(await tcp.read_control())
    else:
        magic = MAGICS[kind]
        handshake.receive(kind, await tcp.read(SIZES[magic], magic))


async def exchange_messages(tcp: TCPLink, handshake: Handshake, until: Action) -> None:
    """Exchange messages, and compare the hellos, until `until` is the next step."""
    try:
        while (step := handshake.next_step).kind is not until:
            if step.kind is Action.COMPARE:
                handshake.compare()
                continue
            assert isinstance(step.kind, Message)
            if step.direction is Direction.SEND:
                send(tcp, handshake, step.kind)
            else:
                await receive(tcp, handshake, step.kind)
    except AuthenticationError as error:
        if handshake.proves_key:
            code = protocol.GoodbyeCode.NOT_AUTHENTICATED
            tcp.send_control(protocol.Goodbye(0, code, str(error)))
        raise


# ---- the connecting side -------------------------------------------------------------------------


async def connected_socket(address: Address, source: Address | None) -> socket.socket:
    """Connect a TCP socket without calling the loop's `create_connection`.

    That method may itself use RDMA, and uvloop resolves even numeric addresses in another thread.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    connecting = socket.socket(family, socket.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if source is not None:
            connecting.bind(socket_name(source))
        name = socket_name(address)
        code = connecting.connect_ex(name)
        if code == EINPROGRESS:
            code = connecting.connect_ex(name)  # a local connection is established by now
        if code in (EINPROGRESS, EALREADY):
            await writable(connecting.fileno())
            code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code not in (0, EISCONN):
            raise OSError(code, os.strerror(code))
    except BaseException:
        connecting.close()
        raise
    return connecting


async def open_link(address: Address, source: Address | None, security: Security) -> TCPLink:
    """Connect to a listener. Raises the same exceptions as the connection manager."""
    try:
        connected = await connected_socket(address, source)
    except ConnectionRefusedError as error:
        raise RejectedError(
            f"no listener on {host_port(address)} ({ON_LOOPBACK}); {VIA_HINT}",
            reason=-(error.errno or ECONNREFUSED),
            event="",
        ) from error
    except OSError as error:
        if error.errno in SHORTAGES:
            raise failure("socket", error.errno or 0, f"to {host_port(address)}") from error
        from_source = f" from {source[0]}" if source else ""
        raise UnreachableError(
            f"no route{from_source} to {host_port(address)}: {error.strerror}",
            status=-(error.errno or 0),
        ) from error
    tls = security.tls
    loop = asyncio.get_running_loop()
    try:
        _, link = await loop.create_connection(
            partial(TCPLink, connected),
            sock=connected,
            ssl=tls,
            server_hostname=security.hostname if tls else None,
        )
    except OSError as error:
        connected.close()
        if error.errno in SHORTAGES:
            raise failure("socket", error.errno or 0, f"to {host_port(address)}") from error
        cls = HandshakeBrokenError if isinstance(error, TLS_BROKEN) else ProtocolError
        hint = "" if isinstance(error, SSLCertVerificationError) else f"; {TLS_HINT}"
        raise cls(
            f"TLS handshake with {host_port(address)} failed: {cause_text(error)}{hint}"
        ) from error
    except BaseException:
        connected.close()
        raise
    return link


async def connect(target: Target) -> Connection:
    """Connect to a numeric address. The caller must enforce a timeout."""
    config, security = target.config, target.security
    if config.in_band and security.tls is None:
        connected = await connect_inband.try_connect(target)
        if connected is not None:
            return connected
    tcp = await open_link(target.address, target.source, security)
    handshake = Handshake("tcp", security, client=True, address=target.address)
    with ConnectAttempt[AddressedEndpoint](tcp) as attempt:
        attempt.take_over(
            AddressedEndpoint(
                target.devices, config, security, tcp.local_address, opener=target.opener
            ),
            handshake,
            rails=target.will_use_rails,
        )
        send(tcp, handshake, Message.OFFER)
        attempt.create_connection()  # while the listener creates its side
        await exchange_messages(tcp, handshake, until=Action.CONNECT)
        attempt.connect_queue_pair(tcp.peer_address)
        await exchange_messages(tcp, handshake, until=Action.START)
        if not (config.in_band and handshake.peer.in_band):
            return await attempt.start(target.devices)
        attempt.link = member = ConnectionGroup(tcp).add_member(0)
        connection = await attempt.start(target.devices)
        connect_inband.add_group(target, member, attempt.control_channel)
        return connection


# ---- the listening side --------------------------------------------------------------------------


def listening_socket(address: Address) -> socket.socket:
    """Create a listening socket. Unlike in asyncio, "::" also accepts IPv4 on the same port.

    The backlog is as long as the kernel allows, because a peer that finds it full retries only
    after a second. SilentSockets, not the backlog, limits the number of idle sockets.
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


async def accepted_link(accepted: socket.socket, security: Security) -> TCPLink:
    """Create the link for an accepted socket. With TLS, wait for the TLS handshake."""
    loop = asyncio.get_running_loop()
    link = TCPLink(accepted)
    try:
        # Ignore the returned protocol. With TLS, uvloop returns its own protocol instead of `link`.
        await loop.connect_accepted_socket(lambda: link, accepted, ssl=security.tls)
    except BaseException:
        accepted.close()
        raise
    return link


class TCPListener:
    """A TCP bootstrap listener on one address."""

    def __init__(self, address: Address, acceptor: Acceptor) -> None:
        self._acceptor = acceptor
        self._socket = listening_socket(address)
        self.address: Address = self._socket.getsockname()[:2]
        self._registered_inode = fork.register_socket(self._socket.fileno())
        self._loop = asyncio.get_running_loop()
        self._silent_sockets = SilentSockets(acceptor.config)
        self._watch = Watch(self._socket.fileno(), self._accept)
        self._failure_watch = FailureWatch(
            (device.name for device in acceptor.devices), acceptor.fail
        )
        self._resume_timer: asyncio.TimerHandle | None = None

    def _accept(self) -> None:
        """Accept up to ACCEPTS pending connections. Called whenever the socket is readable."""
        for _ in range(ACCEPTS):
            try:
                accepted, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in SHORTAGES and self._silent_sockets.drop_oldest():
                    continue
                # Pause, because the socket stays readable and accept() would keep failing.
                logger.warning("accept on %s: %s", host_port(self.address), error)
                self._watch.close()
                self._resume_timer = self._loop.call_later(ACCEPT_PAUSE, self._resume)
                return
            accepted.setblocking(False)
            with suppress(OSError):  # the peer may have reset the connection
                # With Nagle's algorithm, the second part of a key proof would wait for a delayed
                # ACK, which takes 40 ms.
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = address[:2]
            request = TCPRequest(accepted, peer)
            on_first_bytes = partial(self._on_first_bytes, request, accepted, peer)
            self._silent_sockets.add(accepted, peer, on_first_bytes)

    def _on_first_bytes(
        self, request: TCPRequest, accepted: socket.socket, address: Address
    ) -> None:
        """Admit the request, or challenge the peer and admit it once its ticket has arrived."""
        admit = partial(self._acceptor.admit, request)
        if request.try_challenge(self._acceptor):
            self._silent_sockets.add(accepted, address, admit)
        else:
            admit()

    def _resume(self) -> None:
        self._watch = Watch(self._socket.fileno(), self._accept)

    def release(self) -> None:
        """Stop listening. Can also be called after the loop has been closed."""
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        self._watch.close()
        self._failure_watch.close()
        self._silent_sockets.close()
        fork.unregister_socket(self._registered_inode)
        self._socket.close()


class TCPRequest(Request):
    """A connection request that arrived on an accepted socket."""

    via: ConnectionMethod = "tcp"

    def __init__(self, accepted: socket.socket, address: Address) -> None:
        self._socket: socket.socket | None = accepted  # None once it belongs to the link
        self._address = address_of(address) or address  # IPv4-mapped addresses become IPv4
        self._handshake: Handshake | None = None  # set once the peer has been challenged
        self._sent_magic_without_tls = False
        self._tcp: TCPLink | None = None
        self._attempt = ConnectAttempt[AddressedEndpoint]()

    def __repr__(self) -> str:
        return f"<bootstrap with {host_port(self._address)}>"

    @property
    def peer_address(self) -> Address | None:
        return self._address

    def try_challenge(self, acceptor: Acceptor) -> bool:
        """Send the challenge early if the peer's offer has arrived in full and is valid.

        Returns whether the challenge was sent, so that the peer must now send a ticket. Otherwise,
        the handshake must read the offer. This happens, for example, if no key is needed, or if the
        offer is invalid, incomplete or encrypted.
        """
        security = acceptor.security
        if security.auth is None or security.tls is not None:
            return False
        assert self._socket is not None
        try:
            data = self._socket.recv(MESSAGE_SIZE, socket.MSG_PEEK)
            if len(data) < MESSAGE_SIZE or not data.startswith(MAGIC):
                return False
            handshake = self._new_handshake(acceptor)
            handshake.receive(Message.OFFER, data[len(MAGIC) :])
            challenge = handshake.send_bytes()
            handshake.compare()
            self._socket.send(MAGIC + challenge)
            self._socket.recv(MESSAGE_SIZE)  # remove the offer, which was only peeked at
        except (RDMAError, OSError):
            return False
        self._handshake = handshake
        return True

    @staticmethod
    def _new_handshake(acceptor: Acceptor) -> Handshake:
        config, security = acceptor.config, acceptor.security
        in_band = config.in_band and security.tls is None
        hello = make_hello(config, security, in_band=in_band)
        return Handshake("tcp", security, client=False, hello=hello)

    def _check_tls(self, accepted: socket.socket) -> None:
        """Raise ProtocolError if the peer has begun the bootstrap without TLS.

        `give_up` then sends the refusal.
        """
        with suppress(OSError):
            self._sent_magic_without_tls = accepted.recv(len(MAGIC), socket.MSG_PEEK) == MAGIC
            if self._sent_magic_without_tls:
                accepted.recv(MESSAGE_SIZE)  # with unread bytes, close() would lose the refusal
        if self._sent_magic_without_tls:
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
        if self._handshake is None:
            self._handshake = self._new_handshake(acceptor)
        handshake = self._handshake
        await exchange_messages(tcp, handshake, until=Action.CREATE)
        config, security = acceptor.config, acceptor.security
        in_band = config.in_band and security.tls is None
        devices, release_place = acceptor.devices, acceptor.reserve_place()
        attempt.take_over(
            AddressedEndpoint(
                devices,
                config,
                security,
                tcp.local_address,
                opener=listener_name(tcp.local_address),
            ),
            handshake,
            in_band=in_band,
            rails=acceptor.will_use_rails(handshake.peer),
        )
        attempt.create_connection(release_place)
        await exchange_messages(tcp, handshake, until=Action.CONNECT)
        acceptor.reserve_place_of_peer()
        attempt.connect_queue_pair(tcp.peer_address)
        await exchange_messages(tcp, handshake, until=Action.START)
        if in_band:
            group, channel = ConnectionGroup(tcp), attempt.control_channel
            attempt.link = member = group.add_member(0)
            member.attach(channel)
            channel.set_handler(connect_inband.Responder(channel, group, acceptor))
        return await attempt.start(devices)

    def give_up(self, error: BaseException) -> None:
        # A peer that sends the magic and then violates the protocol probably runs another release,
        # so explain the error. A peer that does not send the magic uses another protocol and would
        # misread a refusal. Once the connection has been created, the key proof itself notifies
        # the peer of a wrong key.
        violation = isinstance(error, ProtocolError | AuthenticationError)
        sent_magic = self._sent_magic_without_tls or (
            self._handshake is not None and self._handshake.heard_from_peer
        )
        explain = violation and sent_magic and not self._attempt.has_connection
        reported_errors = (
            BusyError | ConnectionLimitError | ForeignAddressError | RouteError | VerbsError
        )
        if explain or isinstance(error, reported_errors):
            self._send_refusal(REFUSED + packed_refusal(error))
        self._attempt.give_up(error)
        if self._socket is not None:
            self._socket.close()

    def _send_refusal(self, refusal: bytes) -> None:
        """Try to send a refusal. Errors are ignored, because the peer may have disconnected."""
        with suppress(RDMAError, OSError):
            if self._tcp is not None:
                self._tcp.write(refusal)
            elif self._socket is not None:
                self._socket.send(refusal)
