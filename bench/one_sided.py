"""A comparison of one-sided operations, and of the time that Python adds to each operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import peers
from .lanes import (
    Comparison,
    Contenders,
    Data,
    Lane,
    Options,
    Requirement,
    Spread,
    at_least,
    at_most,
    ratio,
    seconds,
    spread,
)

NOTE = """\
This test measures how long it takes to write to another process's memory or to read from it.
The initiator polls. It awaits each operation before it starts the next one, except in these rows:

- *4 in flight*: four writes are in flight at a time. The value is the total time divided by the
  number of writes.
- *Batches of 64*: 64 writes are posted together. With nixl, a batch is one transfer with 64
  parts.

The target is the process that owns the memory. It can be busy or asleep when data arrives:

- *Target polling*: the target's program polls. A Python program polls in a task that never waits.
- *Target idle*: the target's program sleeps, so the target's device has to wake up. With nixl, a
  progress thread polls.

For comparison, two columns show how long it takes to copy the same amount of data:

- *memcpy* copies between two shared mappings that fit into the cache of one core.
- *memcpy between cores* copies to memory that the other core has just written, as an RDMA write
  does. The time depends on whether the two cores share a cache. On a virtual machine, this can
  change at any time."""

AWAKE, ASLEEP = "target polling", "target idle"
WAITING = {AWAKE: "polling", ASLEEP: "sleeping"}  # for the C program's target
MEMCPY = {"memcpy": "copy", "memcpy between cores": "copy_across"}
MIB = 1 << 20
BATCH = 64
SMALL, LARGE, READ, LARGE_MANY = "64 B", "1 MiB", "1 MiB read", "1 MiB, 4 in flight"
BATCHED = f"in batches of {BATCH}"
EACH, ALL = 3e-6, 0.5e-6  # goals for the time added by Python, in seconds

# The kind of job, the number of operations per turn, and the job's other arguments. At the start
# and end of a LARGE_MANY turn, fewer than `window` writes are in flight. The turn transfers 1 GiB
# so that this hardly affects the result.
WORKS = {
    SMALL: ("write", 1000, {"size": 64}),
    LARGE: ("write", 100, {"size": MIB}),
    READ: ("read", 100, {"size": MIB}),
    LARGE_MANY: ("write_many", 1024, {"size": MIB, "window": 4}),
    f"64 B {BATCHED}": ("write_batch", 12800, {"size": 64, "window": BATCH}),
}
# The arguments for the kinds of work that nixl supports.
NIXL: dict[str, dict[str, Any]] = {
    SMALL: {"do": "one", "operation": "WRITE", "size": 64},
    LARGE: {"do": "one", "operation": "WRITE", "size": MIB},
    READ: {"do": "one", "operation": "READ", "size": MIB},
    f"64 B {BATCHED}": {"do": "batch", "operation": "WRITE", "size": 64, "window": BATCH},
}


def lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    for target in (AWAKE, ASLEEP):
        way = "aiordma awake" if target == AWAKE else "aiordma"
        runners = {
            "aiordma": contenders.python(way),
            "aiordma on asyncio": contenders.python(way, "asyncio"),
            "C": contenders.c("polling", WAITING[target]),
        }
        for work, (kind, many, numbers) in WORKS.items():
            job = {**numbers, "count": options.count(many, numbers.get("window", 1))}
            for who, contender in runners.items():
                if who == "C" and kind == "read":
                    continue  # the C program has no such job
                yield Lane.of(contender, f"{work}, {target}", who, kind, **job)
            if target == ASLEEP and work in NIXL:
                its = {"service": "memory", "count": job["count"], **NIXL[work]}
                yield peers.lane(
                    contenders, "nixl", f"{work}, {target}", "nixl", "by_client", **its
                )
            if work == LARGE:
                for who, copy in MEMCPY.items():
                    yield Lane.of(contenders.c(), f"{work}, {target}", who, copy, **job)


def requirements(data: Data) -> Iterator[Requirement]:
    def pair(work: str, target: str) -> tuple[list[float], list[float]]:
        work = f"{work}, {target}"
        return seconds(data, work, "aiordma"), seconds(data, work, "C")

    def added(work: str, target: str) -> Spread:
        """Return how much longer aiordma takes than C in each turn, in microseconds."""
        return spread((ours - its) * 1e6 for ours, its in zip(*pair(work, target), strict=True))

    for target in (AWAKE, ASLEEP):
        for work, what in ((LARGE, "1 MiB write"), (LARGE_MANY, "1 MiB writes, 4 in flight")):
            times = ratio(*pair(work, target))
            yield at_most(f"{what}, {target}: time relative to C", 1.1, times)
        ours, its = pair(SMALL, target)
        beyond = spread((a - 1.5 * b) * 1e6 for a, b in zip(ours, its, strict=True))
        what = f"64 B write, {target}: time minus 1.5 times that of C"
        yield at_most(what, 3, beyond, "us")
        what = f"64 B write, {target}: time minus that of C"
        yield at_most(what, EACH * 1e6, added(SMALL, target), "us")
        ours, _ = pair(f"64 B {BATCHED}", target)
        rate = spread(1e-6 / one for one in ours)
        yield at_least(f"64 B writes {BATCHED}, {target}: rate", 1, rate, "million/s")
        what = f"64 B writes {BATCHED}, {target}: time minus that of C"
        yield at_most(what, ALL * 1e6, added(f"64 B {BATCHED}", target), "us")
    for work, what in ((LARGE, "write"), (READ, "read")):
        nixl = seconds(data, f"{work}, {ASLEEP}", "nixl")
        for target in (AWAKE, ASLEEP):
            times = ratio(seconds(data, f"{work}, {target}", "aiordma"), nixl)
            yield at_most(f"1 MiB {what}, {target}: time relative to nixl", 1, times)
    across = seconds(data, f"{LARGE}, {AWAKE}", "memcpy between cores")
    for work, what in ((LARGE, "1 MiB write in C"), (LARGE_MANY, "1 MiB writes in C, 4 in flight")):
        copied = ratio(seconds(data, f"{work}, {AWAKE}", "C"), across)
        yield at_most(f"{what}: time relative to memcpy between cores", 1.3, copied)


COMPARISON = Comparison(
    "One-sided", NOTE, lanes, requirements, caption="Time per one-sided operation in us"
)
