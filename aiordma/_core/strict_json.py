"""A parser for JSON as in RFC 8259. The parser of the standard library accepts more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import NoReturn

_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def unique(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Make a dict from the pairs of an object. Raise ValueError for a duplicate name."""
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"duplicate name {name[:60]!r}")
        found[name] = value
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a valid JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=unique, parse_constant=_no_number)


def parse_json(data: bytes | str) -> object:
    """Parse a text, which must be UTF-8 if it is bytes.

    Raises:
        ValueError: The text is not JSON, or it contains NaN, Infinity, half a surrogate pair or a
            duplicate name, or it is nested deeper than the interpreter can parse.
    """
    text = data if isinstance(data, str) else data.decode()
    try:
        value: object = _DECODER.decode(text)
        if _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value
