"""When a loop looks for completions, and for how long (aiordma/looking.py): clocks of the test."""

from __future__ import annotations

import pytest

from aiordma import looking
from aiordma.looking import FIRST_US, IDLE, MOST_SKIPPED, Looking

MOST_US = 4 * FIRST_US
IDLE_US = round(IDLE * 1e6) + 1


class Clock:
    """Time that passes when it is told to; the CPU's only while nobody sleeps."""

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
    monkeypatch.setattr(looking, "monotonic", lambda: clock.time)
    monkeypatch.setattr(looking, "thread_time", lambda: clock.used)
    return clock


def wakes_without_a_look(looks: Looking) -> int:
    """How many there are until the next one is due."""
    count = 0
    while not looks.is_due():
        looks.skipped()
        count += 1
    return count


def test_never() -> None:
    looks = Looking(0)
    assert looks.for_us == 0
    assert not looks.is_due()
    looks.skipped()
    assert not looks.is_due()


def test_no_longer_than_allowed() -> None:
    assert Looking(20).for_us == 20
    assert Looking(MOST_US).for_us == FIRST_US


@pytest.mark.usefixtures("clock")
def test_looks_that_find_something_go_on() -> None:
    looks = Looking(MOST_US)
    for _ in range(100):
        assert looks.is_due()
        looks.found()
    assert looks.for_us == FIRST_US


def test_in_vain_they_become_rare(clock: Clock) -> None:
    looks = Looking(MOST_US)
    skipped = []
    for _ in range(12):
        looks.missed()
        clock.sleep(IDLE_US)
        skipped.append(wakes_without_a_look(looks))
    assert skipped[:4] == [1, 3, 7, 15]
    assert skipped[-1] == MOST_SKIPPED
    assert looks.for_us == FIRST_US
    looks.found()
    looks.missed()
    clock.sleep(IDLE_US)
    assert wakes_without_a_look(looks) == 1


def test_woken_soon_it_looks_for_longer(clock: Clock) -> None:
    looks = Looking(MOST_US)
    for wanted in (2 * FIRST_US, MOST_US):
        looks.missed()
        clock.sleep(MOST_US / 2)
        assert looks.is_due()  # at once
        assert looks.for_us == wanted
    # More is not allowed: then it is one more that was in vain.
    looks.missed()
    clock.sleep(MOST_US / 2)
    assert wakes_without_a_look(looks) == 7
    assert looks.for_us == MOST_US


def test_woken_late_it_looks_for_longer_but_seldom(clock: Clock) -> None:
    looks = Looking(MOST_US)
    for wanted, skipped in ((2 * FIRST_US, 1), (MOST_US, 3), (MOST_US, 7)):
        looks.missed()
        clock.sleep(2 * MOST_US)
        assert wakes_without_a_look(looks) == skipped
        assert looks.for_us == wanted


def test_idle_it_looks_for_less(clock: Clock) -> None:
    looks = Looking(MOST_US)
    looks.for_us = MOST_US
    for wanted in (MOST_US // 2, FIRST_US, FIRST_US):
        looks.missed()
        clock.sleep(IDLE_US)
        looks.is_due()
        assert looks.for_us == wanted


def test_a_busy_loop_looks_no_longer(clock: Clock) -> None:
    """It came back late from other work: nobody has been asleep."""
    looks = Looking(MOST_US)
    looks.missed()
    clock.work(MOST_US / 2)
    assert wakes_without_a_look(looks) == 1
    assert looks.for_us == FIRST_US


def test_each_look_is_judged_once(clock: Clock) -> None:
    looks = Looking(MOST_US)
    looks.missed()
    clock.sleep(MOST_US / 2)
    assert looks.is_due()
    clock.sleep(MOST_US / 2)
    assert looks.is_due()
    assert looks.for_us == 2 * FIRST_US
