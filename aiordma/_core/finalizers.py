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

    For `__del__`, callbacks of weak references, and functions called by them. Python sets the
    globals of modules to None then, in any order, while objects are still being finalized. What
    the function would release is gone by then, or goes with the process. The function that tells
    is bound here, because a global of this module may be None as well.
    """
    own_globals = cast(FunctionType, function).__globals__

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        if not is_finalizing() and own_globals["__name__"] is not None:
            function(*args, **kwargs)

    is_finalizing = sys.is_finalizing
    return guarded
