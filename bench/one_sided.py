"""One-sided writes, and what Python adds to one."""

from __future__ import annotations

from collections.abc import Iterator

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
    size_name,
    spread,
    take_turns,
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
    "is what the write is compared with."
)

AWAKE, ASLEEP = "target awake", "target asleep"
SIZES = {64: 1000, 1 << 20: 100}
MEMCPY = {"memcpy": "copy", "memcpy across": "copy_across"}
BATCH, BATCHED = 64, 12800
EACH, ALL = 3e-6, 0.5e-6  # what Python may add to one


def lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    ours = contenders.python("aiordma"), contenders.python("aiordma", "asyncio")
    for target in (AWAKE, ASLEEP):
        awake = int(target == AWAKE)
        beside = contenders.c("polling", "polling" if awake else "sleeping")
        for size, many in SIZES.items():
            work, count = one(size, target), options.count(many)
            for contender, who in zip(ours, ("aiordma", "aiordma on asyncio"), strict=True):
                yield Lane.of(contender, work, who, "write", size=size, count=count, awake=awake)
            yield Lane.of(beside, work, "C", "write", size=size, count=count)
            if size > BATCH:
                for who, kind in MEMCPY.items():
                    yield Lane.of(contenders.c(), work, who, kind, size=size, count=count)
        work, count = batched(target), options.count(BATCHED, BATCH)
        numbers = {"size": 64, "count": count, "window": BATCH}
        for contender, who in zip(ours, ("aiordma", "aiordma on asyncio"), strict=True):
            yield Lane.of(contender, work, who, "write_batch", awake=awake, **numbers)
        yield Lane.of(beside, work, "C", "write_batch", **numbers)


def one(size: int, target: str) -> str:
    return f"{size_name(size)}, {target}"


def batched(target: str) -> str:
    return f"64 B in batches of {BATCH}, {target}"


def measure(options: Options) -> Data:
    with Contenders() as contenders:
        return take_turns(list(lanes(contenders, options)), options)


def requirements(data: Data) -> Iterator[Requirement]:
    def pair(work: str) -> tuple[list[float], list[float]]:
        return seconds(data, work, "aiordma"), seconds(data, work, "C")

    def added(work: str) -> Spread:
        """Microseconds."""
        return spread((ours - its) * 1e6 for ours, its in zip(*pair(work), strict=True))

    for target in (AWAKE, ASLEEP):
        work = one(1 << 20, target)
        yield at_most(
            f"1 MiB one-sided write, {target}: times the C figure", 1.1, ratio(*pair(work))
        )
    work = one(1 << 20, AWAKE)
    copied = ratio(seconds(data, work, "C"), seconds(data, work, "memcpy across"))
    yield at_most("1 MiB one-sided write in C: times a memcpy across", 1.3, copied)
    for target in (AWAKE, ASLEEP):
        ours, its = pair(one(64, target))
        beyond = spread((a - 1.5 * b) * 1e6 for a, b in zip(ours, its, strict=True))
        yield at_most(
            f"a 64 B one-sided write, awaited, {target}: beyond 1.5 times the C figure",
            3,
            beyond,
            "us",
        )
    for target in (AWAKE, ASLEEP):
        rate = spread(1e-6 / one for one in seconds(data, batched(target), "aiordma"))
        yield at_least(f"64 B writes in batches of {BATCH}, {target}", 1, rate, "million a second")
    for target in (AWAKE, ASLEEP):
        yield at_most(
            f"Python's share of a 64 B write, awaited one by one, {target}",
            EACH * 1e6,
            added(one(64, target)),
            "us",
        )
    for target in (AWAKE, ASLEEP):
        yield at_most(
            f"Python's share of a 64 B write, in batches of {BATCH}, {target}",
            ALL * 1e6,
            added(batched(target)),
            "us",
        )


COMPARISON = Comparison("One-sided", NOTE, measure, requirements)
