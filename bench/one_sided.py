"""One-sided writes, and what Python adds to one."""

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

NOTE = (
    "Writes into the memory of another process; a core each. *Target awake*: there a C program "
    "polls its completion queue, a Python program has a task that never sleeps. *Target asleep*: "
    "the other program sleeps, and its device has to wake up for each write. The one that writes "
    "polls: in C always, in aiordma adaptively. *memcpy* copies between two shared mappings, and "
    "one core's caches hold both. *memcpy across* is the same copy into memory that the process on "
    "the other core has written last, as the memory has been that a write goes to. How much dearer "
    "that is depends on whether the two cores have a cache in common, which those of a virtual "
    "machine may have now and then; it makes the write dearer likewise, so that "
    "is what the write is compared with. Where nothing else is said, each write, or batch of them, "
    "is awaited before the next one is begun, which measures latency: the two processes wait for "
    "each other in between. *Under way* are those that have been begun and not been awaited yet: "
    "another one begins whenever one of them is done, as programs do that want bandwidth or rate, "
    "which is what is measured then: the whole time by the number of writes. In aiordma as many "
    "tasks make one after another each; in C as many stand in the send queue. *nixl* is an agent "
    "that asks for the end of its transfer again and again; the program of the other one sleeps, "
    "its progress thread does not; a batch is one transfer of as many parts."
)

AWAKE, ASLEEP = "target awake", "target asleep"
WAITING = {AWAKE: "polling", ASLEEP: "sleeping"}  # of C's target
MEMCPY = {"memcpy": "copy", "memcpy across": "copy_across"}
MIB = 1 << 20
BATCH = 64
SMALL, LARGE, READ, LARGE_MANY = "64 B", "1 MiB", "1 MiB read", "1 MiB, 4 under way"
BATCHED = f"in batches of {BATCH}"
EACH, ALL = 3e-6, 0.5e-6  # what Python may add to one

# The kind of job, how many operations a turn has, and what else it is told. Of a stream of writes a
# turn is a GiB: its beginning and its end, when fewer are under way, are to be little of it.
WORKS = {
    SMALL: ("write", 1000, {"size": 64}),
    LARGE: ("write", 100, {"size": MIB}),
    READ: ("read", 100, {"size": MIB}),
    LARGE_MANY: ("write_many", 1024, {"size": MIB, "window": 4}),
    f"64 B {BATCHED}": ("write_batch", 12800, {"size": 64, "window": BATCH}),
}
# What nixl does of these.
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
                    continue  # its program has no such job
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
        """Microseconds."""
        return spread((ours - its) * 1e6 for ours, its in zip(*pair(work, target), strict=True))

    for target in (AWAKE, ASLEEP):
        for work, what in (
            (LARGE, "1 MiB one-sided write"),
            (LARGE_MANY, "1 MiB one-sided writes, 4 under way"),
        ):
            times = ratio(*pair(work, target))
            yield at_most(f"{what}, {target}: times the C figure", 1.1, times)
        ours, its = pair(SMALL, target)
        beyond = spread((a - 1.5 * b) * 1e6 for a, b in zip(ours, its, strict=True))
        what = f"a 64 B one-sided write, awaited, {target}: beyond 1.5 times the C figure"
        yield at_most(what, 3, beyond, "us")
        what = f"Python's share of a 64 B write, awaited one by one, {target}"
        yield at_most(what, EACH * 1e6, added(SMALL, target), "us")
        ours, _ = pair(f"64 B {BATCHED}", target)
        rate = spread(1e-6 / one for one in ours)
        yield at_least(f"64 B writes {BATCHED}, {target}", 1, rate, "million a second")
        what = f"Python's share of a 64 B write, {BATCHED}, {target}"
        yield at_most(what, ALL * 1e6, added(f"64 B {BATCHED}", target), "us")
    for work, what in ((LARGE, "write"), (READ, "read")):
        nixl = seconds(data, f"{work}, {ASLEEP}", "nixl")
        for target in (AWAKE, ASLEEP):
            times = ratio(seconds(data, f"{work}, {target}", "aiordma"), nixl)
            yield at_most(f"1 MiB one-sided {what}, {target}: times nixl", 1, times)
    across = seconds(data, f"{LARGE}, {AWAKE}", "memcpy across")
    for work, what in (
        (LARGE, "1 MiB one-sided write in C"),
        (LARGE_MANY, "1 MiB one-sided writes in C, 4 under way"),
    ):
        copied = ratio(seconds(data, f"{work}, {AWAKE}", "C"), across)
        yield at_most(f"{what}: times a memcpy across", 1.3, copied)


COMPARISON = Comparison(
    "One-sided",
    NOTE,
    lanes,
    requirements,
    style="one `await write` or `read` at a time, or several tasks, or a batch, as the row says",
)
