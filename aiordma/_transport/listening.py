"""The listening ports of a listener: one for each address, with the same port number."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ..cm.address import Address
from ..errors import AddressError, host_port

logger = logging.getLogger("aiordma.transport")

# At most this many port numbers are tried until one is free on every address.
TRIES = 32

# These errors mean that this machine does not have the address now, or has no device for it.
# Another address of the host may work.
NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV})


class Port(Protocol):
    """A listener on one address with one connection method."""

    address: Address

    def release(self) -> None:
        """Stop listening. After the loop has been closed, nothing else is necessary."""


P = TypeVar("P", bound=Port)


def open_ports(make: Callable[[Address], P], addresses: Sequence[Address]) -> list[P]:
    """Listen on all addresses that belong to this machine. Raises if there is none.

    For port 0, the first address chooses the port number. If it is in use at another address, a
    different number is tried.
    """
    distinct = list(dict.fromkeys(addresses))
    for left in reversed(range(TRIES)):
        try:
            return _open_once(make, distinct)
        except AddressError as error:
            chosen = distinct[0][1] == 0 and len(distinct) > 1
            if error.errno != errno.EADDRINUSE or not chosen or not left:
                raise
    raise AssertionError("unreachable")


def _open_once(make: Callable[[Address], P], addresses: Sequence[Address]) -> list[P]:
    ports: list[P] = []
    failure: AddressError | None = None
    try:
        for host, asked in addresses:
            port = asked or (ports[0].address[1] if ports else 0)
            try:
                ports.append(make((host, port)))
            except AddressError as error:
                if error.errno == errno.EADDRNOTAVAIL and port and is_here(host):
                    raise _taken(host, port) from error
                if error.errno not in NOT_HERE:
                    raise
                failure = failure or error
                logger.info("cannot listen on %s: %s", host_port((host, port)), error)
    except BaseException:
        for opened in ports:
            opened.release()
        raise
    try:
        if not ports:
            assert failure is not None
            raise failure
    finally:
        del failure  # its frames refer to this frame
    return ports


def is_here(host: str) -> bool:
    """Return whether an address belongs to this machine, which is so if a port can be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def _taken(host: str, port: int) -> AddressError:
    """Return the error for a port in use, for which the connection manager gave EADDRNOTAVAIL.

    It does so if one of the two listeners listens on all addresses.
    """
    text = f"cannot bind to {host_port((host, port))}: the port is already in use"
    return AddressError(text, status=-errno.EADDRINUSE)
