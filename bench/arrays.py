"""A comparison of sending NumPy arrays to another process, on an idle and on a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from .contender import on_core
from .lanes import Comparison, Contenders, Data, Lane, Options, Requirement, at_least, size_name
from .messages import OURS, faster

PARTS, SIZE, COUNT = 8, 64 << 20, 10
INTO, SOCKETS = "aiordma, into existing memory", "blocking sockets"
LOADED = ", busy cores"
SPIN = [sys.executable, "-c", "while True: pass"]


@contextmanager
def busy_cores() -> Iterator[None]:
    """Return a context manager that keeps every core busy with a CPU-bound process."""
    with ExitStack() as stack:
        for core in sorted(os.sched_getaffinity(0))[:2]:
            with on_core(core):
                process = stack.enter_context(subprocess.Popen(SPIN))
            stack.callback(process.kill)
        yield


def under_load(do: Callable[[], float]) -> float:
    with busy_cores():
        return do()


def lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    size = min(SIZE, options.most)
    numbers = {"parts": PARTS, "size": size, "count": options.count(COUNT)}
    ours, theirs = contenders.python(OURS), contenders.python(SOCKETS)
    for loaded in "", LOADED:
        for who, contender, into in (OURS, ours, 0), (INTO, ours, 1), (SOCKETS, theirs, 0):
            do = partial(contender.do, "arrays", into=into, **numbers)
            work = f"{PARTS} arrays, {size_name(size)}{loaded}"
            yield Lane(work, who, partial(under_load, do) if loaded else do)


def requirements(data: Data) -> Iterator[Requirement]:
    for work in dict.fromkeys(entry["work"] for entry in data):
        least = 1.5 if work.endswith(LOADED) else 3
        yield at_least(
            f"{work}: speed relative to {SOCKETS}", least, faster(data, work, OURS, SOCKETS)
        )


COMPARISON = Comparison(
    "Arrays",
    f"""\
This test sends a dict of {PARTS} numpy arrays to another process, which replies as soon as it
has received all of the arrays. In the aiordma rows, the sender uses `arrays.send` and the
receiver uses `arrays.recv`. For *into existing memory*, the receiver uses `conn.recv_into` and
`arrays.unpack` instead. With blocking sockets, the sender first sends a header that contains the
arrays' names, types and shapes. The receiver then allocates new memory for each array. For *busy
cores*, a CPU-bound process runs on each core.""",
    lanes,
    requirements,
    unit="GB/s",
    figure=lambda work, seconds: SIZE / seconds / 1e9,
    caption="Throughput of arrays in GB/s",
)
