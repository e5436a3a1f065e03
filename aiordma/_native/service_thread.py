"""The threads of the package, in which nothing may wait for another one of them.

Python's collector runs destructors in any thread, these included, and a destructor may call the
package.  What would wait there for an event loop asks `in_service_thread` first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class ServiceThread(threading.Thread):
    """A daemon thread of the package, which serves the whole process."""

    def __init__(self, main: Callable[[], None], name: str) -> None:
        super().__init__(target=main, name=name, daemon=True)


def in_service_thread() -> bool:
    """True if the caller runs in a ServiceThread."""
    return isinstance(threading.current_thread(), ServiceThread)
