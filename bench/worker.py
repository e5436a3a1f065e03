"""The server or client process of a contender written in Python.

    python -m bench.worker serve WAY LOOP FOLDER    print the services' addresses, and serve
    python -m bench.worker measure WAY LOOP         read the addresses, and run a job for each line

Both processes exit when their input ends. A job's result is the time per operation in seconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from .ways import Measuring, Way

# Modules are imported on demand, so that workers for sockets do not import aiordma.
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "aiordma": ("over_rdma", "OverRDMA", {}),
    "aiordma sleeping": ("over_rdma", "OverRDMA", {"polling": 0}),
    "aiordma awake": ("over_rdma", "OverRDMA", {"awake": True}),
    "aiordma encrypted": ("over_rdma", "OverRDMA", {"encrypt": True}),
    "aiordma over TCP": ("over_rdma", "OverRDMA", {"links": "tcp"}),
    "aiordma exchange over TCP": ("over_rdma", "OverRDMA", {"via": "tcp", "links": "tcp"}),
    "aiordma exchange": ("over_rdma", "OverRDMA", {"via": "tcp"}),
    "aiordma exchange, a socket each": ("over_rdma", "OverRDMA", {"via": "tcp", "in_band": False}),
    "blocking sockets": ("over_blocking", "OverBlocking", {}),
    "TCP protocol": ("over_sockets", "OverProtocol", {}),
    "Unix protocol": ("over_sockets", "OverProtocol", {"unix": True}),
    "ucxx": ("over_ucxx", "OverUCXX", {}),
    "ucxx connecting": ("over_ucxx", "OverUCXX", {}),
    "nixl": ("over_nixl", "OverNIXL", {}),
}

Job = dict[str, Any]

PR_SET_PDEATHSIG = 1  # prctl(2)


def load_way(name: str) -> Way:
    module, kind, options = WAYS[name]
    return cast(Way, getattr(import_module(f".{module}", __package__), kind)(**options))


def loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the available event loops, by name."""
    found: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if find_spec("uvloop"):
        import uvloop  # noqa: PLC0415 - it might not be installed

        found["uvloop"] = uvloop.new_event_loop
    return found


async def measure(way: Way) -> None:
    places = json.loads(sys.stdin.readline())
    async with AsyncExitStack() as stack:
        measuring = getattr(way, "measuring", partial(Measuring, way))(places, stack)
        for line in sys.stdin:  # may block, because the loop is idle between jobs
            job: Job = json.loads(line)
            kind: Callable[..., Awaitable[float]] = getattr(measuring, job.pop("kind"))
            print(await kind(**job), flush=True)


async def serve(way: Way, folder: str) -> None:
    async with way.serve(folder) as places:
        print(json.dumps(places), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def continue_without_parent() -> None:
    """Have the kernel send SIGCONT to this process when its parent dies.

    A worker stopped by SIGSTOP must continue before it can exit.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT))


def main(what: str, way: str, loop: str, *folder: str) -> None:
    continue_without_parent()
    gc.disable()  # as `aiordma perf` does
    with asyncio.Runner(loop_factory=loops()[loop]) as runner:
        transport = load_way(way)
        runner.run(serve(transport, *folder) if what == "serve" else measure(transport))


if __name__ == "__main__":
    main(*sys.argv[1:])
