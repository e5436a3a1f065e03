"""Asynchronous events of devices, told to everybody whom they may concern, on whichever loop.

The device tells each event once, to whoever takes it first (ibv_get_async_event(3)). A context that
the connection manager opened is shared by every loop of the process, and so the loop that takes an
event need not be the one whose queue pair it is about. So each loop watches, whoever is first takes
all there are, and every subscriber hears of them in the thread of its own loop. A loop that has
stopped holds nobody up.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import ClassVar

from . import verbs

Listener = Callable[[verbs.AsyncEvent], None]


class EventRouter:
    """The events of one context. There is one of these for each, as long as anybody has it."""

    _routers: ClassVar[weakref.WeakKeyDictionary[verbs.Context, EventRouter]] = (
        weakref.WeakKeyDictionary()
    )
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, context: verbs.Context) -> None:
        # The context is the key that keeps this alive, so it must not be kept alive by this.
        self._context = weakref.ref(context)
        self._listeners: dict[object, tuple[asyncio.AbstractEventLoop, Listener]] = {}

    @classmethod
    def of(cls, context: verbs.Context) -> EventRouter:
        with cls._lock:
            router = cls._routers.get(context)
            if router is None:
                router = cls._routers[context] = cls(context)
            return router

    def subscribe(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> object:
        """`listener` hears of every event from now on, in `loop`'s thread. Returns a token."""
        token = object()
        self._listeners[token] = (loop, listener)
        return token

    def unsubscribe(self, token: object) -> None:
        """Nothing more is told, nor what is on its way to the loop."""
        self._listeners.pop(token, None)

    def take(self) -> None:
        """Take the events that are there and tell everybody. In the thread of a loop."""
        context = self._context()
        if context is None or context.closed:
            return
        for event in context.async_events():
            self.tell(event)

    def tell(self, event: verbs.AsyncEvent) -> None:
        here = asyncio.get_running_loop()
        for token, (loop, listener) in list(self._listeners.items()):
            if loop is here:
                listener(event)
                continue
            try:
                loop.call_soon_threadsafe(self._deliver, token, event)
            except RuntimeError:  # that loop is closed: it was ended without being cleaned up
                self.unsubscribe(token)

    def _deliver(self, token: object, event: verbs.AsyncEvent) -> None:
        found = self._listeners.get(token)
        if found is not None:
            found[1](event)
