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

from .._event_loop.driver import Watch
from .._native import fork
from ..cm.address import Address
from ..config import Config

T = TypeVar("T", bound=Hashable)

Networks = tuple[str, ...]
"""The nested networks that contain an address, largest first. The last one is treated as a host."""

# The values of these constants are rough estimates.

# If a network holds more than 1/SHARE of all places, its peers are evicted first. An attacker
# therefore needs several large networks to displace other peers.
SHARE = 8

# Each table of peers may use 1/SHARE_OF_FILES of the process's file descriptors.
SHARE_OF_FILES = 8

# A socket may stay silent for at most 1/SHARE_OF_TIMEOUT of `Config.handshake_timeout`.
SHARE_OF_TIMEOUT = 5

# These token buckets limit failed handshakes. A bucket allows a burst of failures, and afterwards a
# fixed number per second. Each host has a bucket, and another one counts the failures of all hosts.
# The limits are generous. Even if a supervisor restarts a program with a wrong key every second,
# the program gets an error about its key and not a BusyError.
HOST_BURST = 16
HOST_RATE = 2.0
TOTAL_BURST = 256
TOTAL_RATE = 32.0

# The maximum number of hosts whose failures are remembered. If there are more, the host whose last
# failure was earliest is forgotten.
MAX_HOSTS = 4096

IPV6_PREFIXES = (48, 56, 64)
"""The prefix lengths that identify a customer of a provider (48 or 56, RFC 6177) and a host (64).

A host may use every address within its /64 (RFC 4291).
"""


def networks_of(host: str) -> Networks:
    """Return the /48, /56 and /64 of an IPv6 address, or the /24 and the address itself for IPv4.

    A link-local or loopback IPv6 address is its own network, because all hosts share its prefix.
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


def max_places(wanted: int) -> int:
    """Return the maximum number of peers in a table: `wanted`, or fewer if descriptors are scarce.

    Each table may use only 1/SHARE_OF_FILES of the process's file descriptors.
    """
    try:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except OSError:  # a seccomp filter denies the call
        return wanted
    if files == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, files // SHARE_OF_FILES))


def limit_text(limit: int) -> str:
    """Return the limit and the settings that determine it, for error messages."""
    return f"{limit}: Config.max_handshakes of the listener, or an eighth of its file descriptors"


class NoRoomError(Exception):
    """Every place is taken by a peer that must not be evicted for the new one."""


class FairShare(Generic[T]):
    """A table of at most `limit` peers. If it is full, a peer is evicted for each new one.

    If any networks exceed their share, the evicted peer belongs to the fullest of them. The same
    rule applies to the smaller networks within that network. If no network exceeds its share, any
    peer may be evicted. The choice is random, because an honest client would otherwise lose its
    place as soon as `limit` other peers arrive during its handshake.

    `trusted` is set for peers that have already completed a handshake. They are evicted only for a
    peer of another network, and only if their own network exceeds its share.
    """

    def __init__(
        self, limit: int, *, trusted: bool = False, draw: Callable[[int], int] = random.randrange
    ) -> None:
        """Create an empty table. `draw(n)` returns a random integer from 0 to n - 1."""
        self.limit = limit
        self._has_trusted_peers = trusted
        self._draw = draw
        self._share_per_network = max(1, limit // SHARE)
        self._networks_of: dict[T, Networks] = {}
        # Each key lists nested networks, from the largest one to the network itself. The key ()
        # stands for all networks. The peers of a network are ordered from oldest to newest.
        self._peers: dict[Networks, dict[T, None]] = {(): {}}
        # The networks with at least a full share, except ().
        self._full_networks: dict[Networks, None] = {}

    def __len__(self) -> int:
        return len(self._networks_of)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the peers from the oldest to the newest."""
        return iter(self._networks_of)

    def make_room(self, networks: Networks) -> T | None:
        """Evict and return a peer if the table is full. Call this before `add`.

        Raises:
            NoRoomError: If no peer may be evicted for a peer of these networks.
        """
        if len(self) < self.limit:
            return None

        def size_with_new_peer(network: Networks) -> int:
            return len(self._peers[network]) + (networks[: len(network)] == network)

        # Start with the network of all peers. Go on to the fullest network directly within it that
        # exceeds its share, until no inner network exceeds its share.
        fullest: Networks = ()
        while inner_networks := [
            network
            for network in self._full_networks
            if network[:-1] == fullest and size_with_new_peer(network) > self._share_per_network
        ]:
            fullest = max(inner_networks, key=size_with_new_peer)
        # Trusted peers are not evicted for a peer of their own network.
        if self._has_trusted_peers and networks[: len(fullest)] == fullest:
            raise NoRoomError
        peers = self._peers[fullest]
        evicted = next(islice(peers, self._draw(len(peers)), None))
        self.remove(evicted)
        return evicted

    def add(self, peer: T, networks: Networks) -> None:
        """Add a peer. Call `make_room` first."""
        self._networks_of[peer] = networks
        for depth in range(len(networks) + 1):
            network = networks[:depth]
            peers = self._peers.setdefault(network, {})
            peers[peer] = None
            if depth and len(peers) >= self._share_per_network:
                self._full_networks[network] = None

    def remove(self, peer: T) -> None:
        """Remove a peer, if it is still in the table."""
        networks = self._networks_of.pop(peer, None)
        if networks is None:
            return
        for depth in range(len(networks) + 1):
            network = networks[:depth]
            peers = self._peers[network]
            del peers[peer]
            if len(peers) < self._share_per_network:
                self._full_networks.pop(network, None)
            if depth and not peers:
                del self._peers[network]


def _has_data(accepted: socket.socket) -> bool:
    """Return whether data, the end of the stream or an error has arrived on the socket."""
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
        self._registered_inode = fork.register_socket(accepted.fileno())
        self._readable_watch = Watch(accepted.fileno(), self._on_readable)
        self._timer = asyncio.get_running_loop().call_later(sockets.timeout, self.close)

    def _on_readable(self) -> None:
        self._stop()
        self._when_readable()

    def _stop(self) -> None:
        self._sockets.forget(self)
        self._timer.cancel()
        self._readable_watch.close()
        fork.unregister_socket(self._registered_inode)

    def close(self) -> None:
        self._stop()
        self._socket.close()


class SilentSockets:
    """Accepted sockets that wait for their first bytes. Those that stay silent are closed."""

    def __init__(self, config: Config) -> None:
        self.timeout = config.handshake_timeout / SHARE_OF_TIMEOUT
        self._waiting: FairShare[_SilentSocket] = FairShare(max_places(config.max_handshakes))

    def add(
        self, accepted: socket.socket, address: Address, when_readable: Callable[[], None]
    ) -> None:
        """Take over an accepted socket until `when_readable` is called.

        If the maximum number of sockets is already waiting, one of them is closed to make room.
        """
        if _has_data(accepted):
            when_readable()
            return
        networks = networks_of(address[0])
        evicted = self._waiting.make_room(networks)
        if evicted is not None:
            evicted.close()
        self._waiting.add(_SilentSocket(self, accepted, when_readable), networks)

    def drop_oldest(self) -> bool:
        """Close the oldest socket to free its descriptor. Returns False if no socket is waiting."""
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
class TokenBucket:
    """A token bucket whose debt is limited to `burst` tokens."""

    burst: int
    rate: float
    full_at: float
    """The loop time at which the bucket is full again."""
    reported: bool = False
    """Whether the empty bucket has already been logged."""

    def take(self, now: float) -> None:
        """Take a token. If the bucket is empty, go into debt, up to the limit."""
        self.full_at = max(self.full_at, now) + 1 / self.rate
        self.full_at = min(self.full_at, now + 2 * self.burst / self.rate)

    def wait_time(self, now: float) -> float:
        """Return the number of seconds until a token is available."""
        return max(0.0, self.full_at - now - (self.burst - 1) / self.rate)


class FailureLimit:
    """The limit on failed handshakes of one listener. `now` is the loop time in seconds."""

    def __init__(self, now: float) -> None:
        self._hosts: OrderedDict[str, TokenBucket] = OrderedDict()  # hosts with recent failures
        self._total = TokenBucket(TOTAL_BURST, TOTAL_RATE, now)

    def wait_time(self, host: str, now: float) -> float:
        """Return the number of seconds until peers of this host are admitted again, or 0."""
        bucket = self._hosts.get(host)
        if bucket is None:
            return 0.0
        if bucket.full_at <= now:
            del self._hosts[host]
            return 0.0
        return max(bucket.wait_time(now), self._total.wait_time(now))

    def record_failure(self, host: str, now: float) -> None:
        """Count a failed handshake of this host against its limit and the common limit."""
        bucket = self._hosts.get(host)
        if bucket is None:
            bucket = self._hosts[host] = TokenBucket(HOST_BURST, HOST_RATE, now)
            if len(self._hosts) > MAX_HOSTS:
                self._hosts.popitem(last=False)
        self._hosts.move_to_end(host)
        bucket.take(now)
        self._total.take(now)

    def record_success(self, host: str) -> None:
        """Forget the failures of a host after one of its peers has been authenticated."""
        self._hosts.pop(host, None)

    def mark_reported(self, host: str) -> bool:
        """Mark the host's rejections as logged, until the host recovers.

        Returns False if they were marked before, or if the host has no failures.
        """
        bucket = self._hosts.get(host)
        if bucket is None or bucket.reported:
            return False
        bucket.reported = True
        return True
