"""Adaptive polling: the decision whether an event loop spins for completions before it sleeps.

A spin lasts about as long as a wake-up costs. At worst, spinning therefore costs twice as much as
the better of two choices: to sleep immediately, or never to sleep (ski rental, 2-competitive). Each
miss makes spins rarer, so a peer that is slow or shares this core costs almost nothing.
"""

from __future__ import annotations

# Maximum number of consecutive wake-ups that are not followed by a spin.
MAX_SKIPPED = 255


class AdaptivePolling:
    """The policy that decides when an event loop spins. The loop never spins if `spin_us` is 0."""

    __slots__ = ("_misses", "_wakeups_to_skip", "spin_us")

    def __init__(self, spin_us: int) -> None:
        self.spin_us = spin_us
        self._misses = 0  # grows with spins that found nothing
        self._wakeups_to_skip = 0  # the number of wake-ups to skip

    def is_due(self) -> bool:
        """Return whether the loop should spin after a wake-up, before it sleeps again."""
        return self.spin_us > 0 and not self._wakeups_to_skip

    def skipped(self) -> None:
        """Record a wake-up after which the loop sleeps again without spinning."""
        if self._wakeups_to_skip:
            self._wakeups_to_skip -= 1

    def hit(self) -> None:
        self._misses = 0

    def missed(self) -> None:
        self._wakeups_to_skip = self._misses = min(2 * self._misses + 1, MAX_SKIPPED)
