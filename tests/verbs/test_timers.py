"""Test the conversion between seconds and the two 5-bit encodings."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core.timers import (
    decode_ack_timeout,
    decode_rnr_timer,
    encode_ack_timeout,
    encode_rnr_timer,
)


@pytest.mark.parametrize(
    ("encode", "seconds", "code"),
    [
        *((encode_ack_timeout, *it) for it in ((math.inf, 0), (1e-9, 1), (8.192e-6, 1))),
        *((encode_ack_timeout, *it) for it in ((8.2e-6, 2), (0.067, 14), (4.096e-6 * 2**31, 31))),
        *((encode_rnr_timer, *it) for it in ((0, 1), (0.00001, 1), (0.00064, 12), (0.0007, 13))),
        *((encode_rnr_timer, *it) for it in ((0.49152, 31), (0.5, 0), (0.65536, 0))),
    ],
)
def test_timer_encoding_returns_expected_codes(
    encode: Callable[[float], int], seconds: float, code: int
) -> None:
    assert encode(seconds) == code


@pytest.mark.parametrize(
    ("encode", "named", "wrong"),
    [
        (encode_ack_timeout, "ack timeout", (0, -1, 9000, -math.inf)),
        (encode_rnr_timer, "RNR timer", (-0.1, 0.7, math.inf)),
    ],
)
def test_timer_encoding_rejects_values_out_of_range(
    encode: Callable[[float], int], named: str, wrong: tuple[float, ...]
) -> None:
    for seconds in wrong:
        with pytest.raises(ValueError, match=named):
            encode(seconds)


@pytest.mark.parametrize("given", [14, np.int64(14)])
def test_timer_encoding_rejects_already_encoded_integers(given: int) -> None:
    said = r"write verbs.decode_{}\(14\), which is {} s; if you mean seconds, write 14\.0"
    with pytest.raises(ValueError, match=said.format("ack_timeout", r"0\.0671")):
        encode_ack_timeout(given)
    with pytest.raises(ValueError, match=said.format("rnr_timer", r"0\.00128")):
        encode_rnr_timer(given)
    assert encode_ack_timeout(14.0) == 22
    for wrong in (True, "14"):
        with pytest.raises(TypeError, match="an ack timeout must be a number of seconds"):
            encode_ack_timeout(wrong)  # type: ignore[arg-type]


@given(st.floats(min_value=1e-6, max_value=8000))
def test_ack_timeout_rounds_up_to_less_than_twice_the_request(seconds: float) -> None:
    granted = decode_ack_timeout(encode_ack_timeout(seconds))
    assert granted >= seconds * (1 - 1e-8)
    assert granted < max(2 * seconds, 9e-6) * (1 + 1e-8)


@pytest.mark.parametrize("code", range(32))
def test_timer_codes_round_trip(code: int) -> None:
    assert encode_ack_timeout(decode_ack_timeout(code)) == code
    assert encode_rnr_timer(decode_rnr_timer(code)) == code
