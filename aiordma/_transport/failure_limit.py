"""Limits handshakes that fail for want of the key, of each host and in all.

A bucket of tokens for each host and one for all of them: a failure takes a token, time brings them
back, and a proof fills its host's bucket.  A host without a token is turned away until there is
one.  When the common bucket is empty, so is every host that has failed lately, while others are
still let in: a peer keeps out nothing but itself and its own host, and an attacker gets one try
from each address.
"""

from __future__ import annotations

from collections import OrderedDict

# Failures of one host at once, and further ones in a second; the same in all.  Chosen by judgement:
# a program with a wrong key that is started again and again is told so each time.
HOST_BURST = 16
HOST_RATE = 2.0
TOTAL_BURST = 256
TOTAL_RATE = 32.0

# Hosts that are remembered; the one that failed longest ago is forgotten first.
MAX_HOSTS = 4096


class Bucket:
    """A bucket of tokens, which come back with time; it owes at most a burst of them."""

    def __init__(self, burst: int, rate: float, now: float) -> None:
        self._burst = burst
        self._rate = rate
        self._tokens = float(burst)
        self._since = now
        self.reported = False
        """Whether the log says already that the bucket is empty."""

    def tokens(self, now: float) -> float:
        self._tokens = min(float(self._burst), self._tokens + (now - self._since) * self._rate)
        self._since = now
        return self._tokens

    def take(self, now: float) -> None:
        self._tokens = max(-float(self._burst), self.tokens(now) - 1)

    def is_full(self, now: float) -> bool:
        return self.tokens(now) >= self._burst

    def wait(self, now: float) -> float:
        """Seconds until there is a token."""
        return max(0.0, (1 - self.tokens(now)) / self._rate)


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
        if bucket.is_full(now):
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
