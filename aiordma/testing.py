"""For the tests of your own program: faults on command, connected pairs, a leak check.

    async def test_nothing_is_counted_twice():
        with testing.faults(seed=1, loss=0.05, duplicate=0.05) as injected:
            async with testing.connected_pair() as (client, server):
                ...
        assert injected.counts().lost

Faults are those of the embedded device; everything else works on any device. docs/testing.md has an
example of a whole test.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Literal

from . import verbs
from .async_queue_pair import AsyncQueuePair
from .config import Config
from .errors import BusyError
from .transport import Connection, connect, listen
from .verbs import FaultCounts

__all__ = ["FaultCounts", "Faults", "Held", "When", "check_leaks", "connected_pair", "faults"]

When = float | str
"""How often a fault strikes: a probability from 0 to 1, or which occurrence, counted from 1.

"@3" is the third one, "@3-5" the third to the fifth, "@3-" the third and all later ones; "0.5@3-"
each of these with a probability. Frames of connections, and requests that need a receive, are
counted for each connection, everything else in the process.
"""


class Faults:
    """A plan of faults that is in force, as :func:`faults` gives it."""

    def __init__(self, plan: str, seed: int, device: verbs.Device) -> None:
        """For this package."""
        self.plan = plan
        """As the environment variable AIORDMA_EMBEDDED_FAULTS would have it."""
        self.seed = seed
        self._device = device
        self._before = device.fault_counts()
        self._after: FaultCounts | None = None

    def __repr__(self) -> str:
        return f"<Faults {self.plan}: {self.counts()}>"

    def counts(self) -> FaultCounts:
        """What the plan has done so far; when it is over, what it has done in all.

        Assert on it: a test of a fault that never happened shows nothing.
        """
        return (self._after or self._device.fault_counts()) - self._before

    def _set(self) -> None:
        self._device.set_faults(self.plan)

    def _end(self) -> None:
        self._after = self._device.fault_counts()
        self._device.set_faults(None)


_in_force: Faults | None = None


@contextmanager
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
    """Inside ``with``, things go wrong in the embedded device of this process.

    The k-th frame that comes in by the n-th connection meets the same fate whenever the ``seed`` is
    the same. Without a seed one is drawn. An exception that leaves the block gets a note
    with the plan and what it has done, so that the failure can be repeated.

    - ``loss``, ``duplicate``: frames and datagrams that come in are dropped, or taken in twice;
      ``frames`` says which ones of reliable connections. Reliable ones then send again, as
      InfiniBand has it, and fail with RETRY_EXC_ERR when that was not enough; what UC and UD queue
      pairs lose is lost.
    - ``delay``, ``jitter``: what comes in is late, by so many seconds and by up to so many more;
      the order within a connection stays. Nothing fails because of that alone.
    - ``rate``: a slow device, which takes in so many bytes a second.
    - ``cut``: connections break, those that there are being counted first, then new ones in the
      order in which they come up; each when it has taken in ``cut_after`` bytes.
    - ``rnr``: a request that needs a receive is told that there is none; it is tried again as often
      as rnr_retry says.
    - ``overrun``: a completion finds its queue full, which is the end of the queue.
    - ``register``: a registration of memory fails with ENOMEM.
    - ``handshake``: a message of the connection manager that comes in is dropped: the first one of
      a connection is the listener's, the next two are the caller's. Nobody sends them again.

    ``qp`` and ``cq`` limit connections, requests and datagrams to one queue pair, and overruns to
    one completion queue. The plan replaces that of the environment variable
    AIORDMA_EMBEDDED_FAULTS, which is over with it. The other side of a connection, in another
    process, has a plan of its own, or none.

    Raises ValueError for a value that cannot be, BusyError inside another such block (there is one
    plan for the process), and UnsupportedError when ``device`` (or AIORDMA_DEVICE, or the default
    device) is not the embedded one.
    """
    global _in_force  # noqa: PLW0603 - there is one plan for the process
    if _in_force:
        raise BusyError(f"there is a plan of faults already: {_in_force.plan}")
    chosen = verbs.find_device(device or os.environ.get("AIORDMA_DEVICE") or None)
    if seed is None:
        seed = secrets.randbits(32)
    parts = {
        "seed": seed,
        "loss": _when(loss),
        "duplicate": _when(duplicate),
        "frames": "" if frames == "all" else frames,
        "delay": _time(delay),
        "jitter": _time(jitter),
        "rate": rate,
        "cut": _when(cut),
        "cut_after": cut_after,
        "rnr": _when(rnr),
        "overrun": _when(overrun),
        "register": _when(register),
        "handshake": _when(handshake),
        "qp": qp if qp is None or isinstance(qp, int) else _qp_num(qp),
        "cq": cq.handle if isinstance(cq, verbs.CompletionQueue) else cq,
    }
    plan = ",".join(f"{name}={it}" for name, it in parts.items() if it or name == "seed")
    made = Faults(plan, seed, chosen)
    made._set()
    _in_force = made
    try:
        yield made
    except BaseException as error:
        error.add_note(f"faults were injected, as planned by {plan}: {made.counts()}")
        raise
    finally:
        _in_force = None
        made._end()


def _when(when: When) -> str:
    """Without an exponent, which a plan has not."""
    if isinstance(when, str):
        return when
    return format(when, ".18f").rstrip("0").rstrip(".") if when else ""


def _time(seconds: float) -> str:
    return f"{round(seconds * 1e9)}ns" if seconds else ""


def _qp_num(qp: verbs.QueuePair | AsyncQueuePair) -> int:
    return qp.qp.qp_num if isinstance(qp, AsyncQueuePair) else qp.qp_num


@asynccontextmanager
async def connected_pair(
    *,
    device: str | None = None,
    via: Literal["cm", "tcp"] = "cm",
    config: Config | None = None,
) -> AsyncIterator[tuple[Connection, Connection]]:
    """Two connections that are connected to each other, both in this process.

    The first one has connected, the second one has been accepted; both are closed at the end of the
    block. ``device`` is as in :func:`aiordma.connect`, and is reached by its own address. Raises
    what :func:`aiordma.listen` and :func:`aiordma.connect` raise.
    """
    config = config or Config()
    chosen = verbs.find_device(device or os.environ.get("AIORDMA_DEVICE") or None)
    with chosen.open() as context:
        host = str(context.choose_gid().gid.ip)
    async with await listen(host, device=chosen.name, via=via, config=config) as listener:
        connecting = connect(host, listener.port, device=chosen.name, via=via, config=config)
        first, second = await asyncio.gather(connecting, listener.accept())
        async with first, second:
            yield first, second


@dataclass(frozen=True)
class Held:
    """What this process holds: open files, threads, objects of the device by class.

    A file is one object under one number, so that another one that has got the number of a closed
    one is told apart; a thread is one with its start.
    """

    files: dict[tuple[int, int, int, str], str]
    threads: dict[tuple[int, int], str]
    objects: dict[str, int]

    @classmethod
    def now(cls) -> Held:
        """At this moment."""
        return cls(_open_files(), _threads(), verbs.live())

    def growth(self, after: Held) -> str:
        """What there is after, and was not before; empty when nothing."""
        lines = [
            f"file {key[0]}: {target}"
            for key, target in sorted(after.files.items(), key=lambda item: item[0][0])
            if key not in self.files
        ]
        lines += [
            f"thread {key[0]}: {name}"
            for key, name in sorted(after.threads.items())
            if key not in self.threads
        ]
        for kind in sorted({*self.objects, *after.objects}):
            before, count = self.objects.get(kind, 0), after.objects.get(kind, 0)
            if count > before:
                lines.append(f"{kind}: {before} before, {count} after")
        return "\n".join(lines)


def _open_files() -> dict[tuple[int, int, int, str], str]:
    """Numbers, devices, inodes and, of what has no inode of its own, kinds; the targets."""
    files = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target, status = os.readlink(f"/proc/self/fd/{name}"), os.fstat(int(name))
        except OSError:  # the directory's own descriptor, or one that another thread has closed
            continue
        # The text of a target changes when the file is renamed; eventfds, epolls and the like
        # share one inode.
        kind = target if target.startswith("anon_inode:") else ""
        files[int(name), status.st_dev, status.st_ino, kind] = target
    return files


def _threads() -> dict[tuple[int, int], str]:
    """The ids and the starts of this process's threads, in ticks since the boot, and their names.

    A thread that has been joined is listed until the kernel has taken it away.
    """
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    threads = {}
    for name in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{name}/stat") as file:
                before, _, fields = file.read().rpartition(")")  # proc(5): the name is in brackets
        except OSError:  # it has ended
            continue
        threads[int(name), int(fields.split()[19])] = (
            python.get(int(name)) or before.partition("(")[2]
        )
    return threads


@contextmanager
def check_leaks(*, timeout: float = 5) -> Iterator[None]:
    """Raises AssertionError when the block leaves something behind that was not there before.

    That is open files, threads, and objects of the device (queue pairs, regions ...), which it
    lists. What ends on its own, such as a thread that has been joined and that the kernel still
    lists, has up to ``timeout`` seconds for that; when nothing is left behind, the check does not
    wait. An exception of the block itself goes before. Put it around all of a test, the event loop
    included: the check blocks its thread, and what a loop or a library keeps from its first use on
    counts as left behind.
    """
    before = Held.now()
    yield
    deadline, pause = time.monotonic() + timeout, 0.001
    while growth := before.growth(Held.now()):
        if time.monotonic() > deadline:
            raise AssertionError(f"left behind:\n{growth}")
        gc.collect()  # cycles may hold what refers to closed things
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
