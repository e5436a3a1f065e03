"""The asynchronous events of a device, delivered to every event loop that they may concern.

The device reports each event once, to the first reader (ibv_get_async_event(3)).  All loops of the
process share a context that the connection manager opened, so the loop that reads an event need not
be the one whose queue pair it is about.  So each loop watches, the first one takes all events, and
every subscriber is called with all of them in the thread of its own loop.  A loop that stands still
delays no other.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import ClassVar

from .. import verbs

Listener = Callable[[verbs.AsyncEvent], None]


class EventRouter:
    """The events of one context: one router for each context, as long as it is used."""

    _routers: ClassVar[weakref.WeakKeyDictionary[verbs.Context, EventRouter]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, context: verbs.Context) -> None:
        # The context is the key that keeps this alive, so it must not be kept alive by this.
        self._context = weakref.ref(context)
        self._listeners: dict[object, tuple[asyncio.AbstractEventLoop, Listener]] = {}

    @classmethod
    def of(cls, context: verbs.Context) -> EventRouter:
        return cls._routers.setdefault(context, cls(context))  # one for all threads

    def subscribe(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> object:
        """Calls `listener` with every event from now on, in `loop`'s thread.  Returns a token."""
        token = object()
        self._listeners[token] = (loop, listener)
        return token

    def unsubscribe(self, token: object) -> None:
        """Delivers nothing more, nor events that are on their way to the loop."""
        self._listeners.pop(token, None)

    def take(self) -> None:
        """Takes the events that are there and delivers them.  In the thread of a loop."""
        context = self._context()
        if context is None or context.closed:
            return
        for event in context.async_events():
            self.deliver(event)

    def deliver(self, event: verbs.AsyncEvent) -> None:
        here = asyncio.get_running_loop()
        for token, (loop, listener) in list(self._listeners.items()):
            if loop is here:
                listener(event)
                continue
            try:
                loop.call_soon_threadsafe(self._deliver_here, token, event)
            except RuntimeError:  # that loop is closed: it was ended without being cleaned up
                self.unsubscribe(token)

    def _deliver_here(self, token: object, event: verbs.AsyncEvent) -> None:
        found = self._listeners.get(token)
        if found is not None:
            found[1](event)
