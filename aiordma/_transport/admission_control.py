"""Admission control of a listener: which peers get a place, lose it, or are rejected.

Three rules apply to peers that have not proved anything yet:

- Silence (`SilentSockets`): The peer of an accepted socket has to send something: its first bytes,
  or a ticket for a challenge. Until then, the socket only uses a descriptor and a timer, but no
  task, no transport, no queue pair, and no place among the handshakes.
- Fair share (`FairShare`): The number of silent sockets and the number of handshakes are limited. A
  new peer is always admitted. If no place is free, another peer is evicted, from a network that has
  more than its share if there is one. The embedded device implements the same rule in C
  (softdev/src/engine/fair_share.c).
- Failures (`FailureLimit`): Token buckets limit the handshakes that fail for lack of the key, per
  host and in total. A failure takes a token, and tokens are refilled over time. A proof of the key
  fills the bucket of its host. A host without tokens is rejected until it has one. If the common
  bucket is empty, all hosts that have failed recently are rejected, but other hosts are still
  admitted. A peer can therefore only lock out its own host, and an attacker gets one try from each
  address.
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
"""Nested networks of an address, the largest first. The last one counts as one host."""

# The following numbers are estimates.

# A network with more than 1/SHARE of all places loses its own peers first. An attacker therefore
# needs several large networks to displace other peers.
SHARE = 8

# All places of one kind use at most 1/SHARE_OF_FILES of the file descriptors of the process.
SHARE_OF_FILES = 8

# A socket may be silent for 1/SHARE_OF_TIMEOUT of `Config.handshake_timeout`.
SHARE_OF_TIMEOUT = 5

# These are the failures that are allowed in a burst, and the further failures per second, for one
# host and for all hosts together. They are high enough that a program with a wrong key that is
# restarted repeatedly is told the reason each time.
HOST_BURST = 16
HOST_RATE = 2.0
TOTAL_BURST = 256
TOTAL_RATE = 32.0

# If failures of more hosts are known, the host whose latest failure is the oldest is forgotten.
MAX_HOSTS = 4096

IPV6_PREFIXES = (48, 56, 64)
"""Prefix lengths: two that providers assign to a customer (RFC 6177), and that of a host.

A host has all the remaining bits (RFC 4291).
"""


def networks_of(host: str) -> Networks:
    """Return the /48, /56 and /64 of an IPv6 address, or the /24 and the address itself for IPv4.

    Each link-local or loopback IPv6 address stands alone, because they all have the same network.
    """
    numeric = host.partition("%")[0]
    if "." in numeric:
        ipv4 = numeric.removeprefix("::ffff:")  # from a dual-stack socket
        return f"{ipv4.rpartition('.')[0]}.0/24", ipv4
    raw = socket.inet_pton(socket.AF_INET6, numeric) if numeric else b""
    if not any(raw[:8]) or raw[0] == 0xFE:
        return (numeric,)
    return tuple(
        f"{socket.inet_ntop(socket.AF_INET6, raw[: bits // 8].ljust(16, bytes(1)))}/{bits}"
        for bits in IPV6_PREFIXES
    )


def places(wanted: int) -> int:
    """Return the number of places: `wanted`, if the process may have enough descriptors."""
    try:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except OSError:  # a seccomp filter denies the call
        return wanted
    if files == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, files // SHARE_OF_FILES))


def setting(limit: int) -> str:
    """Return the setting that determines a limit of `places`, for errors."""
    return f"{limit}: Config.max_handshakes of the listener, or an eighth of its file descriptors"


class NoRoomError(Exception):
    """Every place is taken by a peer that must not be evicted for the new one."""


class FairShare(Generic[T]):
    """At most `limit` peers, in order of age, and the rule of which one is evicted for a new peer.

    If a network has more than its share, the evicted peer is from the fullest such network. Within
    it, the rule is applied again to smaller networks. Otherwise it may be any peer. The choice is
    random: if the oldest peer were evicted, an honest client would lose its place as soon as
    `limit` others arrive during its handshake.

    Peers that have proved themselves (`proved`) are only evicted for a peer of another network, and
    only if their own network has more than its share.
    """

    def __init__(
        self, limit: int, *, proved: bool = False, draw: Callable[[int], int] = random.randrange
    ) -> None:
        """Create an empty table. `draw` returns a random number less than its argument."""
        self.limit = limit
        self._proved = proved
        self._draw = draw
        self._share = max(1, limit // SHARE)
        self._networks_of: dict[T, Networks] = {}
        # The key is a network, preceded by the networks that contain it. () has all peers, the
        # oldest first.
        self._peers: dict[Networks, dict[T, None]] = {(): {}}
        self._full: dict[Networks, None] = {}  # networks with at least a full share, except ()

    def __len__(self) -> int:
        return len(self._networks_of)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the peers, the oldest first."""
        return iter(self._networks_of)

    def make_room(self, networks: Networks) -> T | None:
        """Remove and return the peer to evict if the table is full. Call this before `add`.

        Raises:
            NoRoomError: If no peer may be evicted for one of these networks.
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
        """Add a peer, after `make_room`."""
        self._networks_of[peer] = networks
        for depth in range(len(networks) + 1):
            network = networks[:depth]
            peers = self._peers.setdefault(network, {})
            peers[peer] = None
            if depth and len(peers) >= self._share:
                self._full[network] = None

    def remove(self, peer: T) -> None:
        """Remove a peer, if it is still in the table."""
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
    """Return whether there is something to read: bytes, the end of the stream, or an error."""
    try:
        accepted.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class _SilentSocket:
    """An accepted socket on which nothing has arrived yet."""

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
    """Accepted sockets that wait for their first bytes. Those that stay silent are closed."""

    def __init__(self, config: Config) -> None:
        self.timeout = config.handshake_timeout / SHARE_OF_TIMEOUT
        self._waiting: FairShare[_SilentSocket] = FairShare(places(config.max_handshakes))

    def add(
        self, accepted: socket.socket, address: Address, when_readable: Callable[[], None]
    ) -> None:
        """Take over an accepted socket until `when_readable` is called.

        If there is no room, another socket is closed.
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
        """Close the oldest socket to free its descriptor. Returns False if there is none."""
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
    """A token bucket. It can owe at most `burst` tokens."""

    burst: int
    rate: float
    full_at: float
    """The loop time at which the bucket is full again."""
    reported: bool = False
    """Whether it was already logged that the bucket is empty."""

    def take(self, now: float) -> None:
        self.full_at = max(self.full_at, now) + 1 / self.rate
        self.full_at = min(self.full_at, now + 2 * self.burst / self.rate)

    def wait(self, now: float) -> float:
        """Return the number of seconds until a token is available."""
        return max(0.0, self.full_at - now - (self.burst - 1) / self.rate)


class FailureLimit:
    """The failed handshakes of one listener. `now` is a loop time in seconds."""

    def __init__(self, now: float) -> None:
        self._hosts: OrderedDict[str, Bucket] = OrderedDict()  # hosts with recent failures
        self._total = Bucket(TOTAL_BURST, TOTAL_RATE, now)

    def wait(self, host: str, now: float) -> float:
        """Return for how many seconds peers of this host are rejected; 0 if they are admitted."""
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
        """Forget the failures of a host after one of its peers has proved the key."""
        self._hosts.pop(host, None)

    def first_report(self, host: str) -> bool:
        """Return whether to log that this host is rejected: once until it is admitted again."""
        bucket = self._hosts.get(host)
        if bucket is None or bucket.reported:
            return False
        bucket.reported = True
        return True
