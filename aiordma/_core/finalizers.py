"""Finalizers that are safe while the interpreter shuts down."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import ParamSpec, cast

P = ParamSpec("P")


def finalizer(function: Callable[P, None]) -> Callable[P, None]:
    """Make `function` do nothing once the interpreter is shutting down.

    Use it for `__del__`, weak reference callbacks, and functions called by them. During shutdown,
    Python sets module globals to None in arbitrary order while it still finalizes objects. The
    operating system releases the resources when the process exits. `is_finalizing` is a local
    variable because the globals of this module may be None as well.
    """
    own_globals = cast(FunctionType, function).__globals__

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        if not is_finalizing() and own_globals["__name__"] is not None:
            function(*args, **kwargs)

    is_finalizing = sys.is_finalizing
    return guarded
