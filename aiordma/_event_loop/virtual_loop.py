"""An asyncio event loop in virtual time. A seed determines what happens, and in which order.

The loop is asyncio's own and keeps its order of callbacks. Everything outside of the loop is a
`World`. Its `step` lets something happen or advances the time, and the loop then checks which of
its descriptors are readable. The loop never sleeps. If nothing can end a wait, it raises an error
that names the waiting tasks.
"""

from __future__ import annotations

import asyncio
import gc
import random
import selectors
from collections.abc import Callable, Collection, Iterator
from types import AsyncGeneratorType, FrameType
from typing import Any, Protocol

from .._datapath.memory import Clock


class World(Protocol):
    """The environment of a virtual loop: its devices, its peers and the time."""

    now: float
    """The time in seconds."""
    random: random.Random

    def step(self, until: float | None) -> bool:
        """Process an event and return True, or advance `now` to `until` and return False.

        If `until` is None, there is no time limit, and StalledError is raised if no event is left.
        """


class StalledError(RuntimeError):
    """Every task is waiting, and no event is left that could wake one."""


class _Selector(selectors.DefaultSelector):
    """A selector that checks descriptors but never waits for them."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.ready: Collection[object] = ()
        """The callbacks that the loop will call."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Process events of the world until a descriptor or callback is ready, or time is up."""
        world = self._world
        until = None if timeout is None else world.now + timeout
        while True:
            before_deadline = world.step(until)
            found = super().select(0)
            if found or self.ready or not before_deadline:
                if len(found) > 1:
                    world.random.shuffle(found)
                return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that runs in the time of a `World`."""

    def __init__(self, world: World) -> None:
        self._world = world
        selector = _Selector(world)
        super().__init__(selector)
        # asyncio creates its queue of callbacks in `__init__`.
        selector.ready = self._ready  # type: ignore[attr-defined]
        # asyncio runs the timers that are due before `time() + _clock_resolution`. After months of
        # virtual time, adding the default of 1 ns would not change the float, and no timer would
        # run.
        self._clock_resolution = 1e-8
        self.clock: Clock = Clock(self.time, self.call_at)
        """The clock of the connections in this loop."""

    def time(self) -> float:
        return self._world.now


def describe_waiting_tasks(
    loop: asyncio.AbstractEventLoop,
    is_omitted: Callable[[asyncio.Task[Any]], bool] = lambda _: False,
) -> str:
    """Return the names of a loop's tasks and the stack of each task, for error messages."""
    lines = []
    for task in sorted(asyncio.all_tasks(loop), key=asyncio.Task.get_name):
        if not is_omitted(task):
            lines.append(task.get_name())
            lines += [
                f"    {it.f_code.co_qualname} at {it.f_code.co_filename}:{it.f_lineno}"
                for it in coroutine_frames(task.get_coro())
            ]
    return "\n".join(lines)


def coroutine_frames(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of the coroutines that it awaits, outermost first."""
    while awaited is not None:
        for kind in ("cr", "gi", "ag"):
            if (frame := getattr(awaited, f"{kind}_frame", None)) is not None:
                yield frame
        # `async for` awaits an object of this type, which has none of the attributes used below.
        if type(awaited).__name__ == "async_generator_asend":
            inner = [it for it in gc.get_referents(awaited) if isinstance(it, AsyncGeneratorType)]
            awaited = inner[0] if inner else None
        else:
            names = "cr_await", "gi_yieldfrom", "ag_await"
            awaited = next(filter(None, (getattr(awaited, name, None) for name in names)), None)
