"""Conversions between seconds and the two time encodings of a queue pair.

Encoding rounds up, so a timeout is never shorter than requested. C programs use encoded values,
most often 14 and 12. An int from 1 to 31 is therefore rejected as a number of seconds, because it
is probably an encoded value.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from numbers import Integral

from .arguments import integer
from .arguments import seconds as as_seconds

# An encoded ACK timeout n from 1 to 31 means 4.096 us * 2^n, and 0 disables the timeout (IBTA
# volume 1, clauses 9.7.6.1.3 and 12.7.34).
ACK_TIMEOUT_UNIT = 4.096e-6

# These are the delays for the RNR NAK timer codes 1 to 31, followed by the longest delay, which has
# code 0 (IBTA volume 1, table 45).
_RNR_MILLISECONDS = (
    0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64, 0.96, 1.28, 1.92,
    2.56, 3.84, 5.12, 7.68, 10.24, 15.36, 20.48, 30.72, 40.96, 61.44, 81.92, 122.88, 163.84,
    245.76, 327.68, 491.52, 655.36,
)  # fmt: skip

# The tolerance hides floating-point errors, which would otherwise round an exact value such as
# 0.06144 s up to the next code.
_TOLERANCE = 1 - 1e-9


def ack_seconds(name: str, value: object, *, allow_infinity: bool = False) -> float:
    """Check an ACK timeout in seconds, and return it as a float.

    An integer from 1 to 31 raises ValueError, because it is probably an encoded timeout.
    """
    _refuse_encoded(name, value, decode_ack_timeout)
    return as_seconds(name, value, allow_infinity=allow_infinity)


def encode_ack_timeout(seconds: float) -> int:
    """Return the exponent of the shortest timeout of at least ``seconds``, or 0 for infinity."""
    seconds = ack_seconds("an ack timeout", seconds, allow_infinity=True)
    if seconds == math.inf:
        return 0
    if not 0 < seconds <= ACK_TIMEOUT_UNIT * 2**31:
        raise ValueError(
            f"an ack timeout must be math.inf or a positive number of seconds up to "
            f"{ACK_TIMEOUT_UNIT * 2**31:.0f}, not {seconds}"
        )
    return max(1, math.ceil(math.log2(seconds * _TOLERANCE / ACK_TIMEOUT_UNIT)))


def decode_ack_timeout(exponent: int) -> float:
    """Convert an ``ibv_qp_attr.timeout`` from 0 to 31 to seconds. For example, 14 means 0.067 s.

    The result for 0 is ``math.inf``, because 0 disables the timeout.
    """
    exponent = integer("exponent", exponent, 0, 31)
    return math.ldexp(ACK_TIMEOUT_UNIT, exponent) if exponent else math.inf


def encode_rnr_timer(seconds: float) -> int:
    """Return the code of the shortest RNR delay of at least ``seconds`` (0 to 0.65536)."""
    _refuse_encoded("an RNR timer", seconds, decode_rnr_timer)
    seconds = as_seconds("an RNR timer", seconds, allow_infinity=True)
    if not 0 <= seconds <= _RNR_MILLISECONDS[-1] / 1000:
        raise ValueError(f"an RNR timer must be from 0 to 0.65536 seconds, not {seconds}")
    return (bisect_left(_RNR_MILLISECONDS, seconds * 1000 * _TOLERANCE) + 1) % 32


def decode_rnr_timer(code: int) -> float:
    """Convert an ``ibv_qp_attr.min_rnr_timer`` from 0 to 31 to seconds.

    For example, 12 means 0.00064 s. Code 0 means the longest delay.
    """
    return _RNR_MILLISECONDS[(integer("code", code, 0, 31) - 1) % 32] / 1000


def _refuse_encoded(what: str, given: object, decode: Callable[[int], float]) -> None:
    if isinstance(given, Integral) and not isinstance(given, bool) and 1 <= int(given) <= 31:
        raise ValueError(
            f"{what} of {given}: times are in seconds. If {given} is an encoded value from struct "
            f"ibv_qp_attr, write verbs.{decode.__name__}({given}), which is "
            f"{decode(int(given)):.3g} s; if you mean seconds, write {given}.0"
        )
