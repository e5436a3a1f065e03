"""Adaptive polling: the decision whether an event loop spins for completions before it sleeps.

A spin lasts about as long as a wake-up costs. At worst, spinning therefore costs twice as much as
the better of two choices: to sleep immediately, or never to sleep (ski rental, 2-competitive). Each
miss makes spins rarer, so a peer that is slow or shares this core costs almost nothing.
"""

from __future__ import annotations

# At most this many consecutive wake-ups are not followed by a spin.
MOST_SKIPPED = 255


class AdaptivePolling:
    """The policy for when an event loop spins, for `spin_us` microseconds. 0 means never."""

    __slots__ = ("_misses", "_skip", "spin_us")

    def __init__(self, spin_us: int) -> None:
        self.spin_us = spin_us
        self._misses = 0  # grows with spins that found nothing
        self._skip = 0  # the number of wake-ups to skip

    def is_due(self) -> bool:
        """Return whether a loop that was woken should spin before it sleeps again."""
        return self.spin_us > 0 and not self._skip

    def skipped(self) -> None:
        """Record that the loop was woken and sleeps again without a spin."""
        if self._skip:
            self._skip -= 1

    def hit(self) -> None:
        self._misses = 0

    def missed(self) -> None:
        self._skip = self._misses = min(2 * self._misses + 1, MOST_SKIPPED)
