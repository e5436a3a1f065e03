"""Tools for testing programs that use aiordma.

- :func:`simulate` runs whole programs on simulated hosts, in virtual time. A seed determines the
  order of events and the faults, so failures can be reproduced with the same seed.
- :class:`History` records the operations of programs and checks that they are linearizable.
- :func:`faults` injects faults into this process's embedded device.
- :func:`connected_pair` creates two connections, and :func:`check_leaks` finds leaked resources.

For example, check that a program works despite lost and duplicated frames::

    async def test_each_request_is_counted_once():
        with testing.faults(seed=1, loss=0.05, duplicate=0.05) as injected:
            async with testing.connected_pair() as (client, server):
                ...
        assert injected.counts().lost

Simulation and fault injection need the embedded device. Everything else works on any device.
docs/testing.md contains complete tests as examples.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import secrets
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import _GeneratorContextManager, asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import wraps
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

from . import verbs
from ._core.arguments import instance, integer, real, refusal, seconds
from ._core.finalizers import finalizer
from ._event_loop.virtual_loop import StalledError
from ._simulation import process
from ._simulation.faults import Fault, FaultPlan, Link
from ._simulation.history import History, Operation
from ._simulation.seeds import Seeds
from ._simulation.sockets import NotSimulatedError
from ._simulation.world import Host, KilledError, TimeLimitError, World, simulate
from .async_queue_pair import AsyncQueuePair
from .config import Config
from .errors import BusyError
from .transport import Connection, connect, listen
from .verbs import FaultCounts
from .verbs._device.device import name_or_variable

__all__ = [
    "Fault",
    "FaultCounts",
    "FaultPlan",
    "Faults",
    "Held",
    "History",
    "Host",
    "KilledError",
    "Link",
    "NotSimulatedError",
    "Operation",
    "Seeds",
    "StalledError",
    "TimeLimitError",
    "When",
    "World",
    "check_leaks",
    "connected_pair",
    "faults",
    "simulate",
]

P = ParamSpec("P")
T = TypeVar("T")

When = float | str
"""When to inject a fault: a probability, or a str that selects occurrences, counted from 1.

"@3" selects the third occurrence, "@3-5" the third to the fifth, and "@3-" the third and all later
ones. "0.5@3-" selects the third and each later one with a probability of 0.5. Frames of
connections, and requests that need a receive, are counted per connection. All other events are
counted for the whole process.
"""


class _Kind(NamedTuple):
    """The names that counters and traces use for a kind of fault."""

    counter: str
    """The member of FaultCounts that counts the faults."""
    fault: str
    """The name of the fault in a trace; empty if it is not traced."""
    opportunity: str
    """The type of trace record without which the fault had no opportunity to happen."""


_KINDS = {
    "loss": _Kind("lost", "LOSS", "create_qp"),
    "duplicate": _Kind("duplicated", "DUPLICATE", "create_qp"),
    "delay": _Kind("delayed", "", "create_qp"),
    "jitter": _Kind("delayed", "", "create_qp"),
    "rate": _Kind("delayed", "", "create_qp"),
    "cut": _Kind("cut", "CUT", "create_qp"),
    "rnr": _Kind("not_ready", "RNR", "create_qp"),
    "overrun": _Kind("overruns", "OVERRUN", "create_qp"),
    "register": _Kind("registrations", "REGISTER", "reg_mr"),
    "handshake": _Kind("handshakes", "HANDSHAKE", "trace"),
}


def _never_happened(
    plan: str, traces: Path | None, counts: FaultCounts | None = None, chances: int = 0
) -> str:
    """Return the faults of a plan that never happened.

    A fault with a probability below 1 may never happen by chance. It is therefore returned only if
    it had no opportunity to happen.

    Args:
        plan: The faults, in the syntax of AIORDMA_EMBEDDED_FAULTS.
        traces: A folder with a trace of each other process that opened the device.
        counts: The number of faults injected in this process.
        chances: The number of events in this process that a fault with a probability could affect.
    """
    traced: set[str] = set()
    for path in traces.iterdir() if traces else ():
        with path.open(errors="replace") as lines:
            for line in lines:
                traced.update(re.findall(r'"(?:fault|type)":"(\w+)"', line))
    missing = []
    for part in plan.split(","):
        name, _, value = part.partition("=")
        if (kind := _KINDS.get(name)) is None:
            continue
        found = re.match(r"[\d.]+", value)
        probability = float(found[0]) if found else 1.0
        may_happen = chances or kind.opportunity in traced
        is_expected = probability >= 1 or (probability > 0 and not may_happen)
        # A fault that is not traced, such as a delay, has happened if it had an opportunity.
        happened = getattr(counts, kind.counter, 0) or (kind.fault or kind.opportunity) in traced
        if is_expected and not happened:
            missing.append(part)
    return ", ".join(missing)


def _has_fault(names: Iterable[str]) -> bool:
    """Return whether `names` contains a fault. Every name that is not a setting counts as one."""
    return bool({*names} - {"seed", "frames", "cut_after", "qp", "cq", "device"})


class _Block(_GeneratorContextManager[T]):
    """A context manager that warns if it is never entered and therefore has no effect."""

    _used = True
    _text = ""

    def __init__(self, function: Callable[..., Any], args: Any, options: Any) -> None:
        super().__init__(function, args, options)
        self._text = (
            f"testing.{function.__name__}() was never entered, so it had no effect: write "
            f"`with testing.{function.__name__}(...):` around the code under test"
        )
        self._used = False

    def __enter__(self) -> T:
        self._used = True
        return super().__enter__()

    def __call__(self, function: Any) -> Any:
        self._used = True
        return super().__call__(function)

    @finalizer
    def __del__(self) -> None:
        if not self._used:
            warnings.warn(self._text, RuntimeWarning, stacklevel=3)


def _block(function: Callable[P, Iterator[T]]) -> Callable[P, _GeneratorContextManager[T]]:
    """Wrap a generator function as `contextmanager` does, but warn if a block is never entered."""

    @wraps(function)
    def make(*args: P.args, **options: P.kwargs) -> _GeneratorContextManager[T]:
        return _Block(function, args, options)

    return make


class Faults:
    """The faults injected during a :func:`faults` block."""

    def __init__(self, plan: str, seed: int, device: verbs.Device) -> None:
        """Initialize the object. Use :func:`faults` instead of calling this directly."""
        self.plan = plan
        """The faults, in the syntax used by the environment variable AIORDMA_EMBEDDED_FAULTS."""
        self.seed = seed
        self._device = device
        self._before = device.fault_counts()
        self._chances = device._fault_chances()
        self._after: FaultCounts | None = None
        self._is_limited_to_process = True
        """Whether the faults are in this process only, not in programs that a test starts."""

    def __repr__(self) -> str:
        return f"<Faults {self.plan}: {self.counts()}>"

    def counts(self) -> FaultCounts:
        """Return the number of faults injected so far. After the block, this is the final number.

        If a fault has a probability, your test should check that its count is not zero, because the
        fault may never have happened.
        """
        return (self._after or self._device.fault_counts()) - self._before

    def _never_happened(self, traces: Path | None = None) -> str:
        """Return the faults that should have happened but are missing from counts and traces."""
        chances = self._device._fault_chances() - self._chances
        return _never_happened(self.plan, traces, self.counts(), chances)


@_block
def faults(
    *,
    seed: int | None = None,
    loss: When = 0,
    duplicate: When = 0,
    frames: Literal["all", "requests", "answers"] = "all",
    delay: float = 0,
    jitter: float = 0,
    rate: int = 0,
    cut: When = 0,
    cut_after: int = 0,
    rnr: When = 0,
    overrun: When = 0,
    register: When = 0,
    handshake: When = 0,
    qp: verbs.QueuePair | AsyncQueuePair | int | None = None,
    cq: verbs.CompletionQueue | int | None = None,
    device: str | None = None,
) -> Iterator[Faults]:
    """Inject faults into this process's embedded device during a ``with`` block.

    With the same ``seed``, the k-th incoming frame of the n-th connection always gets the same
    fault. By default, the seed is random. If an exception leaves the block, its notes contain the
    faults, the seed and the counts, so that you can reproduce the failure.

    - ``loss``, ``duplicate``: incoming frames and datagrams are dropped or processed twice.
      Reliable connections retransmit lost frames, and fail with RETRY_EXC_ERR when all retries have
      failed. ``frames`` selects which frames of reliable connections are affected. Lost messages of
      UC and UD queue pairs are not retransmitted.
    - ``delay``, ``jitter``: incoming frames are delayed by ``delay`` seconds, plus a random time of
      up to ``jitter`` seconds. Frames on the same connection stay in order. A delay alone does not
      cause errors.
    - ``rate``: the device receives at most this number of bytes per second.
    - ``cut``: a connection breaks after receiving ``cut_after`` bytes. To select connections by
      occurrence, existing connections are counted first, followed by new ones in the order in which
      they are established.
    - ``rnr``: a request that needs a receive is rejected with an RNR NAK. The requester retries it
      up to ``rnr_retry`` times.
    - ``overrun``: a completion overruns its completion queue, which then enters the error state.
    - ``register``: a memory registration fails with ENOMEM.
    - ``handshake``: an incoming connection manager message is dropped and not retransmitted. The
      first message of a connection arrives at the listener, and the next two arrive at the caller.

    ``qp`` restricts the faults affecting connections, requests and datagrams to one queue pair.
    ``cq`` restricts overruns to one completion queue. If there are several embedded devices,
    ``device`` selects the one to which all faults apply. The faults replace those set by the
    environment variable AIORDMA_EMBEDDED_FAULTS, which do not take effect again after the block. A
    peer in another process is not affected.

    Raises:
        AssertionError: At the end of the block, if a fault never happened. A fault with a
            probability causes this error only if it had no opportunity to happen.
        ValueError: If an argument is invalid.
        BusyError: If another ``faults`` block or a simulation is active, because faults apply to
            the whole process.
        UnsupportedError: If the device is not an embedded device. Without ``device``, it is the one
            named by AIORDMA_DEVICE, or else the default device.
    """
    if process.injected is not None:
        raise BusyError(
            f"this process already injects faults ({process.injected}); end that block first"
        )
    if process.random_source is not None:
        raise BusyError(
            "testing.faults cannot be used in a simulation: use World.link or a FaultPlan instead"
        )
    chosen = verbs.find_device(name_or_variable(device))
    seed = secrets.randbits(32) if seed is None else integer("seed", seed)
    parts = {
        "seed": seed,
        "loss": _when("loss", loss),
        "duplicate": _when("duplicate", duplicate),
        "frames": "" if frames == "all" else _text("frames", frames, "a str such as 'requests'"),
        "delay": _time("delay", delay),
        "jitter": _time("jitter", jitter),
        "rate": integer("rate", rate),
        "cut": _when("cut", cut),
        "cut_after": integer("cut_after", cut_after),
        "rnr": _when("rnr", rnr),
        "overrun": _when("overrun", overrun),
        "register": _when("register", register),
        "handshake": _when("handshake", handshake),
        "qp": _qp_num(qp),
        "cq": _cq(cq),
        "device": device or "",
    }
    plan = ",".join(f"{name}={it}" for name, it in parts.items() if it or name == "seed")
    made = Faults(plan, seed, chosen)
    chosen.set_faults(plan)
    process.injected = plan
    try:
        yield made
        if made._is_limited_to_process and (never := made._never_happened()):
            raise AssertionError(
                f"injected faults that never happened: {never}; the block did not test them"
            )
    except BaseException as error:
        error.add_note(f"injected faults ({plan}): {made.counts()}")
        raise
    finally:
        process.injected = None
        made._after = chosen.fault_counts()
        chosen.set_faults(None)


WHEN = "a probability or text such as '@3'"


def _text(name: str, value: object, wanted: str) -> str:
    """Return `value` if it is a non-empty str. The device would silently ignore empty text."""
    if text := instance(name, value, str, wanted):
        return text
    raise ValueError(refusal(name, wanted, value))


def _when(name: str, when: When) -> str:
    """Format `when` for a plan. Avoid scientific notation, which plans do not support."""
    if isinstance(when, str):
        return _text(name, when, WHEN)
    number = real(name, when, WHEN)
    return format(Decimal(repr(number)), "f").removesuffix(".0") if number else ""


def _time(name: str, value: float) -> str:
    length = seconds(name, value)
    return f"{round(length * 1e9)}ns" if length else ""


def _qp_num(qp: verbs.QueuePair | AsyncQueuePair | int | None) -> str:
    if qp is None or isinstance(qp, int):
        return "" if qp is None else str(qp)
    wanted = "a QueuePair, an AsyncQueuePair or a number"
    inner = qp.qp if isinstance(qp, AsyncQueuePair) else qp
    return str(instance("qp", inner, verbs.QueuePair, wanted).qp_num)


def _cq(cq: verbs.CompletionQueue | int | None) -> str:
    if cq is None or isinstance(cq, int):
        return "" if cq is None else str(cq)
    return str(instance("cq", cq, verbs.CompletionQueue, "a CompletionQueue or a number").handle)


@asynccontextmanager
async def connected_pair(
    *, device: str | None = None, via: Literal["cm", "tcp"] = "cm", config: Config | None = None
) -> AsyncIterator[tuple[Connection, Connection]]:
    """Create two connections in this process that are connected to each other.

    ``device`` has the same meaning as for :func:`aiordma.connect`. The exceptions are those of
    :func:`aiordma.listen` and :func:`aiordma.connect`.

    Yields:
        The connecting and the accepted connection. Both are closed at the end of the block.
    """
    config = Config() if config is None else config
    chosen = verbs.find_device(name_or_variable(device))
    with chosen.open() as context:
        host = str(context.choose_gid().gid.ip)
    async with await listen(host, device=chosen.name, via=via, config=config) as listener:
        connecting = connect(host, listener.port, device=chosen.name, via=via, config=config)
        first, second = await asyncio.gather(connecting, listener.accept())
        async with first, second:
            yield first, second


@dataclass(frozen=True)
class Held:
    """The resources held by this process: open files, threads, and device objects by class.

    A file is identified by its descriptor and inode, and a thread by its ID and start time. Leaks
    are therefore detected even if the system reuses a descriptor or an ID.
    """

    files: dict[tuple[int, int, int, str], str]
    threads: dict[tuple[int, int], str]
    objects: dict[str, int]

    @classmethod
    def now(cls) -> Held:
        """Return the resources currently held by this process."""
        return cls(_open_files(), _threads(), verbs.live())

    def growth(self, after: Held) -> str:
        """Describe the resources added in ``after``, or return an empty string."""
        files = sorted(after.files.items(), key=lambda item: item[0][0])
        lines = [f"file {key[0]}: {target}" for key, target in files if key not in self.files]
        threads = sorted(after.threads.items())
        lines += [f"thread {key[0]}: {name}" for key, name in threads if key not in self.threads]
        for kind in sorted({*self.objects, *after.objects}):
            before, count = self.objects.get(kind, 0), after.objects.get(kind, 0)
            if count > before:
                lines.append(f"{kind}: {before} before, {count} after")
        return "\n".join(lines)


def _open_files() -> dict[tuple[int, int, int, str], str]:
    """Return the targets of open files, keyed by (descriptor, device, inode, anon_inode target)."""
    files = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target, status = os.readlink(f"/proc/self/fd/{name}"), os.fstat(int(name))
        except OSError:  # the descriptor of the listing, or one that another thread closed
            continue
        # All anonymous inodes share one inode number, so the target identifies their type. Other
        # targets are not part of the key, because they change when the file is renamed.
        kind = target if target.startswith("anon_inode:") else ""
        files[int(name), status.st_dev, status.st_ino, kind] = target
    return files


def _threads() -> dict[tuple[int, int], str]:
    """Return the names of this process's threads by ID and start time, in ticks since boot.

    The kernel may list a thread for a moment after it was joined. If a thread ends while the kernel
    creates the list, threads that started later may be missing. Listing is therefore repeated until
    two consecutive lists are equal.
    """
    threads = _list_threads()
    while (again := _list_threads()) != threads:
        threads = again
    return threads


PF_IO_WORKER = 0x10  # a thread flag in proc(5), defined in the kernel's include/linux/sched.h


def _list_threads() -> dict[tuple[int, int], str]:
    """List the threads once. Skip io_uring workers, which the kernel may stop at any time."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    threads = {}
    for name in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{name}/stat") as file:
                before, _, fields = file.read().rpartition(")")  # proc(5): name in parentheses
        except OSError:  # the thread has ended
            continue
        each = fields.split()
        flags, start_time = int(each[6]), int(each[19])  # fields 9 and 22 in proc(5)
        if not flags & PF_IO_WORKER:
            threads[int(name), start_time] = python.get(int(name)) or before.partition("(")[2]
    return threads


@_block
def check_leaks(*, timeout: float = 5) -> Iterator[None]:
    """Raise AssertionError if the block leaks files, threads or device objects.

    The error lists the leaked resources. If the block itself raises an exception, that exception
    takes precedence. The check waits up to ``timeout`` seconds for resources that are about to be
    freed. For example, the kernel may still list a thread that has already been joined.

    Put the check around a whole test, including its event loop, because the check blocks the
    thread. Resources that a loop or a library allocates on first use and then keeps count as leaks.
    """
    patience = seconds("timeout", timeout)
    before = Held.now()
    yield
    deadline, pause = time.monotonic() + patience, 0.001
    while growth := before.growth(Held.now()):
        if time.monotonic() > deadline:
            raise AssertionError(f"the block leaked:\n{growth}")
        gc.collect()  # reference cycles may hold resources
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
