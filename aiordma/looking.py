"""When an event loop looks for completions before it sleeps, and for how long.

To look for as long as a wake-up costs is never more than twice as dear as the better of the two: to
sleep at once, or not at all.  What one costs differs by machine and hour (from 35 us to more than
100 on one virtual machine), so who is woken soon after a look in vain has stopped too early: it
looks again now, and for twice as long, up to the most that is allowed.  Looks that find nothing
make the following ones rarer: a peer that is slow, or shares this core, costs next to nothing.
Their length grows all the same: where both sides sleep before each answer, the one that looks for
long enough to see the other one wake up ends that.
"""

from __future__ import annotations

from time import monotonic, thread_time

# Microseconds of the first look, and of the shortest.
FIRST_US = 50
# Wake-ups that go by without a look, at most.
MOST_SKIPPED = 255
# Seconds asleep after which whatever was going on is over.
IDLE = 10e-3


class Looking:
    """Of one event loop; `most_us` 0: it never looks."""

    __slots__ = ("_first_us", "_misses", "_skip", "_stopped", "for_us", "most_us")

    def __init__(self, most_us: int) -> None:
        self.most_us = most_us
        self._first_us = min(FIRST_US, most_us)
        self.for_us = self._first_us
        """What the next one takes, if nothing is found."""
        self._misses = 0  # grows with looks that found nothing
        self._skip = 0  # wake-ups to go without one
        self._stopped: tuple[float, float] | None = None  # in vain: when, and the CPU time then

    def is_due(self) -> bool:
        """Whether who has been woken shall look before it sleeps again."""
        if self._stopped is not None:
            self._judge(*self._stopped)
            self._stopped = None
        return self.most_us > 0 and not self._skip

    def _judge(self, stopped: float, used: float) -> None:
        """Was the last look, which found nothing, too short?"""
        since = monotonic() - stopped
        if since >= IDLE:
            self.for_us = max(self.for_us // 2, self._first_us)
        # A loop that had other things to do instead of sleeping would not have had it any sooner.
        elif self.for_us < self.most_us and thread_time() - used < 0.75 * since:
            self.for_us = min(2 * self.for_us, self.most_us)
            if since * 1e6 < self.most_us:
                self._skip = 0

    def skipped(self) -> None:
        """Woken for something, it sleeps again without a look."""
        if self._skip:
            self._skip -= 1

    def found(self) -> None:
        self._misses = 0

    def missed(self) -> None:
        self._misses = min(2 * self._misses + 1, MOST_SKIPPED)
        self._skip = self._misses
        self._stopped = monotonic(), thread_time()
