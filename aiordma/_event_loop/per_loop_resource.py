"""Resources that a loop's connections and registered regions share, from the first to the last.

They also end with their loop. In the child of a fork, they belong to the parent.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import ClassVar, Self

from .._native import fork

# Number of seconds for which a device stays open after its last connection has closed. 0 closes the
# device immediately. Opening a device takes about as long as establishing two connections, because
# it needs a thread, a pool, and shared memory with each local peer.
IDLE_TIMEOUT = 1.0


class PerLoopResource:
    """A resource that is shared by all users in one event loop that acquire it with the same key.

    The last `release` closes the resource. With `has_idle_timeout`, it stays open for another
    IDLE_TIMEOUT seconds and can be acquired again. It is closed immediately when the loop ends.
    """

    has_idle_timeout = False
    _settings: object = None  # the settings for which it was created

    _instances: ClassVar[
        weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[tuple[type, object], PerLoopResource]
        ]
    ] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop, key: object) -> None:
        self.loop = loop
        self._key = (type(self), key)
        self._users = 0
        self._closed = False  # closed, or in the child of a fork
        self._timer: asyncio.TimerHandle | None = None  # while it has no user

    @classmethod
    def all(cls) -> list[Self]:
        """Return the resources of this class in every loop. Any thread may call this."""
        found = []
        for ref in cls._instances.keyrefs():
            loop = ref()
            instances = cls._instances.get(loop) if loop is not None else None
            found += [each for each in list((instances or {}).values()) if isinstance(each, cls)]
        return found

    @classmethod
    def end_all(cls, loop: asyncio.AbstractEventLoop) -> None:
        """Close the resources of a closed loop, including those that were not released."""
        with ExitStack() as steps:  # close all of them, even if one fails
            for instance in (cls._instances.pop(loop, None) or {}).values():
                if not instance._closed:
                    steps.callback(instance._end)

    @classmethod
    def _reset_all_after_fork(cls) -> None:
        """Forget all resources in a forked child, without closing them."""
        for instances in cls._instances.values():
            for instance in instances.values():
                instance._reset_after_fork()
        cls._instances = weakref.WeakKeyDictionary()

    def _reset_after_fork(self) -> None:
        self._closed = True
        self._stop_timer()

    @classmethod
    def _acquire(
        cls, key: object, make: Callable[[asyncio.AbstractEventLoop], Self], settings: object = None
    ) -> Self:
        """Add a user to the running loop's resource for `key`, calling `make` if there is none.

        If the resource has other users, it keeps the `settings` for which it was created.
        """
        loop = asyncio.get_running_loop()
        instances = cls._instances.setdefault(loop, {})
        instance = instances.get((cls, key))
        if instance is not None and not instance._users and instance._settings != settings:
            # It is only waiting for its idle timeout. Create one with the requested settings.
            instance._end()
            instance = None
        if instance is None:
            instance = instances[(cls, key)] = make(loop)
            instance._settings = settings
        assert isinstance(instance, cls)
        instance._users += 1
        instance._stop_timer()
        return instance

    def hold(self) -> None:
        """Add one more user."""
        self._users += 1

    def release_threadsafe(self) -> None:
        """Schedule a `release` in the loop. Any thread may call this."""
        if not self._closed:
            with suppress(RuntimeError):  # the loop has been closed
                self.loop.call_soon_threadsafe(self.release)

    def release(self) -> None:
        """Remove a user. A resource without users is closed, possibly after an idle timeout."""
        self._users -= 1
        if self._users or self._closed:
            return
        if not IDLE_TIMEOUT or not self.has_idle_timeout or self.loop.is_closed():
            self._end()
        else:
            self._release_unneeded()
            self._timer = self.loop.call_later(IDLE_TIMEOUT, self._end)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _end(self) -> None:
        self._closed = True
        self._stop_timer()
        self._unregister()
        self._close()

    def _release_unneeded(self) -> None:
        """Release everything that is not needed while the resource has no users."""

    def _unregister(self) -> None:
        """Make the next `_acquire` create a new instance. This one stays open for its users."""
        instances = self._instances.get(self.loop, {})
        if instances.get(self._key) is self:
            del instances[self._key]
        # Until it is closed, keep it among the loop's resources under a key that nobody asks for.
        if not self._closed:
            self._key = (type(self), self)
            instances[self._key] = self

    def _close(self) -> None:
        raise NotImplementedError


fork.reset_in_child(PerLoopResource._reset_all_after_fork)
