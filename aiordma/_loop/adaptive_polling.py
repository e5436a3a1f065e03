"""Adaptive polling: when an event loop spins for completions before it sleeps.

A spin lasts about as long as a wake-up costs, which is 2-competitive (ski rental): at worst it
costs twice the better of the two, to sleep at once or not at all.  Misses make the following spins
rarer: a peer that is slow, or shares this core, costs next to nothing.
"""

from __future__ import annotations

# Wake-ups that go by without a spin, at most.
MOST_SKIPPED = 255


class AdaptivePolling:
    """When one event loop spins, for `spin_us` microseconds; with 0 never."""

    __slots__ = ("_misses", "_skip", "spin_us")

    def __init__(self, spin_us: int) -> None:
        self.spin_us = spin_us
        self._misses = 0  # grows with spins that found nothing
        self._skip = 0  # wake-ups to go without one

    def is_due(self) -> bool:
        """Whether a loop that has been woken should spin before it sleeps again."""
        return self.spin_us > 0 and not self._skip

    def skipped(self) -> None:
        """The loop was woken for something and sleeps again without a spin."""
        if self._skip:
            self._skip -= 1

    def hit(self) -> None:
        self._misses = 0

    def missed(self) -> None:
        self._skip = self._misses = min(2 * self._misses + 1, MOST_SKIPPED)
