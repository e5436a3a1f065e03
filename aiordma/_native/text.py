"""Conversion of text for C, which ends a text at the first null character."""

from __future__ import annotations

import os
from reprlib import repr as brief

from aiordma._core import arguments

from . import handles as h
from ._lib import ffi


def to_c(name: str, value: str | bytes | os.PathLike[str]) -> h.Characters:
    """Encode a string or a path for a `char *` parameter. `name` identifies it in errors.

    All strings from users are passed to C through this function.

    Raises:
        ValueError: If the string contains a null character or cannot be encoded.
    """
    text = arguments.text(name, os.fsdecode(value))
    try:
        data = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} {brief(text)} cannot be encoded as {error.encoding}: {error.reason}"
        ) from None
    return ffi.new("char[]", data)
