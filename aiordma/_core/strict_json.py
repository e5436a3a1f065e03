"""JSON as RFC 8259 has it, of which the standard library's reader takes more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import NoReturn

_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def unique(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    """An object of names and values; ValueError for a name that is there twice."""
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
    """The value of a text, which is UTF-8.

    ValueError for anything else: also for NaN and Infinity, half a surrogate pair, a name that an
    object has twice, and for more levels than the interpreter has.
    """
    text = data if isinstance(data, str) else data.decode()
    try:
        value: object = _DECODER.decode(text)
        if _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value
