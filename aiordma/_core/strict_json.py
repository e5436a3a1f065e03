"""A strict JSON parser. Unlike the standard library's parser, it accepts only RFC 8259."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import NoReturn

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def unique(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Build a dict from the pairs of a JSON object. Raises ValueError for a duplicate name."""
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"duplicate name {name[:60]!r}")
        found[name] = value
    return found


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a valid JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=unique, parse_constant=_reject_constant)


def parse_json(data: bytes | str) -> object:
    """Parse a JSON document. Bytes must contain UTF-8.

    Raises:
        ValueError: The document is not valid JSON, contains NaN, Infinity, an unpaired surrogate or
            a duplicate name, or is nested too deeply for the interpreter.
    """
    text = data if isinstance(data, str) else data.decode()
    try:
        value: object = _DECODER.decode(text)
        if _SURROGATE_ESCAPE.search(text):
            # Encoding raises UnicodeEncodeError, a ValueError, for an unpaired surrogate.
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value
