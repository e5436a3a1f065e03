"""A process's resource usage: memory by kind, open files, and CPU time."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

from aiordma.mr_pool import MemoryPool

KIB = 1 << 10
PAGE = os.sysconf("SC_PAGE_SIZE")
PRESENT = 1 << 63  # proc_pid_pagemap(5)

Footprint = dict[str, int]


def footprint(pool: MemoryPool | None) -> Footprint:
    """Return this process's memory usage and number of open files.

    `private` is the part of the resident memory that is not shared with other processes. `pool` is
    the resident size of the pool's slabs. `registered` is the amount of memory that the pool has
    registered. All sizes are in bytes.
    """
    kinds = {"Rss": 0, "Private_Dirty": 0}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name in kinds:
            kinds[name] = int(amount.split()[0]) * KIB
    slabs = [] if pool is None else [slab for slab, _ in pool._slab_regions.values()]
    return {
        "resident": kinds["Rss"],
        "private": kinds["Private_Dirty"],
        "pool": sum(present(slab.addr, slab.length) for slab in slabs),
        "registered": 0 if pool is None else pool.statistics().registered_bytes,
        "files": len(os.listdir("/proc/self/fd")),
    }


def present(address: int, length: int) -> int:
    """Return the number of resident bytes in a memory range."""
    first, last = address // PAGE, (address + length - 1) // PAGE
    entries = array("Q")
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(first * entries.itemsize)
        entries.frombytes(pagemap.read((last - first + 1) * entries.itemsize))
    return PAGE * sum(1 for entry in entries if entry & PRESENT)


def reset_peak() -> None:
    """Reset the peak returned by `peak` (proc_pid_clear_refs(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Return this process's peak resident memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIB
    raise LookupError("VmHWM is missing from /proc/self/status")


def scheduled(pid: int) -> tuple[int, int]:
    """Return how often a process's threads were scheduled, and their CPU time in nanoseconds."""
    times = runs = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        ran, _waited, slices = (int(word) for word in (task / "schedstat").read_text().split())
        times += ran
        runs += slices
    return runs, times
