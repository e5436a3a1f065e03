"""A host from one boot to its end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any, TypeVar

from .._core.arguments import refusal, signature_error
from .._event_loop import shutdown
from .._event_loop.virtual_loop import coroutine_frames
from .._native import softdev
from .loop import NEVER, HostLoop

if TYPE_CHECKING:
    from .sockets import Socket
    from .world import Host, World

T = TypeVar("T")

MAX_TURN_NS = 10_000  # maximum virtual nanoseconds of a loop iteration, at slowness 1
# Idle servers wait in these functions, each given by its module and qualified name.
ACCEPT_FUNCTION = ("aiordma.transport", "Listener.accept")
SERVE_FUNCTIONS: set[tuple[object, str]] = {
    ("aiordma.transport", "Server.serve_forever"),
    ("aiordma.streams.server", "StreamServer.serve_forever"),
    ("asyncio.base_events", "Server.serve_forever"),
}


def check_program(
    program: object, args: tuple[Any, ...], where: str, arguments: str, hint: str
) -> None:
    """Raise TypeError if `program` is not a function or does not accept the arguments.

    Args:
        program: The program that the user passed.
        args: The arguments to call it with.
        where: The beginning of the error message, such as "the program of host 'main'".
        arguments: A description of the arguments for the error message.
        hint: The end of the error message, which explains how to pass a program.
    """
    if not callable(program):
        if asyncio.iscoroutine(program):
            program.close()
        raise TypeError(refusal(where, "an async function", program, hint))
    if why := signature_error(program, args):
        name = getattr(program, "__name__", repr(program))
        raise TypeError(f"{where}, {name}, cannot be called with {arguments}: {why}; {hint}")


class Machine:
    """A host's event loop and device during one boot. It implements `virtual_loop.World`."""

    def __init__(self, host: Host) -> None:
        self.world: World = host.world
        self.host: Host = host
        self.random: random.Random = host.world.random
        self.number: int = softdev.sim_boot(host.number)
        self.alive = True
        self.will_reboot = False
        """Whether the plan has killed the host and will boot it again."""
        self.pauses: set[object] = set()
        """The origins of the current pauses: faults, or the host itself for `Host.pause`."""
        self.bound: list[Socket] = []
        """The sockets that are bound to a port."""
        self.awaited: dict[asyncio.Future[Any], None] = {}
        """Futures of other hosts that wait for programs of this host."""
        self.services: set[asyncio.Task[Any]] = set()
        """The running programs of `Host.serve`."""
        self.sim_state = softdev.sim_program(self.number)
        self._programs: dict[asyncio.Task[Any], None] = {}  # asyncio keeps only weak references
        self.loop = HostLoop(self)
        self.sim_state.fd = self.loop.fd
        self.loop.set_exception_handler(self._on_exception)

    @property
    def now(self) -> float:
        return softdev.sim_now() / 1e9

    @now.setter
    def now(self, _: float) -> None:
        raise AttributeError

    def step(self, until: float | None) -> bool:
        """Do nothing, because virtual time never advances during a loop iteration."""
        return False

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self.alive:
            loop.default_exception_handler(context)

    def start(
        self, program: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...]
    ) -> asyncio.Task[T]:
        """Start a program on the host, after checking that the arguments fit."""
        where = f"host {self.host.name!r}"
        hint = "pass the function and its arguments without calling it: run(count, 20)"
        arguments = f"the arguments {', '.join(map(brief, args))}" if args else "no arguments"
        check_program(program, args, f"the program of {where}", arguments, hint)
        name = getattr(program, "__name__", repr(program))
        work = program(*args)
        if not asyncio.iscoroutine(work):
            hint = "write it with async def"
            raise TypeError(refusal(f"the result of {name} on {where}", "a coroutine", work, hint))
        task = self.loop.create_task(work, name=name)
        self._programs[task] = None
        task.add_done_callback(self._programs.pop)
        return task

    def is_idle(self, task: asyncio.Task[Any]) -> bool:
        """Return whether the task is a server that is waiting for clients.

        The main program and programs started with `Host.run` are never idle, because their results
        are awaited.
        """
        if task in self._programs and task not in self.services:
            return False
        awaiting_functions = [
            (it.f_globals.get("__name__"), it.f_code.co_qualname)
            for it in coroutine_frames(task.get_coro())
        ]
        # For serve_forever, only the innermost frame counts, because serve_forever awaits another
        # coroutine while the server is being closed.
        return ACCEPT_FUNCTION in awaiting_functions or not SERVE_FUNCTIONS.isdisjoint(
            awaiting_functions[-1:]
        )

    def next_due_time(self) -> int:
        """Return when the loop's next iteration is due, or NEVER if none is scheduled."""
        if not self.alive or self.pauses:
            return NEVER
        sim_state = self.sim_state
        due = 0 if sim_state.has_input else self.loop.next_due_time()
        return max(due, sim_state.busy_until)

    def turn(self) -> None:
        """Run one loop iteration, then mark the host as busy for a random time."""
        softdev.sim_enter(self.number)
        softdev.sim_note(self.number)  # include the turn in `World.trace`
        sim_state = self.sim_state
        self.loop.turn()
        sim_state.has_input = self.loop.has_input()  # the host's own device may have responded
        spent = self.random.random() * MAX_TURN_NS * self.host.slowness
        sim_state.busy_until = softdev.sim_now() + int(spent)

    def kill(self) -> None:
        self.alive = False
        self._update_state()

    def pause(self, origin: object) -> None:
        self.pauses.add(origin)
        self._update_state()

    def resume(self, origin: object) -> None:
        self.pauses.discard(origin)
        self._update_state()

    def _update_state(self) -> None:
        state = softdev.SIM_STOPPED if self.pauses else softdev.SIM_UP
        softdev.sim_set_state(self.number, state if self.alive else softdev.SIM_DEAD)

    def close(self) -> None:
        """Release all resources without notifying the peers."""
        softdev.sim_enter(self.number)
        self.kill()
        self.loop.abandon()
        for bound in list(self.bound):
            bound.close()
        shutdown.finish_loop(self.loop)
