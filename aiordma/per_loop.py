"""What the connections of a loop share: made with the first of them, and closed after the last.

In the child of a fork all of it is the parent's.
"""

from __future__ import annotations

import asyncio
import os
import sys
import weakref
from collections.abc import Callable
from typing import ClassVar, Self

# Seconds for which a device stays open when its last connection is closed; 0: not at all.  To open
# it takes as long as to connect twice: a thread, a pool, processes of this host that meet again.
LINGER = 1.0


class _Rest:
    """Closes what nobody uses, after a moment or with its loop.

    The loop alone has it, in a timer, and drops that when it is closed.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        shared.loop.call_later(LINGER, self.over)

    def over(self) -> None:
        self._shared.rest_over()

    def __del__(self) -> None:
        if self._shared.loop.is_closed() and not sys.is_finalizing():
            self._shared.rest_over(again=False)


class Shared:
    """Kept per loop under a key, made at the first `acquire`, closed at the last `release`.

    Or, if it lingers, a moment later, unless somebody acquires it again; but with its loop.
    """

    lingers = False
    _manner: tuple[float, ...] = ()  # of use, as the first user wanted it

    _instances: ClassVar[
        weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[type, object], Shared]]
    ] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop, key: object) -> None:
        self.loop = loop
        self._key = (type(self), key)
        self._users = 0
        self._gone = False  # closed; or this is the child of a fork, and all of it its parent's
        self._resting = False  # a rest is under way
        self._used = False  # since it began

    @classmethod
    def _disown_all(cls) -> None:
        """In the child of a fork: nothing is touched, and everything made anew for its loops."""
        for here in cls._instances.values():
            for instance in here.values():
                instance._disown()
        cls._instances = weakref.WeakKeyDictionary()

    def _disown(self) -> None:
        self._gone = True

    @classmethod
    def _acquire(
        cls, key: object, make: Callable[[asyncio.AbstractEventLoop], Self], *manner: float
    ) -> Self:
        loop = asyncio.get_running_loop()
        here = cls._instances.setdefault(loop, {})
        instance = here.get((cls, key))
        if instance is not None and not instance._users and instance._manner != manner:
            instance._end()
            instance = None
        if instance is None:
            instance = here[(cls, key)] = make(loop)
            instance._manner = manner
        assert isinstance(instance, cls)
        instance._users += 1
        instance._used = True
        return instance

    def release(self) -> None:
        """Gives back what `acquire` gave."""
        self._users -= 1
        if self._users == 0 and not self._gone:
            self._leave()

    def _leave(self) -> None:
        """Nobody uses it any more."""
        if not LINGER or not self.lingers or self.loop.is_closed():
            self._end()
            return
        self._idle()
        if not self._resting:
            self._resting = True
            self._used = False
            _Rest(self)

    def rest_over(self, *, again: bool = True) -> None:
        """A moment has gone by; there may be another one, if it has been used."""
        self._resting = False
        if self._users or self._gone:
            return
        if self._used and again:
            self._leave()
        else:
            self._end()

    def _end(self) -> None:
        self._gone = True
        self._withdraw()
        self._close()

    def _idle(self) -> None:
        """It may be a while until somebody uses it again."""

    def _withdraw(self) -> None:
        """Whoever acquires from now on gets another one."""
        here = self._instances.get(self.loop, {})
        if here.get(self._key) is self:
            del here[self._key]

    def _close(self) -> None:
        raise NotImplementedError


os.register_at_fork(after_in_child=Shared._disown_all)
