"""The listening ports of a listener: one for each address of its name, with the same number."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ..errors import AddressError, host_port
from .lifecycle import Address

logger = logging.getLogger("aiordma.transport")

# Port numbers that are tried until one is free at every address.
TRIES = 32

# This machine has no such address now, or no device for it: another address of the name may do.
NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV})


class Port(Protocol):
    """What listens on one address, in one way of connecting."""

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
        for host, port in addresses:
            try:
                ports.append(make((host, port or (ports[0].address[1] if ports else 0))))
            except AddressError as error:
                if error.errno not in NOT_HERE:
                    raise
                failure = failure or error
                logger.info("not listening on %s: %s", host_port((host, port)), error)
    except BaseException:
        for opened in ports:
            opened.release()
        raise
    if not ports:
        assert failure is not None
        raise failure
    return ports
