"""TCP between simulated hosts: the `socket.socket` of programs, asyncio and the bootstrap.

Each socket is one end of a socket pair, whose other end belongs to the simulation. Received data is
written to that end. Data arrives with a timer of the receiving host's loop, so it waits if the host
is paused. Data behind a cut is retried. If the receiving host was killed, the connection is reset
when it has booted again.

A socket accepts no more data while `WINDOW` bytes have not arrived, and none before it is
connected. The socket's kernel buffer is then full, and the loop waits until it is writable again.
"""

from __future__ import annotations

import asyncio
import errno
import operator
import os
import socket
from collections import deque
from contextlib import suppress
from socket import AF_INET, AF_INET6, MSG_PEEK, SO_REUSEPORT, SOCK_STREAM, SOL_SOCKET
from socket import socket as RealSocket
from typing import TYPE_CHECKING, Any, NoReturn

from ..cm.address import Address
from ..errors import RDMAError

if TYPE_CHECKING:
    from .machine import Machine
    from .world import Host

RETRY_DELAY = 0.2  # seconds, as in TCP
MAX_RETRY_DELAY = 120.0
CONNECT_TIMEOUT = 127.0  # seconds for six retries (tcp_syn_retries in tcp(7))
TIMER_TOLERANCE = 1e-8  # seconds by which a timer may be early
WINDOW = 256 << 10  # bytes
FILLER = bytes(4096)  # enough to fill the smallest socket buffer
EPHEMERAL_PORTS = 32768, 60999  # the kernel's default range of ephemeral ports
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # the addresses to which connect() maps them

real_getaddrinfo = socket.getaddrinfo


class NotSimulatedError(RDMAError, NotImplementedError):
    """A program on a simulated host used a feature that is not simulated."""


def refuse(what: str, instead: str) -> NoReturn:
    raise NotSimulatedError(f"simulated hosts do not support {what}: {instead}")


def current_machine() -> Machine | None:
    """Return the machine whose program is running, or None."""
    return getattr(asyncio._get_running_loop(), "machine", None)


def getaddrinfo(
    host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
) -> list[Any]:
    """Resolve a simulated host's name, "localhost" or a numeric address. Other names fail."""
    if isinstance(port, int):
        check_port("getaddrinfo", port)
    if not flags & socket.AI_NUMERICHOST:
        flags |= socket.AI_NUMERICHOST
        machine = current_machine()
        found = machine and machine.world.hosts.get(host)
        host = found.address if found else "127.0.0.1" if host == "localhost" else host
    return real_getaddrinfo(host, port, family, type, proto, flags)


def check_port(where: str, port: Any) -> int:
    if not 0 <= (number := operator.index(port)) <= 0xFFFF:
        raise OverflowError(f"{where}(): port must be 0-65535, not {number}")
    return number


def wildcard_like(host: str) -> str:
    return "::" if ":" in host else "0.0.0.0"


def is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")


def failure(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def check_blocking(sock: Socket) -> None:
    if sock._blocks:
        refuse("blocking sockets", "use asyncio or setblocking(False)")


def socket_name(family: int, address: Address) -> Any:
    """Return an address in the format of sockets. IPv6 sockets get mapped IPv4 addresses."""
    host, port = address
    if family == AF_INET:
        return address
    return host if ":" in host else f"::ffff:{host}", port, 0, 0


def resolve(where: str, address: Any, sock: Socket) -> Address:
    """Return the numeric address and port, converting IPv4-mapped IPv6 addresses to IPv4."""
    host, port = address[:2]
    # All results have the same address. The last element of a result is the socket address.
    *_, result = getaddrinfo(host or sock._local[0], 0, sock.family, SOCK_STREAM)
    (numeric_host, *_) = result[-1]
    return numeric_host.removeprefix("::ffff:"), check_port(where, port)


def accepts_address(bound: Socket, host: str) -> bool:
    """Return whether connections to the address `host` reach the bound socket."""
    local_host = bound._local[0]
    takes_ipv4 = not bound._options.get((socket.IPPROTO_IPV6, socket.IPV6_V6ONLY))
    return local_host in (host, wildcard_like(host)) or (local_host == "::" and takes_ipv4)


def conflicts(one: Socket, two: Socket) -> bool:
    """Return whether the local addresses of the two sockets conflict (EADDRINUSE)."""
    (one_host, one_port), (two_host, two_port) = one._local, two._local
    overlap = one_port == two_port and (
        accepts_address(one, two_host) or accepts_address(two, one_host)
    )
    return overlap and not all(it._options.get((SOL_SOCKET, SO_REUSEPORT)) for it in (one, two))


def send_connect_request(initiator: Socket, responder: Host, until: float) -> None:
    """Send a connection request every second. Fail with ETIMEDOUT at the virtual time `until`."""
    machine = initiator._machine
    initiator._request_timer = machine.loop.call_later(
        1, send_connect_request, initiator, responder, until
    )
    if machine.now >= until:
        initiator._finish_connect(errno.ETIMEDOUT)
    elif not machine.world._is_cut(machine.host, responder, initiator._network):
        delay = machine.world._latency(machine.host, responder)
        responder._machine.loop.call_at(
            machine.now + delay, handle_connect_request, initiator, responder._machine
        )


def handle_connect_request(initiator: Socket, responder: Machine) -> None:
    """Respond to a connection request that has arrived, or drop it if the backlog is full."""
    # The initiator may have given up, or this may be a repeated request that has been accepted.
    if (
        initiator._request_timer is None
        or initiator._peer_socket is not None
        or initiator._peer is None
    ):
        return
    host, port = initiator._peer
    listeners = [it for it in responder.bound if it._backlog >= 0 and it._local[1] == port]
    found = [it for it in listeners if accepts_address(it, host)]
    # Let a listener on "::" accept IPv4 connections even if it has set IPV6_V6ONLY. Otherwise no
    # other host could reach it, because host names resolve only to IPv4 addresses.
    found = found or [it for it in listeners if it._local[0] == "::"]
    if found:
        listening = responder.random.choice(found)
        if len(listening._accept_queue) > listening._backlog:
            return
        initiator._peer_socket = accepted = Socket(listening.family)
        accepted._local, accepted._peer, accepted._peer_socket = (
            initiator._peer,
            initiator._local,
            initiator,
        )
        accepted._network = initiator._network
        if not listening._accept_queue:
            # Make the listening socket readable, so that the loop calls `accept`.
            listening._simulation_socket.send(b"1")
        listening._accept_queue.append(accepted)
    elif listeners:
        only = ", ".join(it._local[0] for it in listeners)
        initiator.hint = (
            f"; {responder.host.name!r} listens only on {only}, which other hosts cannot reach"
        )
    code = 0 if found else errno.ECONNREFUSED
    delay = responder.world._latency(responder.host, initiator._machine.host)
    initiator._machine.loop.call_at(responder.now + delay, initiator._finish_connect, code)


class _SocketType(type):
    def __instancecheck__(cls, it: object) -> bool:
        """Return True for every real socket, because `Socket` replaces `socket.socket`."""
        return isinstance(it, RealSocket)


class Socket(RealSocket, metaclass=_SocketType):
    """A TCP socket of a simulated host. It follows the kernel's rules for non-blocking sockets."""

    def __new__(cls, family: int = -1, type: int = -1, proto: int = -1, fileno: Any = None) -> Any:
        """Create a socket. It is real if `fileno` is given or no simulated host is running."""
        if fileno is not None or current_machine() is None:
            return RealSocket(family, type, proto, fileno)
        kind = SOCK_STREAM if type == -1 else type & ~(socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        if family not in (-1, AF_INET, AF_INET6) or kind != SOCK_STREAM:
            names = f"{socket.AddressFamily(family).name}, {socket.SocketKind(kind).name}"
            refuse(f"sockets of {names}", "only TCP and the devices are simulated")
        return super().__new__(cls)

    def __init__(
        self, family: int = -1, type: int = -1, proto: int = -1, fileno: Any = None
    ) -> None:
        own, self._simulation_socket = socket.socketpair()
        super().__init__(
            AF_INET if family == -1 else family, SOCK_STREAM, max(proto, 0), own.detach()
        )
        super().setblocking(False)
        self._simulation_socket.setblocking(False)
        # Use the smallest send buffer, because `_make_unwritable` fills it.
        super().setsockopt(SOL_SOCKET, socket.SO_SNDBUF, len(FILLER))
        machine = current_machine()
        assert machine is not None
        self._machine = machine
        self._blocks = True
        self._options: dict[tuple[int, int], Any] = {}
        self._local: Address = "::" if self.family == AF_INET6 else "0.0.0.0", 0
        self._peer: Address | None = None
        self._backlog = -1  # -1 if not listening
        self._accept_queue: deque[Socket] = deque()
        self._request_timer: asyncio.TimerHandle | None = None  # timer that repeats the request
        self._error = 0
        self.hint = ""
        """The reason why nothing listens at the peer's address, for the error message."""
        self._network = 0
        self._peer_socket: Socket | None = None
        self._last_arrival = 0.0
        self._in_transit: deque[tuple[float, bytes | None]] = deque()  # (time of arrival, data)
        self._window = WINDOW
        self._has_ended = False  # true once sending has been shut down

    # ---- options and names ---------------------------------------------------------------

    def setblocking(self, flag: bool) -> None:
        self._blocks = flag
        check_blocking(self)

    def settimeout(self, value: float | None) -> None:
        self.setblocking(value != 0)

    def setsockopt(self, level: int, name: int, value: Any, *_: Any) -> None:
        self._options[level, name] = value

    def getsockopt(self, level: int, name: int, *_: int) -> Any:
        """Return an option that was set, the pending error, or the kernel's default."""
        if (level, name) in self._options:
            return self._options[level, name]
        if (level, name) != (SOL_SOCKET, socket.SO_ERROR):
            return super().getsockopt(level, name) if level == SOL_SOCKET else 0
        code, self._error = self._error, 0
        return code

    def getsockname(self) -> Any:
        return socket_name(self.family, self._local)

    def getpeername(self) -> Any:
        if self._peer is None:
            raise failure(errno.ENOTCONN)
        return socket_name(self.family, self._peer)

    # ---- listening -----------------------------------------------------------------------

    def bind(self, address: Any) -> None:
        host, port = resolve("bind", address, self)
        if self._local[1]:  # the socket is already bound
            raise failure(errno.EINVAL)
        if not (host in WILDCARDS or is_loopback(host) or host in self._machine.host._addresses):
            raise failure(errno.EADDRNOTAVAIL)
        self._take_port(host, port)

    def _take_port(self, host: str, port: int) -> None:
        """Bind to the port, or to a random free port if `port` is 0."""
        machine, before = self._machine, self._local
        while True:
            self._local = host, port or machine.random.randint(*EPHEMERAL_PORTS)
            if not any(conflicts(self, bound) for bound in machine.bound):
                machine.bound.append(self)
                return
            if port:
                self._local = before
                raise failure(errno.EADDRINUSE)

    def listen(self, backlog: int = socket.SOMAXCONN) -> None:
        if not self._local[1]:
            self._take_port(self._local[0], 0)
        self._backlog = max(backlog, 0)

    def accept(self) -> tuple[Socket, Any]:
        check_blocking(self)
        if self._backlog < 0 or not self._accept_queue:
            raise failure(errno.EINVAL if self._backlog < 0 else errno.EAGAIN)
        accepted = self._accept_queue.popleft()
        if not self._accept_queue:
            self.recv(1)  # remove the byte that made this listening socket readable
        return accepted, accepted.getpeername()

    # ---- connecting ----------------------------------------------------------------------

    def connect(self, address: Any) -> None:
        if code := self.connect_ex(address):
            raise failure(code)

    def connect_ex(self, address: Any) -> int:
        """Start connecting with the default timeout of Linux, and return an errno value."""
        check_blocking(self)
        if self._request_timer is not None or self._peer_socket is not None:
            return errno.EISCONN if self._request_timer is None else errno.EALREADY
        host, port = resolve("connect", address, self)
        host = WILDCARDS.get(host, host)
        machine = self._machine
        found = machine.world._host_at(host, machine.host)
        if found is None:
            return errno.ENETUNREACH
        responder, self._network = found
        local_host, local_port = self._local
        if local_host in WILDCARDS:
            local_host = (
                WILDCARDS[wildcard_like(host)]
                if is_loopback(host)
                else machine.host._addresses[self._network]
            )
        # As in the kernel, a socket with a loopback address cannot reach another host.
        elif is_loopback(local_host) and responder is not machine.host:
            return errno.EINVAL
        if not local_port:
            self._take_port(local_host, 0)
        self._local, self._peer = (local_host, self._local[1]), (host, port)
        self._make_unwritable()
        send_connect_request(self, responder, machine.now + CONNECT_TIMEOUT)
        return errno.EINPROGRESS

    def _finish_connect(self, code: int) -> None:
        """Report the result of connecting: make the socket writable, and set SO_ERROR."""
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer, self._error = None, code
            self._make_writable()

    # ---- a connection --------------------------------------------------------------------

    def send(self, data: Any, _: int = 0) -> int:
        """Send as much data as the window allows, and return the number of bytes."""
        if self._peer_socket is None or self._has_ended or self._simulation_socket.fileno() < 0:
            raise failure(errno.EPIPE)
        accepted_bytes = bytes(data[: self._window])
        self._window -= len(accepted_bytes)
        if len(accepted_bytes) < len(data):
            self._make_unwritable()
        if accepted_bytes:
            self._peer_socket._transmit(accepted_bytes)
        elif data:
            raise failure(errno.EAGAIN)
        return len(accepted_bytes)

    def sendall(self, data: Any, _: int = 0) -> None:
        if self.send(data) < len(data):
            raise failure(errno.EAGAIN)

    def sendmsg(self, buffers: Any, *_: Any) -> int:
        return self.send(b"".join(buffers))

    def _make_unwritable(self) -> None:
        """Make the real socket unwritable by filling the kernel's send buffer."""
        with suppress(OSError):  # it is already full or closed
            super().send(FILLER)

    def _make_writable(self) -> None:
        with suppress(OSError):
            while self._simulation_socket.recv(len(FILLER)):
                pass

    def _on_acknowledged(self, count: int) -> None:
        """Make room in the window after the peer has received `count` bytes."""
        if not self._window:
            self._make_writable()
        self._window += count

    def shutdown(self, how: int) -> None:
        if self._peer_socket is None:
            raise failure(errno.ENOTCONN)
        if how != socket.SHUT_WR:
            # The program reads what the simulation's socket writes. Closing the write side there
            # ends the program's reading.
            self._simulation_socket.shutdown(socket.SHUT_WR)
        if how != socket.SHUT_RD and not self._has_ended:
            self._has_ended = True
            self._peer_socket._transmit(b"")

    def detach(self) -> NoReturn:
        refuse("file descriptors of TCP sockets", "use the socket object")

    dup = detach

    def close(self) -> None:
        """Close the socket. Reset the connection if it is being established or has unread data."""
        if self.fileno() >= 0:
            needs_reset: object = self._request_timer
            with suppress(OSError):
                needs_reset = needs_reset or self.recv(1, MSG_PEEK)
            self._end_connection(reset=bool(needs_reset))
            for waiting in self._accept_queue:
                waiting._end_connection(reset=True)
                waiting.close()
        super().close()

    def _end_connection(self, *, reset: bool) -> None:
        """Stop, and send the peer a reset or, unless it has been sent, the end of the stream."""
        self._stop()
        if self._peer_socket is not None and (reset or not self._has_ended):
            self._peer_socket._transmit(None if reset else b"")
        self._has_ended = True

    def _stop(self) -> None:
        """Stop connecting and receiving, and release the port."""
        if self._request_timer is not None:
            self._request_timer.cancel()
        if self in self._machine.bound:
            self._machine.bound.remove(self)
        if self._simulation_socket.fileno() >= 0:
            self._machine.loop.remove_writer(self._simulation_socket)
            self._simulation_socket.close()

    def _reset(self) -> None:
        # The kernel resets this end when the other end is closed with unread data.
        self._make_unwritable()
        self._stop()

    def _transmit(self, data: bytes | None) -> None:
        """Schedule the arrival of data that the peer has sent to this socket.

        Empty data ends the stream, and None resets the connection.
        """
        machine, sender = self._machine, self._peer_socket
        assert sender is not None
        if not machine.alive:  # the host of this socket was killed
            sender._reset_after_reboot(RETRY_DELAY)
            return
        delay = machine.world._latency(sender._machine.host, machine.host)
        self._last_arrival = max(machine.now + delay, self._last_arrival)
        self._in_transit.append((self._last_arrival, data))
        machine.loop.call_at(self._last_arrival, self._receive)

    def _reset_after_reboot(self, delay: float) -> None:
        """Reset this socket when the peer's killed host has rebooted, or after 205 seconds.

        `delay` is the time until the next retry. It doubles each time, as in TCP.
        """
        assert self._peer_socket is not None
        if self._simulation_socket.fileno() < 0:  # this socket has been closed
            return
        if delay < MAX_RETRY_DELAY and not self._peer_socket._machine.host.alive:
            self._machine.loop.call_later(delay, self._reset_after_reboot, 2 * delay)
        else:
            self._reset()

    def _receive(self) -> None:
        """Pass the data that has arrived to the program, and acknowledge it to the sender."""
        machine, sender = self._machine, self._peer_socket
        assert sender is not None
        if self._simulation_socket.fileno() < 0:  # this socket has been closed
            if any(data for _, data in self._in_transit):  # reset the sender, as the kernel does
                sender._transmit(None)
            self._in_transit.clear()
            return
        machine.loop.remove_writer(self._simulation_socket)
        while self._in_transit and self._in_transit[0][0] <= machine.now + TIMER_TOLERANCE:
            if machine.world._is_cut(sender._machine.host, machine.host, self._network):
                machine.loop.call_later(RETRY_DELAY, self._receive)
                return
            due, data = self._in_transit.popleft()
            if data is None:
                self._reset()
                return
            if not data:
                self._simulation_socket.shutdown(socket.SHUT_WR)
                continue
            try:
                accepted_bytes = self._simulation_socket.send(data)
            except BlockingIOError:
                accepted_bytes = 0
            except BrokenPipeError:  # reading has been shut down
                accepted_bytes = len(data)
            if accepted_bytes:
                delay = machine.world._latency(machine.host, sender._machine.host)
                sender._machine.loop.call_at(
                    machine.now + delay, sender._on_acknowledged, accepted_bytes
                )
            if accepted_bytes < len(data):  # the rest is sent after the program has read
                self._in_transit.appendleft((due, data[accepted_bytes:]))
                machine.loop.add_writer(self._simulation_socket, self._receive)
                return


def check_simulated(sock: Any) -> None:
    """Refuse real sockets other than Unix sockets, which `socket.socketpair` creates."""
    if type(sock) is not Socket and sock.family != socket.AF_UNIX:
        refuse("real sockets", "create the socket in a program of the host")
