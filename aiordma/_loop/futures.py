"""The end of a future, by whatever it stands for."""

from __future__ import annotations

import asyncio
from typing import Any


def settle(
    future: asyncio.Future[Any], result: object = None, error: BaseException | None = None
) -> bool:
    """Ends a future, with the error if there is one; False if it has ended, or its loop is closed.

    An error counts as retrieved: a waiter that gave it up need not be told of a failure.
    """
    if future.done() or future.get_loop().is_closed():
        return False
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()
    return True
