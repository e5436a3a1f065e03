"""The listening ports of a listener: one for each address of its name, with the same number."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ..cm.address import Address
from ..errors import AddressError, host_port

logger = logging.getLogger("aiordma.transport")

# Port numbers that are tried until one is free at every address.
TRIES = 32

# This machine has no such address now, or no device for it: another address of the name may do.
NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV})


class Port(Protocol):
    """A listener on one address, for one way of connecting."""

    address: Address

    def release(self) -> None:
        """Listens no more; all there is to do when the loop has been closed."""


P = TypeVar("P", bound=Port)


def open_ports(make: Callable[[Address], P], addresses: Sequence[Address]) -> list[P]:
    """Listens on every address; those that are not of this machine are left out, unless all are.

    Where port 0 is asked for, the first address chooses the number, and another one if that number
    is in use at the other addresses.
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
                logger.info("not listening on %s: %s", host_port((host, port)), error)
    except BaseException:
        for opened in ports:
            opened.release()
        raise
    try:
        if not ports:
            assert failure is not None
            raise failure
    finally:
        del failure  # its frames have this one
    return ports


def is_here(host: str) -> bool:
    """Whether an address is one of this machine: a port of it can be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def _taken(host: str, port: int) -> AddressError:
    """In place of EADDRNOTAVAIL, by which the connection manager means this as well.

    So it tells a port that is taken where one of the two listens on all addresses.
    """
    text = f"cannot bind to {host_port((host, port))}: the port is in use"
    return AddressError(text, status=-errno.EADDRINUSE)
