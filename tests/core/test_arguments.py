"""Numbers of any library become Python's own; everything else is refused with what is wanted."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from enum import IntEnum, IntFlag
from fractions import Fraction

import numpy as np
import pytest

from aiordma import Rights
from aiordma._core.arguments import choice, integer, seconds, truth


class Colour(IntEnum):
    RED = 1
    BLUE = 2


class Marks(IntFlag):
    A = 1
    B = 2


@pytest.mark.parametrize("value", [5, np.int64(5), np.uint8(5), np.array(5), Colour.RED + 4])
def test_integers(value: object) -> None:
    assert type(integer("n", value)) is int
    assert integer("n", value) == 5


@pytest.mark.parametrize("value", [0.5, Fraction(1, 2), Decimal("0.5"), np.float32(0.5)])
def test_times(value: object) -> None:
    assert type(seconds("t", value)) is float
    assert seconds("t", value) == 0.5


def test_a_whole_number_is_a_time() -> None:
    assert seconds("t", np.int32(3)) == seconds("t", 3) == 3.0
    assert seconds("t", math.inf, endless=True) == math.inf


@pytest.mark.parametrize("value", ["RED", 1, np.int64(1), Colour.RED])
def test_choices(value: object) -> None:
    assert choice("c", value, Colour) is Colour.RED


def test_sets_of_flags() -> None:
    assert choice("m", 3, Marks) is Marks.A | Marks.B
    assert choice("access", np.uint32(6), Rights) == Rights.READ | Rights.WRITE


@pytest.mark.parametrize("value", [True, np.True_, 1])
def test_truth(value: object) -> None:
    assert truth("b", value) is True


def refused(convert: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        convert()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("value", "came"),
    [
        (1.0, "float 1.0; round it, as with int()"),
        (np.float32(1), "float32 np.float32(1.0); round it, as with int()"),
        (True, "bool True"),
        (np.True_, "bool np.True_"),
        ("8", "str '8'"),
        (None, "None"),
        ([1], "list [1]"),
    ],
)
def test_no_integers(value: object, came: str) -> None:
    refused(lambda: integer("n", value, 0, 9), TypeError, f"n is an int from 0 to 9, not {came}")


@pytest.mark.parametrize(
    ("low", "high", "value", "text"),
    [
        (0, 9, 10, "n is an int from 0 to 9, not 10"),
        (1, None, 0, "n is an int of at least 1, not 0"),
        (1, (1 << 64) - 1, 0, "n is an int from 1 to 2^64 - 1, not 0"),
        (-(1 << 63), (1 << 64) - 1, 1 << 64, f"n is an int of 64 bits, not {1 << 64}"),
    ],
)
def test_integers_out_of_range(low: int, high: int | None, value: int, text: str) -> None:
    refused(lambda: integer("n", np.int64(value) if value < 1 << 63 else value, low, high),
            ValueError, text)  # fmt: skip


@pytest.mark.parametrize(
    ("value", "came"),
    [
        ("60", "str '60'"),
        (True, "bool True"),
        (1j, "complex 1j"),
        (timedelta(1), "timedelta datetime.timedelta(days=1); write value.total_seconds()"),
    ],
)
def test_no_times(value: object, came: str) -> None:
    refused(lambda: seconds("t", value), TypeError, f"t is a number of seconds, not {came}")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, np.float32("nan"), Decimal("Infinity")])
def test_times_that_are_none(value: object) -> None:
    refused(
        lambda: seconds("t", value),
        ValueError,
        f"t is a finite number of seconds, 0 or more, not {float(value)}",  # type: ignore[arg-type]
    )


def test_a_time_beyond_all_floats() -> None:
    with pytest.raises(ValueError, match="t is too large a number"):
        seconds("t", 10**400)


@pytest.mark.parametrize(
    ("value", "error"),
    [("rw", TypeError), (16, ValueError), (-1, ValueError), (4.0, TypeError), (True, TypeError)],
)
def test_no_rights(value: object, error: type[Exception]) -> None:
    refused(
        lambda: choice("access", value, Rights),
        error,
        "access is of Rights (Rights.WRITE, Rights.READ, Rights.ATOMIC), not "
        f"{type(value).__name__} {value!r}; join several with |",
    )


def test_no_member() -> None:
    for value in ("GREEN", 3):
        with pytest.raises((TypeError, ValueError), match=r"c is of Colour \(Colour.RED, Colour.B"):
            choice("c", value, Colour)


def test_no_truth() -> None:
    refused(lambda: truth("b", "yes"), TypeError, "b is True or False, not str 'yes'")
