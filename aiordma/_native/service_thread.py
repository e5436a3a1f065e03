"""The service threads of the package, which must not wait for each other.

Python's garbage collector runs destructors in any thread, including service threads, and a
destructor may call the package. Code that would wait for an event loop therefore checks
`in_service_thread` first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class ServiceThread(threading.Thread):
    """A daemon thread that the package starts to serve the whole process."""

    def __init__(self, main: Callable[[], None], name: str) -> None:
        super().__init__(target=main, name=name, daemon=True)


def in_service_thread() -> bool:
    """Return whether the caller runs in a ServiceThread."""
    return isinstance(threading.current_thread(), ServiceThread)
