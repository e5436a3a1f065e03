"""When a loop polls before it sleeps, and for how long: clocks of the test."""

from __future__ import annotations

import pytest

from aiordma._loop import adaptive_polling
from aiordma._loop.adaptive_polling import FIRST_US, IDLE, MOST_SKIPPED, AdaptivePolling

MOST_US = 4 * FIRST_US
IDLE_US = round(IDLE * 1e6) + 1


class Clock:
    """Time that passes when it is told to; the CPU's only while the loop is awake."""

    def __init__(self) -> None:
        self.time = 100.0
        self.used = 10.0

    def sleep(self, us: float) -> None:
        self.time += us / 1e6

    def work(self, us: float) -> None:
        self.time += us / 1e6
        self.used += us / 1e6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(adaptive_polling, "monotonic", lambda: clock.time)
    monkeypatch.setattr(adaptive_polling, "thread_time", lambda: clock.used)
    return clock


def wakes_without_a_spin(polling: AdaptivePolling) -> int:
    """How many there are until the next one is due."""
    count = 0
    while not polling.is_due():
        polling.skipped()
        count += 1
    return count


def test_never() -> None:
    polling = AdaptivePolling(0)
    assert polling.spin_us == 0
    assert not polling.is_due()
    polling.skipped()
    assert not polling.is_due()


def test_no_longer_than_allowed() -> None:
    assert AdaptivePolling(20).spin_us == 20
    assert AdaptivePolling(MOST_US).spin_us == FIRST_US


@pytest.mark.usefixtures("clock")
def test_hits_go_on() -> None:
    polling = AdaptivePolling(MOST_US)
    for _ in range(100):
        assert polling.is_due()
        polling.hit()
    assert polling.spin_us == FIRST_US


def test_misses_make_spins_rare(clock: Clock) -> None:
    polling = AdaptivePolling(MOST_US)
    skipped = []
    for _ in range(12):
        polling.missed()
        clock.sleep(IDLE_US)
        skipped.append(wakes_without_a_spin(polling))
    assert skipped[:4] == [1, 3, 7, 15]
    assert skipped[-1] == MOST_SKIPPED
    assert polling.spin_us == FIRST_US
    polling.hit()
    polling.missed()
    clock.sleep(IDLE_US)
    assert wakes_without_a_spin(polling) == 1


def test_woken_soon_it_spins_for_longer(clock: Clock) -> None:
    polling = AdaptivePolling(MOST_US)
    for wanted in (2 * FIRST_US, MOST_US):
        polling.missed()
        clock.sleep(MOST_US / 2)
        assert polling.is_due()  # at once
        assert polling.spin_us == wanted
    # More is not allowed: then it is one more miss.
    polling.missed()
    clock.sleep(MOST_US / 2)
    assert wakes_without_a_spin(polling) == 7
    assert polling.spin_us == MOST_US


def test_woken_late_it_spins_for_longer_but_seldom(clock: Clock) -> None:
    polling = AdaptivePolling(MOST_US)
    for wanted, skipped in ((2 * FIRST_US, 1), (MOST_US, 3), (MOST_US, 7)):
        polling.missed()
        clock.sleep(2 * MOST_US)
        assert wakes_without_a_spin(polling) == skipped
        assert polling.spin_us == wanted


def test_idle_it_spins_for_less(clock: Clock) -> None:
    polling = AdaptivePolling(MOST_US)
    polling.spin_us = MOST_US
    for wanted in (MOST_US // 2, FIRST_US, FIRST_US):
        polling.missed()
        clock.sleep(IDLE_US)
        polling.is_due()
        assert polling.spin_us == wanted


def test_a_busy_loop_spins_no_longer(clock: Clock) -> None:
    """It came back late from other work and has not slept."""
    polling = AdaptivePolling(MOST_US)
    polling.missed()
    clock.work(MOST_US / 2)
    assert wakes_without_a_spin(polling) == 1
    assert polling.spin_us == FIRST_US


def test_each_spin_is_judged_once(clock: Clock) -> None:
    polling = AdaptivePolling(MOST_US)
    polling.missed()
    clock.sleep(MOST_US / 2)
    assert polling.is_due()
    clock.sleep(MOST_US / 2)
    assert polling.is_due()
    assert polling.spin_us == 2 * FIRST_US
