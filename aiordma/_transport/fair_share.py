"""Bounded places for peers that have proved nothing yet, shared out among their hosts.

One rule for sockets that have sent nothing (first_bytes.py) and for handshakes (acceptor.py), which
the embedded device has in C (native/softdev/engine/fair_share.c): a new peer is let in, and when
there is no place, another one goes for it.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

# A host that has more than one in so many of all places loses its own oldest peer first.
# Chosen by judgement: several such hosts are needed to press upon the others.
SHARE = 8

# All places of a kind are at most one in so many of the descriptors that the process may have.
SHARE_OF_FILES = 8

IPV6_NETWORK = 8
"""Bytes of the network part of an IPv6 address, of which a host has all the rest (RFC 4291)."""


def network_of(host: str) -> str:
    """What counts as one host: an IPv4 address, the network of an IPv6 address.

    A link-local or loopback address is itself: its network is the same for all of them.
    """
    numeric = host.partition("%")[0]
    if ":" not in numeric:
        return numeric
    raw = socket.inet_pton(socket.AF_INET6, numeric)
    if raw[0] == 0xFE or not any(raw[:IPV6_NETWORK]):
        return numeric
    return socket.inet_ntop(socket.AF_INET6, raw[:IPV6_NETWORK].ljust(16, b"\0")) + "/64"


def places(wanted: int) -> int:
    """As many as wanted, if the process may have descriptors for them."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, files // SHARE_OF_FILES))


def setting(limit: int) -> str:
    """What decides on a limit of `places`, for errors."""
    return f"{limit}: Config.max_handshakes there, or an eighth of its descriptors"


class NoRoomError(Exception):
    """Every place is taken by a peer that does not go for this one."""


class FairShare(Generic[T]):
    """Peers in the order of their age, at most `limit` of them, and which one goes for a new one.

    That is the oldest one of the host with most of them, if it has more than its share, else the
    oldest of all.  Peers that have proved themselves (`proved`) go only for a peer of another host,
    and if their own has more than its share.
    """

    def __init__(self, limit: int, *, proved: bool = False) -> None:
        self.limit = limit
        self._proved = proved
        self._share = max(1, limit // SHARE)
        self._host_of: dict[T, str] = {}  # oldest first, as those of each host
        self._hosts: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._host_of)

    def __iter__(self) -> Iterator[T]:
        """Oldest first."""
        return iter(self._host_of)

    def make_room(self, host: str) -> T | None:
        """Before `add`: the peer that goes, already removed; None if there is a place.

        NoRoomError if none goes for a peer of this host.
        """
        if len(self) < self.limit:
            return None
        heaviest = max(self._hosts, key=lambda name: len(self._hosts[name]) + (name == host))
        beyond = len(self._hosts[heaviest]) + (heaviest == host) > self._share
        if self._proved and (heaviest == host or not beyond):
            raise NoRoomError
        goes = next(iter(self._hosts[heaviest] if beyond else self))
        self.remove(goes)
        return goes

    def add(self, peer: T, host: str) -> None:
        """After `make_room`."""
        self._host_of[peer] = host
        self._hosts.setdefault(host, {})[peer] = None

    def remove(self, peer: T) -> None:
        """Does nothing for a peer that has gone already."""
        host = self._host_of.pop(peer, None)
        if host is None:
            return
        del self._hosts[host][peer]
        if not self._hosts[host]:
            del self._hosts[host]
