"""Text for C, where a null character ends a text."""

from __future__ import annotations

import os

from aiordma._core import arguments

from . import handles as h
from ._lib import ffi


def to_c(name: str, value: str | bytes | os.PathLike[str]) -> h.Characters:
    """Encode a text or a path for a `char *` parameter; `name` describes it in errors.

    Every text from a user is passed to C in this way. A text that C would cut raises ValueError.
    """
    text = arguments.text(name, os.fsdecode(value))
    try:
        data = os.fsencode(text)
    except UnicodeEncodeError:
        data = text.encode(errors="replace")
    return ffi.new("char[]", data)
