"""Histories of operations, and their consistency check: `aiordma.testing.History`.

The check looks for an order of the operations on each key with the search of Wing and Gong (1993),
extended by Lowe's cache of failed states (2017).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf
from reprlib import repr as brief
from typing import Any, Final, Literal, NamedTuple, Self

from .._core.arguments import U64_MAX, integer, refusal
from .sockets import current_machine


class Mark(Enum):
    """Placeholders for register contents and results that are not values of the program."""

    UNKNOWN = "unknown"
    UNFIT = "the operation contradicts the content before it"


UNKNOWN: Final[Literal[Mark.UNKNOWN]] = Mark.UNKNOWN
UNFIT: Final[Literal[Mark.UNFIT]] = Mark.UNFIT


def _sum(before: Any, add: int) -> Hashable:
    return (before + add) & U64_MAX if type(before) is int else UNFIT


# Each function returns the new content of a register, given its old content and the arguments of
# the operation.
REGISTER_OPERATIONS: dict[str, Callable[..., Hashable]] = {
    "read": lambda before: before,
    "write": lambda _, value: value,
    "compare_and_swap": lambda before, expected, desired: desired if before == expected else before,
    "fetch_and_add": _sum,
}


KINDS_WITH_RESULT = REGISTER_OPERATIONS.keys() - {"write"}
"""The kinds of operations that have a result."""


# ---- values --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Typed:
    """A bool or float tagged with its type, because Python considers True, 1.0 and 1 equal."""

    kind: str
    value: float


def _distinct(value: Hashable) -> Hashable:
    """Return a comparison key that distinguishes 1, 1.0 and True."""
    if isinstance(value, tuple):
        return tuple(map(_distinct, value))
    if isinstance(value, bool | float):
        return Typed("bool" if isinstance(value, bool) else "float", value)
    return value


CONVERSION_HINTS: dict[type, str] = {
    list: "write a tuple",
    set: "write a frozenset",
    dict: "write a tuple of its items",
}


def _value(name: str, value: Any) -> Hashable:
    """Return a hashable value, converting numpy scalars and memoryviews to built-in types.

    Raises:
        TypeError: If the value is awaitable, not hashable, or a buffer other than bytes or
            memoryview. Other buffers may compare by identity, or change later.
    """
    if isinstance(value, Awaitable):
        raise TypeError(f"{name} must be a value, not a {type(value).__name__}; await it first")
    if type(value).__module__ == "numpy" and not getattr(value, "shape", True):
        value = value.item()
    if isinstance(value, memoryview):
        return bytes(value)
    hint = CONVERSION_HINTS.get(type(value), "")
    try:
        hash(value)
        if isinstance(value, bytes) or not _is_buffer(value):
            return value  # type: ignore[no-any-return]
    except TypeError:
        pass
    if _is_buffer(value):
        hint = f"write bytes({name})" if name.isidentifier() else "write bytes(...)"
    raise TypeError(refusal(name, "a hashable value", value, hint))


def _is_buffer(value: Any) -> bool:
    try:
        memoryview(value).release()
    except TypeError:
        return False
    return True


class Operation:
    """An operation of a :class:`History`. Its ``with`` block contains the call to record.

    The operation remains unfinished if an exception leaves the block or its host is killed. An
    unfinished operation may take effect once at any later time, or never.
    """

    def __init__(self, history: History, kind: str, target: tuple[str, Any], **values: Any) -> None:
        """Add the operation to the history. Only `History` calls this."""
        self._history, self._kind = history, kind
        self._target = _value(*target)
        self._values = tuple(_value(name, value) for name, value in values.items())
        self._comparison_key = _distinct(self._values)
        self._result: Hashable = UNKNOWN
        self._begin_number: int = 0
        self._end_number: float = inf
        self._caller, self._begin_time, self._end_time = "", 0.0, 0.0
        self._is_open = False
        self._is_refused = False
        history._operations.append(self)

    def __repr__(self) -> str:
        end = "no end" if self._end_number == inf else f"{self._end_time:.6f} s"
        answer = "" if self._result is UNKNOWN else f" -> {brief(self._result)}"
        return f"{self._caller:10} {f'{self._begin_time:.6f} - {end}':24} {self._call()}{answer}"

    def _call(self) -> str:
        return f"{self._kind}({', '.join(map(brief, (self._target, *self._values)))})"

    @property
    def result(self) -> Any:
        """The value that a read or an atomic operation returned. Set it inside the block.

        It is None until it is set. A write needs no result.
        """
        return None if self._result is UNKNOWN else self._result

    @result.setter
    def result(self, value: Any) -> None:
        if not self._is_open:
            raise RuntimeError(
                f"op.result of {self._call()} must be set inside the with block: put the call and "
                f"this assignment inside `with history.{self._kind}(...) as op:`"
            )
        if self._kind == "fetch_and_add":
            self._result = integer("op.result of fetch_and_add", value)
        elif self._kind != "write":
            self._result = _value("op.result", value)

    def refused(self) -> None:
        """Exclude the operation from the check, because it had no effect and never will."""
        self._is_refused = True

    def __enter__(self) -> Self:
        if self._begin_number:
            raise RuntimeError(
                f"{self._call()} was already used; call history.{self._kind} for each operation"
            )
        self._caller, self._begin_time = self._history._caller_and_time()
        self._begin_number = next(self._history._serial_numbers)
        self._is_open = True
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._is_open = False
        # Without an end number, an operation is unfinished: it may still take effect later.
        if error_type is not None or self._is_refused:
            return
        if self._kind in KINDS_WITH_RESULT and self._result is UNKNOWN:
            raise TypeError(
                f"{self._call()} has no result; set op.result to the call's return value inside "
                "the with block"
            )
        self._end_time = self._history._caller_and_time()[1]
        self._end_number = next(self._history._serial_numbers)


class History:
    """A record of operations. :meth:`check` verifies that they are consistent.

    Use one history for all hosts of a simulation, or for all tasks and threads of a process.

    A key identifies a register. Reads, writes and atomic operations on the same key share its
    register. Keys and values can be any hashable values. The values 1, 1.0 and True are different
    here, although Python considers them equal. ``fetch_and_add`` operates on unsigned 64-bit
    integers.

    Args:
        initial: The value of every key before its first write. To give one key another value, begin
            with a write.
    """

    def __init__(self, *, initial: Hashable = 0) -> None:
        self._initial = _value("initial", initial)
        self._operations: list[Operation] = []
        # These numbers order the begins and ends, whose times can be equal.
        self._serial_numbers = itertools.count(1)
        self._start_time = time.monotonic()

    def _caller_and_time(self) -> tuple[str, float]:
        """Return the name of the calling host, task or thread, and the current time in seconds."""
        machine, loop = current_machine(), asyncio._get_running_loop()
        if machine is not None:
            return machine.host.name, machine.world.now
        task = None if loop is None else asyncio.current_task(loop)
        name = threading.current_thread().name if task is None else task.get_name()
        return name, time.monotonic() - self._start_time

    def read(self, key: Hashable) -> Operation:
        """Return an operation that reads the key. Set its `result` to the value read."""
        return Operation(self, "read", ("key", key))

    def write(self, key: Hashable, value: Hashable) -> Operation:
        """Return an operation that writes `value` to the key."""
        return Operation(self, "write", ("key", key), value=value)

    def compare_and_swap(self, key: Hashable, expected: Hashable, desired: Hashable) -> Operation:
        """Return a compare-and-swap of the key. Set its `result` to the previous value."""
        return Operation(self, "compare_and_swap", ("key", key), expected=expected, desired=desired)

    def fetch_and_add(self, key: Hashable, add: int) -> Operation:
        """Return a fetch-and-add modulo 2^64. Set its `result` to the previous value."""
        return Operation(self, "fetch_and_add", ("key", key), add=integer("add", add))

    def send(self, channel: Hashable, message: Hashable) -> Operation:
        """Return an operation that sends a message.

        If the block ends normally, the message must arrive exactly once, and in the order in which
        the blocks began. If the block raises an exception, the message may arrive at most once, at
        any time.
        """
        return Operation(self, "send", ("channel", channel), message=message)

    def received(self, channel: Hashable, message: Hashable) -> None:
        """Record the arrival of a message."""
        with Operation(self, "received", ("channel", channel), message=message):
            pass

    def access(self, lease: Hashable) -> Operation:
        """Return an access to leased memory, which must fail if it begins after the lease ended."""
        return Operation(self, "access", ("lease", lease))

    def lease_ended(self, lease: Hashable) -> None:
        """Record that the lease has ended. Do not reuse its name."""
        with Operation(self, "lease_ended", ("lease", lease)):
            pass

    def check(self, *, steps: int = 20_000) -> None:
        """Check that the operations are consistent.

        - Linearizability: for each key, some order of its operations explains all their results. In
          this order, an operation that ended before another one began comes first.
        - Delivery: messages arrived exactly once and in order, and only if they were sent; see
          :meth:`send`.
        - Leases: no access succeeded that began after the end of its lease.

        Args:
            steps: The maximum number of search steps for each key, in addition to one step per
                operation.

        Raises:
            AssertionError: If the operations are not consistent, or if the history has no
                operations. The message lists a minimal set of contradictory operations.
            RuntimeError: If the maximum number of steps is too low for the unfinished and
                concurrent writes, or if an operation was used without ``with``.
        """
        integer("steps", steps, 1)
        for it in self._operations:
            if not it._begin_number:
                raise RuntimeError(
                    f"{it._call()} was not recorded, because it was used without a with statement; "
                    f"write `with history.{it._kind}(...) as op:` around the call"
                )
        groups: dict[tuple[Check, Hashable], list[Operation]] = {}
        for it in sorted(self._operations, key=lambda it: it._begin_number):
            if not it._is_refused:
                groups.setdefault((CHECKS[it._kind], _distinct(it._target)), []).append(it)
        if not groups:
            refused = f" (refused: {len(self._operations)})" if self._operations else ""
            raise AssertionError(
                f"the history has no operations{refused}, so the check proves nothing; wrap each "
                "of the program's calls in a block such as `with history.read(...) as op:`"
            )
        wrong = [text for (check, _), each in groups.items() if (text := check(each, steps))]
        if wrong:
            raise AssertionError("\n\n".join(wrong))


def _describe(what: str, operations: Iterable[Operation]) -> str:
    lines = map(repr, sorted(operations, key=lambda it: it._begin_number))
    return "\n  ".join([f"{what}:", *lines])


# ---- registers -----------------------------------------------------------------------------------


SearchState = tuple[int, Any]
"""A state of the search: the completed operations as a bit mask, and the register's content."""


class Span(NamedTuple):
    """An operation on a register, in the form used by the search. Values are `_distinct` keys."""

    begin: int
    end: float
    result: Hashable
    values: tuple[Hashable, ...]
    it: Operation

    @classmethod
    def of(cls, it: Operation) -> Span:
        result = _distinct(it._result) if it._end_number < inf else UNKNOWN
        return cls(it._begin_number, it._end_number, result, tuple(map(_distinct, it._values)), it)

    def without_end(self) -> Span:
        return self._replace(end=inf, result=UNKNOWN)

    def after(self, before: Hashable) -> Hashable:
        """Return the register's new content, or UNFIT if the operation contradicts `before`."""
        # The content is unknown if the search starts in the middle of the history. The operation's
        # result then reveals it.
        if before is UNKNOWN:
            before = self.result
        elif self.result is not UNKNOWN and before != self.result:
            return UNFIT
        kind = self.it._kind
        if before is UNKNOWN and kind != "write":
            return UNKNOWN
        return REGISTER_OPERATIONS[kind](before, *self.values)


def _has_order(spans: list[Span], initial_content: Hashable, steps: int) -> bool:
    """Return whether some order of the operations explains all their results.

    `spans` must be sorted by start. This is the depth-first search of Wing and Gong.
    """
    must_complete = sum(1 << at for at, span in enumerate(spans) if span.end < inf)
    # The states tried so far, with only the finished operations in the key. The values are bit
    # masks of the unfinished operations that had taken effect as well.
    tried: dict[SearchState, list[int]] = {}
    stack = [(0, initial_content)]
    steps += len(spans)
    while stack:
        completed, content = stack.pop()
        if not must_complete & ~completed:
            return True
        tried_masks = tried.setdefault((completed & must_complete, content), [])
        # Skip the state if the search has already tried it with a subset of these unfinished
        # operations. That state has more choices, so this one cannot lead further (Lowe's cache).
        if all(mask & ~completed for mask in tried_masks):
            tried_masks.append(completed & ~must_complete)
            stack += _choices(spans, completed, content)
            steps -= 1
            if not steps:
                raise RuntimeError(
                    f"cannot check {len(spans)} operations on {spans[0].it._target!r} within the "
                    "maximum number of steps; use more keys, fewer concurrent or unfinished "
                    "writes, or more steps (check(steps=...))"
                )
    return False


def _choices(spans: list[Span], completed: int, content: Hashable) -> list[SearchState]:
    """Return the states that can follow when one more operation takes effect, likeliest last.

    If a finished operation leaves the register unchanged, completing it is the only choice.
    """
    finished: list[SearchState] = []
    unfinished: dict[Hashable, SearchState] = {}  # one of each set of equivalent operations
    observed_values: list[Hashable] = []
    remaining, earliest_end = ~completed & ((1 << len(spans)) - 1), inf
    total_added = 0  # by the unfinished fetch-and-adds
    while remaining:
        bit = remaining & -remaining
        remaining ^= bit
        span = spans[bit.bit_length() - 1]
        # An operation takes effect after all operations that ended before it began.
        if span.begin > earliest_end:
            break
        after, kind, values = span.after(content), span.it._kind, span.values
        if span.result is not UNKNOWN:
            observed_values.append(span.result)
            if after == content:
                return [(completed | bit, content)]
        elif kind == "compare_and_swap":
            observed_values.append(values[0])
        elif kind == "fetch_and_add":
            total_added += span.it._values[0]  # type: ignore[operator]
        if span.end < inf:
            earliest_end = min(earliest_end, span.end)
            if after is not UNFIT:
                finished.append((completed | bit, after))
        elif after is not UNFIT and after != content:
            unfinished.setdefault((kind, values), (completed | bit, after))
    # Try an unfinished operation only if another operation could observe its effect, either
    # directly or after further additions.
    useful = [
        (completed_mask, new_content)
        for completed_mask, new_content in unfinished.values()
        if any(_leads_to(new_content, value, total_added) for value in observed_values)
    ]
    return [*useful, *reversed(finished)]


def _leads_to(content: Hashable, value: Hashable, adds: int) -> bool:
    """Return whether adding at most `adds` to `content` can produce `value`, modulo 2^64."""
    if type(content) is int and type(value) is int:
        return (value - content) & U64_MAX <= adds
    return content == value


def _check_register(operations: list[Operation], steps: int) -> str:
    """Check linearizability. Returns an error message with few contradictory operations, or ""."""
    spans, initial = [Span.of(it) for it in operations], operations[0]._history._initial
    initial_content = _distinct(initial)
    if _has_order(spans, initial_content, steps):
        return ""

    def spans_until(end: float) -> list[Span]:
        """Return the spans that begin before `end`, as unfinished ones if they end later."""
        return [it if it.end <= end else it.without_end() for it in spans if it.begin < end]

    def spans_since(begin: int, some: list[Span]) -> list[Span]:
        """Return the spans that end after `begin`, without the ends of those that began earlier."""
        return [it if it.begin >= begin else it.without_end() for it in some if it.end > begin]

    def is_contradictory(some: list[Span], state: Hashable) -> bool:
        try:
            return not _has_order(some, state, steps)
        except RuntimeError:  # too many steps, so no contradiction has been proved
            return False

    # Shorten the message: leave out the operations after the first contradiction. All operations
    # together are contradictory, so the last end needs no check.
    ends = sorted(it.end for it in spans if it.end < inf)
    last = bisect_left(
        ends,
        True,
        hi=len(ends) - 1,
        key=lambda end: is_contradictory(spans_until(end), initial_content),
    )
    part = spans_until(ends[last])
    # Also leave out as many earlier operations as possible, now with an unknown initial content.
    # `first` is the index of the first begin since which there is no contradiction.
    begin_times = [it.begin for it in part]
    first = bisect_left(
        begin_times, True, key=lambda begin: not is_contradictory(spans_since(begin, part), UNKNOWN)
    )
    given_initial = f"given its initial value {brief(initial)}"
    given_initial += " (History(initial=...) changes it)" if initial_content == 0 else ""
    premise = "regardless of its previous value" if first else given_initial
    part = spans_since(begin_times[first - 1], part) if first else part
    name = f"these operations on {operations[0]._target!r}"
    what = f"no order of {name} explains their results, {premise}"
    return _describe(what, [it.it for it in part])


# ---- channels and leases -------------------------------------------------------------------------


def _check_channel(operations: list[Operation], _: int) -> str:
    """Check that messages arrived once and in order. Returns an error message, or ""."""
    undelivered: list[Operation] = []
    """Sends that end normally and whose messages have not arrived yet."""
    uncertain: list[Operation] = []
    """Sends that did not end normally. Their messages may arrive once, at any time."""
    for at, it in enumerate(operations):
        if it._kind == "send":
            (uncertain if it._end_number == inf else undelivered).append(it)
            continue
        if undelivered and undelivered[0]._comparison_key == it._comparison_key:
            del undelivered[0]
        elif found := [other for other in uncertain if other._comparison_key == it._comparison_key]:
            uncertain.remove(found[0])
        else:
            same_message = [
                other
                for other in operations[: at + 1]
                if other._comparison_key == it._comparison_key
            ]
            what = "arrived twice, out of order, or without having been sent"
            return _describe(
                f"a message on {it._target!r} {what}", {*same_message, *undelivered[:1]}
            )
    return (
        _describe(f"a message on {undelivered[0]._target!r} never arrived", undelivered[:1])
        if undelivered
        else ""
    )


def _check_lease(operations: list[Operation], _: int) -> str:
    """Check that no access succeeded that began after the lease ended. Returns an error or ""."""
    ends = [it for it in operations if it._kind == "lease_ended"][:1]
    accesses = [it for it in operations if it._kind == "access"]
    late = [
        it
        for it in accesses
        if ends and ends[0]._begin_number < it._begin_number < it._end_number < inf
    ]
    return (
        _describe(
            f"an access succeeded after the end of lease {late[0]._target!r}", ends + late[:1]
        )
        if late
        else ""
    )


Check = Callable[[list[Operation], int], str]
"""A function that checks the operations on one name and returns an error message, or "".

It also gets the maximum number of steps.
"""
CHECKS: dict[str, Check] = {
    **dict.fromkeys(REGISTER_OPERATIONS, _check_register),
    **dict.fromkeys(("send", "received"), _check_channel),
    **dict.fromkeys(("access", "lease_ended"), _check_lease),
}
