"""What programs did and saw, and whether that can be: `aiordma.testing.History`.

Whether operations on a register have an order is found by the search of Wing and Gong (1993) with
Lowe's memory of what has failed (2017), for each key alone.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable
from math import inf
from reprlib import repr as brief
from typing import Any, NamedTuple, Self

from .._core.arguments import U64_MAX, integer
from .sockets import here

# What is in a register behind an operation, by what was there and the operation's values.
REGISTER: dict[str, Callable[..., int]] = {
    "read": lambda before: before,
    "write": lambda _, value: value,
    "compare_and_swap": lambda before, expected, desired: desired if before == expected else before,
    "fetch_and_add": lambda before, add: (before + add) & U64_MAX,
}
UNFIT = -1


class Operation:
    """One operation of a :class:`History`, which begins and ends with its ``with`` block.

    Without an end (an exception leaves the block, or nothing does, as on a host that is killed) it
    may have been done once, at any later time, or never.
    """

    def __init__(self, history: History, kind: str, of: Hashable, *values: Hashable) -> None:
        """For this package."""
        self.result: int | None = None
        """What was there, of a read and of an atomic operation: to be set within the block."""
        self._history, self._kind, self._of = history, kind, of
        self._values: tuple[Any, ...] = values
        self._begin: int = 0
        self._end: float = inf
        self._who, self._began, self._ended = "", 0.0, 0.0
        self._refused = False

    def __repr__(self) -> str:
        end = "no end" if self._end == inf else f"{self._ended:.6f} s"
        answer = "" if self.result is None else f" -> {self.result}"
        call = f"{self._kind}({', '.join(map(brief, (self._of, *self._values)))}){answer}"
        return f"{self._who:10} {f'{self._began:.6f} - {end}':24} {call}"

    def refused(self) -> None:
        """Says that it certainly has not been done, and will not be: it is left out."""
        self._refused = True

    def __enter__(self) -> Self:
        self._who, self._began = self._history._place()
        self._begin = next(self._history._numbers)
        self._history._operations.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or self._refused:
            return
        if self._kind in REGISTER:
            write, name = self._kind == "write", f"the result of {self._kind}"
            self.result = None if write else integer(name, self.result)
        self._ended = self._history._place()[1]
        self._end = next(self._history._numbers)


class History:
    """What programs did and saw, on all hosts of a simulation or in one process; :meth:`check` says
    whether that can be.

    The order is that of the calls. Keys, channels and leases are any names; numbers are unsigned
    and have 64 bits, and each key begins as 0.
    """

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._numbers = itertools.count(1)
        self._since = time.monotonic()

    def _place(self) -> tuple[str, float]:
        """Who calls, and when, for a reader."""
        machine, loop = here(), asyncio._get_running_loop()
        if machine is not None:
            return machine.host.name, machine.world.now
        task = None if loop is None else asyncio.current_task(loop)
        name = threading.current_thread().name if task is None else task.get_name()
        return name, time.monotonic() - self._since

    def read(self, key: Hashable) -> Operation:
        """A read of the number; set `result` of the operation."""
        return Operation(self, "read", key)

    def write(self, key: Hashable, value: int) -> Operation:
        """A write of the number."""
        return Operation(self, "write", key, integer("value", value))

    def compare_and_swap(self, key: Hashable, expected: int, desired: int) -> Operation:
        """The number becomes `desired` if it is `expected`; set `result` to what was there."""
        values = integer("expected", expected), integer("desired", desired)
        return Operation(self, "compare_and_swap", key, *values)

    def fetch_and_add(self, key: Hashable, add: int) -> Operation:
        """Adds to the number (modulo 2^64); set `result` to what was there."""
        return Operation(self, "fetch_and_add", key, integer("add", add))

    def send(self, channel: Hashable, message: Hashable) -> Operation:
        """A message is sent, which has to be received once if the block ends; else, once at most.

        Those whose blocks end are received in the order in which the blocks begin.
        """
        return Operation(self, "send", channel, message)

    def received(self, channel: Hashable, message: Hashable) -> None:
        """A message has been received."""
        with Operation(self, "received", channel, message):
            pass

    def access(self, lease: Hashable) -> Operation:
        """A use of what is lent: one that begins after the lease's end must not succeed."""
        return Operation(self, "access", lease)

    def lease_ended(self, lease: Hashable) -> None:
        """The lease has ended, and there is no other one of that name."""
        with Operation(self, "lease_ended", lease):
            pass

    def check(self, *, steps: int = 20_000) -> None:
        """Raises AssertionError, with the fewest operations that show it, when this cannot be:

        - the operations on a key have no order in which each has its result (linearizability): one
          that ended before another began is done before that;
        - a message was received twice, before another one of its channel that goes before it,
          without having been sent, or never though its block had ended;
        - an access began after the end of its lease, and succeeded.

        RuntimeError when that many `steps` more than operations do not decide it, of one key: with
        many writes at a time, or without an end.
        """
        integer("steps", steps, 1)
        groups: dict[tuple[Check, Hashable], list[Operation]] = {}
        for it in sorted(self._operations, key=lambda it: it._begin):
            if not it._refused:
                groups.setdefault((CHECKS[it._kind], it._of), []).append(it)
        wrong = [text for (check, _), each in groups.items() if (text := check(each, steps))]
        if wrong:
            raise AssertionError("\n\n".join(wrong))


def _text(what: str, operations: Iterable[Operation]) -> str:
    lines = map(repr, sorted(operations, key=lambda it: it._begin))
    return "\n  ".join([f"{what}:", *lines])


# ---- registers -----------------------------------------------------------------------------------


Place = tuple[int, Any]
"""Of a search: which operations are done, as bits, and what is in the register."""


class Span(NamedTuple):
    """An operation on a register, as far as it is known."""

    begin: int
    end: float
    result: int | None
    it: Operation

    def without_end(self) -> Span:
        return self._replace(end=inf, result=None)

    def after(self, before: int | None) -> int | None:
        """What is in the register behind it; None: unknown; UNFIT: it has not seen `before`."""
        kind, values = self.it._kind, self.it._values
        if None not in (before, self.result) and before != self.result:
            return UNFIT
        before = self.result if before is None else before
        return None if before is None and kind != "write" else REGISTER[kind](before, *values)


def _has_order(spans: list[Span], begins_as: int | None, steps: int) -> bool:
    """Whether the operations, in the order of their beginnings, can be done one after another."""
    ended = sum(1 << at for at, span in enumerate(spans) if span.end < inf)
    tried: dict[Place, list[int]] = {}
    stack = [(0, begins_as)]
    steps += len(spans)
    while stack:
        done, state = stack.pop()
        if not ended & ~done:
            return True
        others = tried.setdefault((done & ended, state), [])
        if all(other & ~done for other in others):  # else it failed with more that could be done
            others.append(done & ~ended)
            stack += _choices(spans, done, state)
            steps -= 1
            if not steps:
                raise RuntimeError(
                    f"whether {len(spans)} operations on {spans[0].it._of!r} have an order was not "
                    f"decided: use more keys, let fewer writes be at a time or without an end, or "
                    f"give it more time: check(steps=...)"
                )
    return False


def _choices(spans: list[Span], done: int, state: int | None) -> list[Place]:
    """What could be done next, the most likely last; what changes nothing is done at once."""
    must: list[Place] = []
    may: dict[Hashable, Place] = {}  # of those that are alike the first one
    seen: list[int] = []
    left, earliest_end, adds = ~done & ((1 << len(spans)) - 1), inf, 0
    while left:
        bit = left & -left
        left ^= bit
        span = spans[bit.bit_length() - 1]
        if span.begin > earliest_end:
            break
        after, kind, values = span.after(state), span.it._kind, span.it._values
        if span.result is not None:
            seen.append(span.result)
            if after == state:
                return [(done | bit, state)]
        elif kind == "compare_and_swap":
            seen.append(values[0])
        elif kind == "fetch_and_add":
            adds += values[0]
        if span.end < inf:
            earliest_end = min(earliest_end, span.end)
            if after != UNFIT:
                must.append((done | bit, after))
        elif after not in (UNFIT, state):
            may.setdefault((kind, values), (done | bit, after))
    # What need not be done is done for what sees it, by itself or with what is added.
    some = [it for it in may.values() if any((number - it[1]) & U64_MAX <= adds for number in seen)]
    return [*some, *reversed(must)]


def _check_register(operations: list[Operation], steps: int) -> str:
    spans = [
        Span(it._begin, it._end, it.result if it._end < inf else None, it) for it in operations
    ]
    if _has_order(spans, 0, steps):
        return ""

    def until(end: float) -> list[Span]:
        return [it if it.end <= end else it.without_end() for it in spans if it.begin < end]

    def since(begin: int) -> list[Span]:
        """What was under way then may have been done before."""
        return [it if it.begin >= begin else it.without_end() for it in part if it.end > begin]

    def is_bad(some: list[Span], begins_as: int | None) -> bool:
        try:
            return not _has_order(some, begins_as, steps)
        except RuntimeError:
            return False

    ends = sorted(it.end for it in spans if it.end < inf)
    last = bisect_left(ends, True, hi=len(ends) - 1, key=lambda end: is_bad(until(end), 0))
    part = until(ends[last])
    begins = [it.begin for it in part]
    first = bisect_left(begins, True, key=lambda begin: not is_bad(since(begin), None))
    known = "whatever it was before" if first else "which was 0"
    part = since(begins[first - 1]) if first else part
    name = f"these operations on {operations[0]._of!r}, {known}"
    return _text(f"no order of {name}, fits their results", [it.it for it in part])


# ---- channels and leases -------------------------------------------------------------------------


def _check_channel(operations: list[Operation], _: int) -> str:
    due: list[Operation] = []
    """Sends that have ended, or will end, and whose messages have not come."""
    loose: list[Operation] = []
    for at, it in enumerate(operations):
        if it._kind == "send":
            (loose if it._end == inf else due).append(it)
            continue
        if due and due[0]._values == it._values:
            del due[0]
        elif found := [other for other in loose if other._values == it._values]:
            loose.remove(found[0])
        else:
            alike = [other for other in operations[: at + 1] if other._values == it._values]
            what = "came twice, out of its turn or unsent"
            return _text(f"a message of {it._of!r} {what}", {*alike, *due[:1]})
    return _text(f"a message of {due[0]._of!r} never came", due[:1]) if due else ""


def _check_lease(operations: list[Operation], _: int) -> str:
    ends = [it for it in operations if it._kind == "lease_ended"][:1]
    accesses = [it for it in operations if it._kind == "access"]
    late = [it for it in accesses if ends and ends[0]._begin < it._begin < it._end < inf]
    return (
        _text(f"an access succeeded after the end of {late[0]._of!r}", ends + late[:1])
        if late
        else ""
    )


Check = Callable[[list[Operation], int], str]
"""The operations of one name, and how many steps there may be: what is wrong, or nothing."""
CHECKS: dict[str, Check] = {
    **dict.fromkeys(REGISTER, _check_register),
    **dict.fromkeys(("send", "received"), _check_channel),
    **dict.fromkeys(("access", "lease_ended"), _check_lease),
}
