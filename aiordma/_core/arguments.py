"""Checks for the arguments of public calls.

Numbers of any library are converted to Python's own types, and other types are rejected. Each
function returns the value to use. Its errors contain the name of the argument, the expected type
and the actual value. A call converts its arguments before it does anything else.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, Flag
from operator import index
from reprlib import repr as brief
from typing import SupportsFloat, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Enum)

I32_MAX = (1 << 31) - 1
U32_MAX = (1 << 32) - 1
U64_MAX = (1 << 64) - 1

_BOOLS = ("bool", "bool_")
"""The names of the bool classes of Python and of all numpy versions."""

_URL_PUNCTUATION = frozenset("[]/")
"""Characters that a URL may contain next to the host, but that a host never contains."""


def refusal(name: str, wanted: str, value: object, hint: str = "") -> str:
    """Return an error message that says what the argument must be and what was passed instead."""
    actual = "None" if value is None else f"{type(value).__name__} {brief(value)}"
    return f"{name} must be {wanted}, not {actual}" + (f"; {hint}" if hint else "")


def integer(name: str, value: object, low: int | None = 0, high: int | None = U64_MAX) -> int:
    """Check that `value` is an integer from `low` to `high`, and return it as an int.

    A bound of None means no limit. Floats and bools are rejected.

    Raises:
        TypeError: `value` is not an integer.
        ValueError: `value` is out of range.
    """
    number = value if type(value) is int else _index(name, value, low, high)
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"{name} must be {_range(low, high)}, not {number}")
    return number


def _index(name: str, value: object, low: int | None, high: int | None) -> int:
    """Convert `value` to an int without checking the bounds, which only the error mentions."""
    try:
        if is_bool := type(value).__name__ in _BOOLS:
            raise TypeError
        return int(index(value))  # type: ignore[arg-type]  # index() checks the type
    except TypeError:
        is_real = isinstance(value, SupportsFloat) and not is_bool
        hint = "round it, for example with int()" if is_real else ""
        raise TypeError(refusal(name, _range(low, high), value, hint)) from None


def _range(low: int | None, high: int | None) -> str:
    if low is None:
        return "an int"
    if high is None:
        return f"an int of at least {low}"
    if high == U64_MAX:
        return "a 64-bit int" if low < 0 else f"an int from {low} to 2^64 - 1"
    return f"an int from {low} to {high}"


def integers(what: str, values: Mapping[str, object], high: int = U64_MAX) -> dict[str, int]:
    """Check that the fields of a record are integers, and return them by field name."""
    return {name: integer(f"{what}.{name}", value, 0, high) for name, value in values.items()}


def seconds(name: str, value: object, *, allow_infinity: bool = False) -> float:
    """Check that `value` is a number of seconds, and return it as a float.

    Any real number is accepted, including numpy scalars, Fractions and Decimals.

    Raises:
        TypeError: `value` is not a real number. Bools and timedeltas do not count as numbers.
        ValueError: `value` is NaN or negative, or is infinite although `allow_infinity` is false.
    """
    length = value if type(value) is float else real(name, value, "a number of seconds")
    if not (0 <= length < math.inf or (allow_infinity and length == math.inf)):
        finite = "" if allow_infinity else "finite "
        raise ValueError(f"{name} must be a {finite}non-negative number of seconds, not {length}")
    return length


def real(name: str, value: object, wanted: str = "a number") -> float:
    """Check that `value` is a real number and not a bool, and return it as a float."""
    try:
        if type(value).__name__ in _BOOLS or not isinstance(value, SupportsFloat):
            raise TypeError
        return float(value)
    except TypeError:
        hint = "write value.total_seconds()" if hasattr(value, "total_seconds") else ""
        raise TypeError(refusal(name, wanted, value, hint)) from None
    except OverflowError:
        raise ValueError(f"{name} is out of range: {brief(value)}") from None


def truth(name: str, value: object) -> bool:
    """Check that `value` is True, False, 0, 1 or a numpy bool, and return it as a bool."""
    if value is True or value is False:
        return value
    if type(value).__name__ in _BOOLS or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise TypeError(refusal(name, "True or False", value))


def choice(name: str, value: object, kind: type[E]) -> E:
    """Convert `value`, a member or its name or number, to `kind`. Flags can be combined."""
    if type(value) is kind:
        return value
    names = list(kind.__members__)
    shown = ", ".join(f"{kind.__name__}.{each}" for each in names[:4])
    wanted = f"a member of {kind.__name__} ({shown}{', ...' if len(names) > 4 else ''})"
    hint = "combine flags with |" if issubclass(kind, Flag) else ""
    if isinstance(value, str) and value in kind.__members__:
        return kind[value]
    if isinstance(value, (str, Enum)):
        raise TypeError(refusal(name, wanted, value, hint))
    try:
        number = _index(name, value, None, None)
    except TypeError:
        raise TypeError(refusal(name, wanted, value, hint)) from None
    known = number in kind._value2member_map_
    if issubclass(kind, Flag):
        known = number >= 0 and not number & ~_every_bit(kind)
    if not known:
        raise ValueError(refusal(name, wanted, value, hint))
    return kind(number)


def _every_bit(kind: type[Flag]) -> int:
    bits = 0
    for member in kind.__members__.values():
        bits |= int(member.value)
    return bits


def text(name: str, value: object, wanted: str = "a str") -> str:
    """Check that `value` is a str without null characters, which would truncate it in C."""
    value = instance(name, value, str, wanted)
    if "\0" in value:
        raise ValueError(f"{name} {brief(value)} contains a null character")
    return value


def host_name(name: str, value: object, wanted: str = "a str") -> str:
    """Check that `value` is a valid host name or address, and return it."""
    value = text(name, value, wanted)
    try:
        value.encode("idna")
    except UnicodeError:
        what = "each part between dots must have 1 to 63 characters"
        raise ValueError(f"invalid host name {value!r}: {what}") from None
    has_port = value.count(":") == 1  # IPv6 addresses have at least two colons
    if has_port or not _URL_PUNCTUATION.isdisjoint(value):
        raise ValueError(
            f"invalid host {value!r}: a host must not contain a scheme, brackets or a port; "
            "pass the port as a separate argument"
        )
    return value


def instance(name: str, value: object, kind: type[T], wanted: str, hint: str = "") -> T:
    """Check that `value` is an instance of `kind`, and return it.

    If it is not, the error message describes the expected type with `wanted` and appends `hint`.
    """
    if isinstance(value, kind):
        return value
    raise TypeError(refusal(name, wanted, value, hint))


def callback(name: str, value: object, argument: str, *, awaited: bool = False) -> None:
    """Check that `value` can be called with one argument.

    `argument` is a description of that argument for error messages. Coroutine functions are
    rejected unless `awaited` is set.
    """
    wanted = f"a function of {argument}"
    if not callable(value) or (inspect.iscoroutinefunction(value) and not awaited):
        raise TypeError(refusal(name, wanted, value))
    if why := signature_error(value, [None]):
        raise TypeError(f"{name} must accept one argument, {argument}: {why}")


def signature_error(function: Callable[..., object], args: Sequence[object]) -> str:
    """Return the reason why `function` does not accept `args`, or an empty string if it does."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # C function without a signature; Mock before 3.11.4
        return ""
    try:
        signature.bind(*args)
    except TypeError as error:
        return str(error)
    return ""
