"""A description of this machine for reports, and a way to pause garbage collection."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def machine() -> str:
    """Describe this machine's name, processors, kernel and Python interpreter on one line."""
    cores = len(os.sched_getaffinity(0))
    return (
        f"{platform.node()}: {cores} x {processor()}, {platform.system()} {platform.release()}, "
        f"{platform.python_implementation()} {platform.python_version()}"
    )[:256]


def processor() -> str:
    """Return the processor's model name, as found in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


@contextmanager
def garbage_collection_disabled() -> Iterator[None]:
    """Return a context manager that disables garbage collection.

    Entering the context runs the garbage collector once. Leaving the context enables garbage
    collection again if it was enabled before.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
