"""Text on its way to C, which takes a null character for the end of a text."""

from __future__ import annotations

import os

from aiordma._core import arguments

from . import handles as h
from ._lib import ffi


def to_c(name: str, value: str | bytes | os.PathLike[str]) -> h.Characters:
    """Encode a text or a path for a `char *` parameter; `name` says in errors what it is.

    Every text that a user gives goes to C this way: ValueError for one that C would cut.
    """
    text = arguments.text(name, os.fsdecode(value))
    try:
        data = os.fsencode(text)
    except UnicodeEncodeError:
        data = text.encode(errors="replace")
    return ffi.new("char[]", data)
