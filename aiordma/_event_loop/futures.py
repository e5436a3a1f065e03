"""A function that settles a future in any state."""

from __future__ import annotations

import asyncio
from typing import Any


def settle(
    future: asyncio.Future[Any], result: object = None, error: BaseException | None = None
) -> bool:
    """Set the result or error of a future; return False if it is done or its loop is closed.

    An error is marked as retrieved, so that asyncio does not log it if the waiter has given up.
    """
    if future.done() or future.get_loop().is_closed():
        return False
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()
    return True
