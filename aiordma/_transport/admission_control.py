"""Admission control of a listener: the peers that get a place, lose one, or are turned away.

Three rules, and their numbers, for peers that have proved nothing yet:

- Silence (`SilentSockets`): an accepted socket whose peer has to send something, its first bytes
  or a ticket for a challenge, costs a descriptor and a timer: no task, no transport, no queue pair,
  and no place among the handshakes.
- Host share (`FairShare`): sockets that are silent, and handshakes, have bounded places.  A new
  peer is let in, and when there is no place, another one is evicted for it, of a network that has
  more than its share if there is one.  The embedded device has the rule in C
  (softdev/src/engine/fair_share.c).
- Failures (`FailureLimit`): handshakes that fail for want of the key are limited, of each host and
  in all, by buckets of tokens.  A failure takes a token, time brings them back, and a proof fills
  its host's bucket.  A host without a token is turned away until there is one.  When the common
  bucket is empty, so is every host that has failed lately, while others are still let in: a peer
  keeps out nothing but itself and its own host, and an attacker gets one try from each address.
"""

from __future__ import annotations

import asyncio
import random
import resource
import socket
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from .._loop.driver import Watch
from .._native import fork
from ..cm.address import Address
from ..config import Config

T = TypeVar("T", bound=Hashable)

Networks = tuple[str, ...]
"""Nested networks of an address, the largest first; the last one is what counts as one host."""

# The numbers are chosen by judgement.

# A network that has more than one in so many of all places loses its own peers first: several such
# networks are needed to press upon the others.
SHARE = 8

# All places of a kind are at most one in so many of the descriptors that the process may have.
SHARE_OF_FILES = 8

# A socket may be silent for one in so many parts of `Config.handshake_timeout`.
SHARE_OF_TIMEOUT = 5

# Failures of one host at once, and further ones in a second; the same in all.  A program with a
# wrong key that is started again and again is told so each time.
HOST_BURST = 16
HOST_RATE = 2.0
TOTAL_BURST = 256
TOTAL_RATE = 32.0

# Hosts that are remembered; the one that failed longest ago is forgotten first.
MAX_HOSTS = 4096

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
    try:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except OSError:  # a seccomp filter denies the call
        return wanted
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


def _speaks(accepted: socket.socket) -> bool:
    """Whether there is something to read: bytes, the end or an error."""
    try:
        accepted.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class _SilentSocket:
    """An accepted socket on which nothing has come yet."""

    def __init__(
        self, sockets: SilentSockets, accepted: socket.socket, when_readable: Callable[[], None]
    ) -> None:
        self._sockets = sockets
        self._socket = accepted
        self._when_readable = when_readable
        self._inode = fork.add_socket(accepted.fileno())
        self._watch = Watch(accepted.fileno(), self._readable)
        self._timer = asyncio.get_running_loop().call_later(sockets.timeout, self.close)

    def _readable(self) -> None:
        self._stop()
        self._when_readable()

    def _stop(self) -> None:
        self._sockets.forget(self)
        self._timer.cancel()
        self._watch.close()
        fork.remove_socket(self._inode)

    def close(self) -> None:
        self._stop()
        self._socket.close()


class SilentSockets:
    """Passes sockets on when bytes are there; closes those that stay silent."""

    def __init__(self, config: Config) -> None:
        self.timeout = config.handshake_timeout / SHARE_OF_TIMEOUT
        self._waiting: FairShare[_SilentSocket] = FairShare(places(config.max_handshakes))

    def add(
        self, accepted: socket.socket, address: Address, when_readable: Callable[[], None]
    ) -> None:
        """Takes over an accepted socket until `when_readable` is called.

        If there is no room, another one is closed for it.
        """
        if _speaks(accepted):
            when_readable()
            return
        networks = networks_of(address[0])
        evicted = self._waiting.make_room(networks)
        if evicted is not None:
            evicted.close()
        self._waiting.add(_SilentSocket(self, accepted, when_readable), networks)

    def drop_oldest(self) -> bool:
        """Closes the oldest one, for its descriptor; False if there is none."""
        oldest = next(iter(self._waiting), None)
        if oldest is not None:
            oldest.close()
        return oldest is not None

    def forget(self, silent: _SilentSocket) -> None:
        self._waiting.remove(silent)

    def close(self) -> None:
        while self.drop_oldest():
            pass


@dataclass
class Bucket:
    """Tokens, which come back with time; it owes at most a burst of them."""

    burst: int
    rate: float
    full_at: float
    """The time at which all tokens are back, by the event loop."""
    reported: bool = False
    """Whether the log says already that the bucket is empty."""

    def take(self, now: float) -> None:
        self.full_at = max(self.full_at, now) + 1 / self.rate
        self.full_at = min(self.full_at, now + 2 * self.burst / self.rate)

    def wait(self, now: float) -> float:
        """Seconds until there is a token."""
        return max(0.0, self.full_at - now - (self.burst - 1) / self.rate)


class FailureLimit:
    """The failed handshakes of one listener.  `now` is a time of the event loop, in seconds."""

    def __init__(self, now: float) -> None:
        self._hosts: OrderedDict[str, Bucket] = OrderedDict()  # that have failed lately
        self._total = Bucket(TOTAL_BURST, TOTAL_RATE, now)

    def wait(self, host: str, now: float) -> float:
        """Seconds for which peers of this host are turned away; 0: they are let in."""
        bucket = self._hosts.get(host)
        if bucket is None:
            return 0.0
        if bucket.full_at <= now:
            del self._hosts[host]
            return 0.0
        return max(bucket.wait(now), self._total.wait(now))

    def failed(self, host: str, now: float) -> None:
        bucket = self._hosts.get(host)
        if bucket is None:
            bucket = self._hosts[host] = Bucket(HOST_BURST, HOST_RATE, now)
            if len(self._hosts) > MAX_HOSTS:
                self._hosts.popitem(last=False)
        self._hosts.move_to_end(host)
        bucket.take(now)
        self._total.take(now)

    def succeeded(self, host: str) -> None:
        """A peer of this host has the key: what others of it have failed in is forgotten."""
        self._hosts.pop(host, None)

    def first_report(self, host: str) -> bool:
        """Whether to log that this host is turned away: once, until it is let in again."""
        bucket = self._hosts.get(host)
        if bucket is None or bucket.reported:
            return False
        bucket.reported = True
        return True
