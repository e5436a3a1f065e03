"""Bounded places for peers that have proved nothing yet, shared out among their networks.

One rule for sockets that have sent nothing (first_bytes.py) and for handshakes (acceptor.py): a new
peer is let in, and when there is no place, another one goes for it.  The embedded device has it in
C (native/softdev/engine/fair_share.c).
"""

from __future__ import annotations

import random
import resource
import socket
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

Networks = tuple[str, ...]
"""Nested networks of an address, the largest first; the last one is what counts as one host."""

# A network that has more than one in so many of all places loses its own peers first.
# Chosen by judgement: several such networks are needed to press upon the others.
SHARE = 8

# All places of a kind are at most one in so many of the descriptors that the process may have.
SHARE_OF_FILES = 8

IPV6_PREFIXES = (48, 56, 64)
"""Bits: what a provider assigns to one customer (RFC 6177), and the network of a host, which has
all the other bits (RFC 4291)."""


def networks_of(host: str) -> Networks:
    """The /48, /56 and /64 of an IPv6 address; the /24 of an IPv4 address, and itself.

    A link-local or loopback address of IPv6 is alone: its network is the same for all of them.
    """
    numeric = host.partition("%")[0]
    if "." in numeric:
        ipv4 = numeric.removeprefix("::ffff:")  # of a socket that takes both
        return f"{ipv4.rpartition('.')[0]}.0/24", ipv4
    raw = socket.inet_pton(socket.AF_INET6, numeric) if numeric else b""
    if not any(raw[:8]) or raw[0] == 0xFE:
        return (numeric,)
    return tuple(
        f"{socket.inet_ntop(socket.AF_INET6, raw[: bits // 8].ljust(16, bytes(1)))}/{bits}"
        for bits in IPV6_PREFIXES
    )


def places(wanted: int) -> int:
    """As many as wanted, if the process may have descriptors for them."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, files // SHARE_OF_FILES))


def setting(limit: int) -> str:
    """The setting that decides on a limit of `places`, for errors."""
    return f"{limit}: Config.max_handshakes there, or an eighth of its descriptors"


class NoRoomError(Exception):
    """Every place is taken by a peer that does not go for this one."""


class FairShare(Generic[T]):
    """Peers in the order of their age, at most `limit` of them, and which one goes for a new one.

    That is one of the fullest network, if it has more than its share, and within it of the fullest
    smaller network that has more than a share, and so on; else any one.  It is drawn by lot: the
    oldest one would be that of an honest client as soon as `limit` others come within the time of
    its handshake.  Peers that have proved themselves (`proved`) go only for a peer of another
    network, and only if their own has more than its share.
    """

    def __init__(
        self, limit: int, *, proved: bool = False, draw: Callable[[int], int] = random.randrange
    ) -> None:
        """`draw` returns a random number that is less than its argument."""
        self.limit = limit
        self._proved = proved
        self._draw = draw
        self._share = max(1, limit // SHARE)
        self._networks_of: dict[T, Networks] = {}
        # Of each network by its place among the nested ones; () has all, oldest first.
        self._peers: dict[Networks, dict[T, None]] = {(): {}}
        self._full: dict[Networks, None] = {}  # those of them with a share or more, without ()

    def __len__(self) -> int:
        return len(self._networks_of)

    def __iter__(self) -> Iterator[T]:
        """Oldest first."""
        return iter(self._networks_of)

    def make_room(self, networks: Networks) -> T | None:
        """Removes and returns the peer to be evicted if the table is full, else None.

        To be called before `add`.  NoRoomError if none goes for a peer of these networks.
        """
        if len(self) < self.limit:
            return None

        def size(network: Networks) -> int:
            return len(self._peers[network]) + (networks[: len(network)] == network)

        fullest: Networks = ()
        while inner := [
            network
            for network in self._full
            if network[:-1] == fullest and size(network) > self._share
        ]:
            fullest = max(inner, key=size)
        if self._proved and networks[: len(fullest)] == fullest:
            raise NoRoomError
        peers = self._peers[fullest]
        goes = next(islice(peers, self._draw(len(peers)), None))
        self.remove(goes)
        return goes

    def add(self, peer: T, networks: Networks) -> None:
        """After `make_room`."""
        self._networks_of[peer] = networks
        for depth in range(len(networks) + 1):
            network = networks[:depth]
            peers = self._peers.setdefault(network, {})
            peers[peer] = None
            if depth and len(peers) >= self._share:
                self._full[network] = None

    def remove(self, peer: T) -> None:
        """Does nothing for a peer that has gone already."""
        networks = self._networks_of.pop(peer, None)
        if networks is None:
            return
        for depth in range(len(networks) + 1):
            network = networks[:depth]
            peers = self._peers[network]
            del peers[peer]
            if len(peers) < self._share:
                self._full.pop(network, None)
            if depth and not peers:
                del self._peers[network]
