"""A stand-in for a stream's socket, which provides addresses and options.

Programs ask a transport for its socket to get addresses, to set options, or to check whether an
idle connection is still usable. As in asyncio, they get a `TransportSocket`, but it wraps an object
from this module instead of a real socket.
"""

from __future__ import annotations

import errno
import os
import socket
from asyncio.trsock import TransportSocket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..transport import Address

SocketName = tuple[str, int] | tuple[str, int, int, int]

# Socket options that are accepted but have no effect on a stream, with their initial values. A
# connection always sends without delay, and `Config.keep_alive` configures its keep-alive.
SOCKET_OPTIONS = "SO_KEEPALIVE SO_REUSEADDR SO_REUSEPORT SO_PRIORITY SO_RCVBUF SO_SNDBUF"
TCP_OPTIONS = "KEEPIDLE KEEPINTVL KEEPCNT QUICKACK USER_TIMEOUT CORK NOTSENT_LOWAT"
IGNORED_OPTIONS: dict[tuple[int, int], int] = {
    **{(socket.SOL_SOCKET, getattr(socket, name)): 0 for name in SOCKET_OPTIONS.split()},
    **{(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}")): 0 for name in TCP_OPTIONS.split()},
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
}
READ_ONLY_OPTIONS = {
    (socket.SOL_SOCKET, socket.SO_ERROR): 0,
    (socket.SOL_SOCKET, socket.SO_TYPE): int(socket.SOCK_STREAM),
}


def socket_name(address: Address | None) -> SocketName | None:
    """Return an address in the format used by sockets.

    An IPv4 address becomes (host, port). An IPv6 address becomes (host, port, flow, scope).
    """
    if address is None or ":" not in address[0]:
        return address
    host, port = address
    scope = host.partition("%")[2]
    return host, port, 0, int(scope) if scope.isdecimal() else 0


def unsupported_error(what: str, number: int, instead: str) -> OSError:
    return OSError(number, f"{what} is not supported by a stream over RDMA; {instead}")


class StreamSocket:
    """The object that a stream's `TransportSocket` wraps instead of a real socket."""

    type: int = socket.SOCK_STREAM
    proto: int = socket.IPPROTO_TCP

    def __init__(
        self, local: Address | None, peer: Address | None, is_readable: Callable[[], bool]
    ) -> None:
        self._local, self._peer = local, peer
        self.family = socket.AF_INET6 if ":" in (local or peer or ("", 0))[0] else socket.AF_INET
        self._is_readable = is_readable
        self._options: dict[tuple[int, int], Any] = {}
        self._fd = -1
        self._closed = False

    def getsockname(self) -> SocketName | None:
        """Return the local address."""
        return socket_name(self._local)

    def getpeername(self) -> SocketName | None:
        """Return the peer's address.

        Raises:
            OSError: If there is no peer. The error's `errno` is ENOTCONN.
        """
        if self._peer is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return socket_name(self._peer)

    def fileno(self) -> int:
        """Return a file descriptor that is readable if the stream has data or has ended.

        HTTP clients use the descriptor to check whether an idle connection is still usable. The
        descriptor reflects the stream's state at the time of this call. It cannot be used to read
        data. Returns -1 if the stream is closed.
        """
        if self._closed:
            return -1
        if self._fd < 0:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with suppress(BlockingIOError):  # the counter is already 0
            os.eventfd_read(self._fd)
        if self._is_readable():
            os.eventfd_write(self._fd, 1)
        return self._fd

    def close(self) -> None:
        """Close the file descriptor and release the stream. The addresses remain available."""
        self._closed = True
        self._is_readable = bool  # returns False, and does not refer to the stream
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def getsockopt(self, level: int, option: int, buflen: int = 0) -> Any:
        """Return the value an option was set to, or the default for a new socket.

        Raises:
            OSError: If streams do not support the option. The error's `errno` is ENOPROTOOPT.
        """
        key = (level, option)
        known = {**IGNORED_OPTIONS, **READ_ONLY_OPTIONS, **self._options}
        if key not in known:
            raise self._unknown(key)
        return known[key]

    def setsockopt(self, level: int, option: int, value: Any, optlen: int = 0) -> None:
        """Store an option's value. Common options are accepted, but have no effect on the stream.

        Raises:
            OSError: If streams do not accept the option. The error's `errno` is ENOPROTOOPT.
        """
        key = (level, option)
        if key not in IGNORED_OPTIONS:
            raise self._unknown(key)
        self._options[key] = value

    def _unknown(self, key: tuple[int, int]) -> OSError:
        return unsupported_error(
            f"socket option {key}", errno.ENOPROTOOPT, "use aiordma.Config instead"
        )

    def get_inheritable(self) -> bool:
        """Return False, because child processes do not inherit streams."""
        return False

    def shutdown(self, how: int) -> None:
        """Raise OSError with EOPNOTSUPP. Streams do not support this operation."""
        raise unsupported_error(
            "shutdown", errno.EOPNOTSUPP, "use the transport's write_eof() instead"
        )

    def dup(self) -> socket.socket:
        """Raise OSError with EOPNOTSUPP. Streams do not support this operation."""
        raise unsupported_error("dup", errno.EOPNOTSUPP, "the stream has no socket to duplicate")


def transport_socket(
    local: Address | None,
    peer: Address | None = None,
    is_readable: Callable[[], bool] = lambda: False,
) -> tuple[StreamSocket, TransportSocket]:
    """Create a `StreamSocket`, and a `TransportSocket` that wraps the `StreamSocket`."""
    made: Any = StreamSocket(local, peer, is_readable)
    return made, TransportSocket(made)
