"""What the soak relies on: it would see a wrong byte, a leak, a break that was not planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiordma import ConnectionBrokenError, ConnectionClosedError

from .kept import Kept
from .memory import COUNTER, LANES, parts, stretch
from .pattern import LARGEST, Patterns, Wrong, write_patterns
from .plan import CLIENT, ENDINGS, KINDS, SERVER, Plan
from .session import as_planned

SEEDS = range(2000)


@pytest.fixture(scope="module")
def patterns(tmp_path_factory: pytest.TempPathFactory) -> Patterns:
    path = tmp_path_factory.mktemp("soak") / "patterns"
    write_patterns(path, 7)
    return Patterns(path)


def test_a_wrong_byte_is_seen(patterns: Patterns) -> None:
    size = (1 << 20) + 3
    data = bytearray(patterns.of(5, size))
    patterns.check("message", 5, memoryview(data))
    patterns.check("message", 5, memoryview(data)[:0])
    for place in (0, size // 2, size - 1):
        data[place] ^= 1
        with pytest.raises(Wrong, match=f"message of {size} bytes differs at byte {place}$"):
            patterns.check("message", 5, memoryview(data))
        data[place] ^= 1
    with pytest.raises(Wrong):
        patterns.check("message", 6, memoryview(data))
    with pytest.raises(Wrong, match="differs at byte 0"):
        patterns.check("message", 5, memoryview(data)[1:])


def test_both_ends_make_the_same_plan(patterns: Patterns) -> None:
    plans = [Plan.of(seed, "default", strict=True) for seed in SEEDS]
    assert plans == [Plan.of(seed, "default", strict=True) for seed in SEEDS]
    assert {plan.kind for plan in plans} == set(KINDS)
    assert {plan.ending for plan in plans} == set(ENDINGS)
    sizes = {plan.size(CLIENT, number) for plan in plans for number in range(5)}
    assert {0, 1, 1024, 8192, LARGEST} <= sizes
    assert max(sizes) == LARGEST
    for plan in plans[:100]:
        assert len(patterns.of(plan.number(SERVER, 3), LARGEST)) == LARGEST


def test_lanes_keep_apart() -> None:
    for seed in SEEDS:
        plan = Plan.of(seed, "small", strict=True)
        lanes, part, size = parts(plan)
        for lane in range(lanes):
            base = LANES * COUNTER + lane * part
            for step in range(3):
                begin, length, _ = stretch(plan, lane, step)
                assert base <= begin <= begin + length <= base + part <= size


def test_what_is_kept_is_seen(tmp_path: Path) -> None:
    before = Kept.now(3)
    assert before.growth(Kept.now(3)) == []
    with (tmp_path / "one").open("w"):
        (grown,) = before.growth(Kept.now(3))
        assert "one: 0 before, 1 now" in grown
    assert before.growth(Kept.now(5)) == ["blocks of the pool: 3 before, 5 now"]


@pytest.mark.parametrize(
    ("error", "ending", "strict", "allowed"),
    [
        (ConnectionBrokenError("gone"), "client closes", True, False),
        (ConnectionBrokenError("gone"), "client closes", False, True),
        (ConnectionClosedError(), "client leaves", True, True),
        (Wrong("a byte"), "client leaves", False, False),
        (ExceptionGroup("", [ConnectionBrokenError(""), Wrong("")]), "client leaves", False, False),
        (ExceptionGroup("", [ConnectionBrokenError("")]), "client leaves", True, True),
        (TimeoutError(), "client leaves", False, False),
    ],
)
def test_what_may_happen(error: Exception, ending: str, strict: bool, allowed: bool) -> None:
    plan = Plan(0, "default", strict, "messages", ending, 1000, 3)
    assert as_planned(error, plan, SERVER) is allowed
