"""Tests of when a loop polls before it sleeps."""

from __future__ import annotations

from aiordma._event_loop.adaptive_polling import MAX_SKIPPED, AdaptivePolling


def wakes_without_a_spin(polling: AdaptivePolling) -> int:
    """Return the number of wakes until the next spin is due."""
    count = 0
    while not polling.is_due():
        polling.skipped()
        count += 1
    return count


def test_adaptive_polling_never_spins_when_set_to_zero() -> None:
    polling = AdaptivePolling(0)
    for _ in range(2):
        assert not polling.is_due()
        polling.skipped()


def test_spins_become_rare_after_misses_until_a_hit() -> None:
    polling = AdaptivePolling(50)
    for _ in range(100):
        assert polling.is_due()
        polling.hit()
    skipped = []
    for _ in range(12):
        polling.missed()
        skipped.append(wakes_without_a_spin(polling))
    assert skipped[:4] == [1, 3, 7, 15]
    assert skipped[-1] == MAX_SKIPPED
    polling.hit()
    polling.missed()
    assert wakes_without_a_spin(polling) == 1
