"""Tests of argument conversion: numbers of any library become Python's own.

Other values are refused with a message that states the expected type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from enum import IntEnum, IntFlag
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

from aiordma import Rights
from aiordma._core.arguments import choice, integer, seconds, truth


class Colour(IntEnum):
    RED = 1
    BLUE = 2


class Shape(IntEnum):
    ROUND = 1


class Marks(IntFlag):
    A = 1
    B = 2


COUNT, TIME, TRUTH = partial(integer, "n"), partial(seconds, "t"), partial(truth, "b")
COLOUR, MARKS = (partial(choice, name, kind=kind) for name, kind in (("c", Colour), ("m", Marks)))
RIGHTS = partial(choice, "access", kind=Rights)

TAKEN: list[tuple[Callable[[Any], object], list[Any], object]] = [
    (COUNT, [5, np.int64(5), np.uint8(5), np.array(5), Colour.RED + 4], 5),
    (TIME, [0.5, Fraction(1, 2), Decimal("0.5"), np.float32(0.5)], 0.5),
    (TIME, [np.int32(3), 3], 3.0),
    (partial(TIME, allow_infinity=True), [math.inf], math.inf),
    (COLOUR, ["RED", 1, np.int64(1), Colour.RED], Colour.RED),
    (MARKS, [3], Marks.A | Marks.B),
    (RIGHTS, [np.uint32(6)], Rights.READ | Rights.WRITE),
    (TRUTH, [True, np.True_, 1], True),
]


@pytest.mark.parametrize(("convert", "values", "taken"), TAKEN)
def test_conversion_accepts_numbers_of_any_library(
    convert: Callable[[Any], object], values: list[Any], taken: object
) -> None:
    for value in values:
        got = convert(value)
        assert type(got) is type(taken)
        assert got == taken


NO_COUNT = "n must be an int from 0 to 9, not "
NO_TIME = "t must be a number of seconds, not "
NO_RIGHTS = "access must be a member of Rights (Rights.WRITE, Rights.READ, Rights.ATOMIC), not "
BITS_64 = (1 << 64) - 1

REFUSED: list[tuple[Callable[[Any], object], object, type[Exception], str]] = [
    *(
        (partial(COUNT, low=0, high=9), value, TypeError, NO_COUNT + came)
        for value, came in (
            (1.0, "float 1.0; round it, for example with int()"),
            (np.float32(1), "float32 np.float32(1.0); round it, for example with int()"),
            (True, "bool True"),
            (np.True_, "bool np.True_"),
            ("8", "str '8'"),
            (None, "None"),
            ([1], "list [1]"),
        )
    ),
    (partial(COUNT, low=0, high=9), np.int64(10), ValueError, NO_COUNT + "10"),
    (partial(COUNT, low=1, high=None), 0, ValueError, "n must be an int of at least 1, not 0"),
    (
        partial(COUNT, low=1, high=BITS_64),
        0,
        ValueError,
        "n must be an int from 1 to 2^64 - 1, not 0",
    ),
    (
        partial(COUNT, low=-(1 << 63), high=BITS_64),
        1 << 64,
        ValueError,
        f"n must be a 64-bit int, not {1 << 64}",
    ),
    *(
        (TIME, value, TypeError, NO_TIME + came)
        for value, came in (
            ("60", "str '60'"),
            (True, "bool True"),
            (1j, "complex 1j"),
            (timedelta(1), "timedelta datetime.timedelta(days=1); write value.total_seconds()"),
        )
    ),
    *(
        (
            TIME,
            value,
            ValueError,
            f"t must be a finite non-negative number of seconds, not {float(value)}",
        )
        for value in (math.nan, math.inf, -1, np.float32("nan"), Decimal("Infinity"))
    ),
    *(
        (RIGHTS, value, error, f"{NO_RIGHTS}{type(value).__name__} {value!r}; combine flags with |")
        for value, error in (
            ("rw", TypeError),
            (16, ValueError),
            (-1, ValueError),
            (4.0, TypeError),
            (True, TypeError),
        )
    ),
    (
        COLOUR,
        "GREEN",
        TypeError,
        "c must be a member of Colour (Colour.RED, Colour.BLUE), not str 'GREEN'",
    ),
    (COLOUR, 3, ValueError, "c must be a member of Colour (Colour.RED, Colour.BLUE), not int 3"),
    (
        COLOUR,
        Shape.ROUND,
        TypeError,
        "c must be a member of Colour (Colour.RED, Colour.BLUE), not Shape <Shape.ROUND: 1>",
    ),
    (TRUTH, "yes", TypeError, "b must be True or False, not str 'yes'"),
]


@pytest.mark.parametrize(("convert", "value", "error", "text"), REFUSED)
def test_conversion_rejects_invalid_values(
    convert: Callable[[Any], object], value: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        convert(value)
    assert str(caught.value) == text


def test_seconds_too_large_for_a_float_raise_value_error() -> None:
    with pytest.raises(ValueError, match="t is out of range"):
        seconds("t", 10**400)
