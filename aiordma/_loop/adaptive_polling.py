"""Adaptive polling: when an event loop spins for completions before it sleeps, and for how long.

Spinning for as long as one wake-up costs is 2-competitive (ski rental): at worst it costs twice the
better of the two, to sleep at once or not at all.  What a wake-up costs differs by machine and hour
(from 35 us to more than 100 on one virtual machine), so a loop that is woken soon after a miss has
stopped too early: it spins again now, and for twice as long, up to the limit.  Misses make the
following spins rarer: a peer that is slow, or shares this core, costs next to nothing.  Their
length grows all the same: where both sides sleep before each answer, the one that spins for long
enough to see the other one wake up ends that.
"""

from __future__ import annotations

from time import monotonic, thread_time

# Microseconds of the first spin, and of the shortest.
FIRST_US = 50
# Wake-ups that go by without a spin, at most.
MOST_SKIPPED = 255
# Seconds asleep after which a burst of traffic counts as over.
IDLE = 10e-3


class AdaptivePolling:
    """When one event loop spins, and for how long; with `most_us` 0 never."""

    __slots__ = ("_first_us", "_misses", "_skip", "_stopped", "most_us", "spin_us")

    def __init__(self, most_us: int) -> None:
        self.most_us = most_us
        self._first_us = min(FIRST_US, most_us)
        self.spin_us = self._first_us
        """The length of the next spin, if nothing is found."""
        self._misses = 0  # grows with spins that found nothing
        self._skip = 0  # wake-ups to go without one
        self._stopped: tuple[float, float] | None = None  # the last miss: time and CPU time

    def is_due(self) -> bool:
        """Whether a loop that has been woken should spin before it sleeps again."""
        if self._stopped is not None:
            self._judge(*self._stopped)
            self._stopped = None
        return self.most_us > 0 and not self._skip

    def _judge(self, stopped: float, used: float) -> None:
        """Adapts the length after a miss: was it too short?"""
        since = monotonic() - stopped
        if since >= IDLE:
            self.spin_us = max(self.spin_us // 2, self._first_us)
        # A loop that had other things to do instead of sleeping would not have had it any sooner.
        elif self.spin_us < self.most_us and thread_time() - used < 0.75 * since:
            self.spin_us = min(2 * self.spin_us, self.most_us)
            if since * 1e6 < self.most_us:
                self._skip = 0

    def skipped(self) -> None:
        """The loop was woken for something and sleeps again without a spin."""
        if self._skip:
            self._skip -= 1

    def hit(self) -> None:
        """A spin has found completions."""
        self._misses = 0

    def missed(self) -> None:
        """A spin has found nothing."""
        self._misses = min(2 * self._misses + 1, MOST_SKIPPED)
        self._skip = self._misses
        self._stopped = monotonic(), thread_time()
