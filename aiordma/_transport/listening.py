"""The ports of a listener, which has one for each address, all with the same number."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ..cm.address import Address
from ..errors import AddressError, host_port

logger = logging.getLogger("aiordma.transport")

# Maximum number of attempts to find a port number that is free on all addresses.
TRIES = 32

# These errors mean that this machine does not currently have the address, or has no device for it.
# The host's other addresses may still work.
NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV})


class Port(Protocol):
    """A listener on one address with one connection method."""

    address: Address

    def release(self) -> None:
        """Stop listening. Can also be called after the loop has been closed."""


P = TypeVar("P", bound=Port)


def open_ports(open_port: Callable[[Address], P], addresses: Sequence[Address]) -> list[P]:
    """Listen on the addresses that belong to this machine. Raises if it has none of them.

    If the port is 0, the system chooses a number for the first address. If this number is in use on
    another address, a different number is tried.
    """
    distinct = list(dict.fromkeys(addresses))
    for attempts_left in reversed(range(TRIES)):
        try:
            return _open_once(open_port, distinct)
        except AddressError as error:
            system_chose_port = distinct[0][1] == 0 and len(distinct) > 1
            if error.errno != errno.EADDRINUSE or not system_chose_port or not attempts_left:
                raise
    raise AssertionError("unreachable")


def _open_once(open_port: Callable[[Address], P], addresses: Sequence[Address]) -> list[P]:
    """Open a port on each address, except for addresses that this machine does not have.

    All addresses without a port number get the number of the first port.
    """
    ports: list[P] = []
    failure: AddressError | None = None
    try:
        for host, requested_port in addresses:
            port = requested_port or (ports[0].address[1] if ports else 0)
            try:
                ports.append(open_port((host, port)))
            except AddressError as error:
                if error.errno == errno.EADDRNOTAVAIL and port and is_local_address(host):
                    raise _port_in_use_error(host, port) from error
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
        del failure  # its traceback refers to this frame
    return ports


def is_local_address(host: str) -> bool:
    """Return whether an address belongs to this machine, by binding a socket to it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def _port_in_use_error(host: str, port: int) -> AddressError:
    """Return the error for a port that is in use.

    The connection manager reports EADDRNOTAVAIL instead of EADDRINUSE if either this listener or
    the one that uses the port is bound to the wildcard address.
    """
    text = f"cannot bind to {host_port((host, port))}: the port is already in use"
    return AddressError(text, status=-errno.EADDRINUSE)
