"""Tests of which histories are possible, and of the reports about impossible ones."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import permutations
from mmap import mmap
from typing import Any

import numpy as np
import pytest

from aiordma import testing

# Consistent histories, written as events. "w:write:1" begins the operation w, "w." ends it, "r.1"
# ends r with the result 1, and "w!" marks w as refused.
GOOD = {
    "it begins as 0": "r:read r.0",
    "in order": "w:write:1 w. r:read r.1 v:write:2 v. s:read s.2",
    "at a time, before": "w:write:1 r:read r.0 w.",
    "at a time, after": "w:write:1 r:read r.1 w.",
    "a read after a read at a time": "w:write:1 r:read r.0 s:read s.1 w.",
    "without an end, never": "w:write:1 r:read r.0 s:read s.0",
    "without an end, late": "w:write:1 r:read r.0 v:write:2 v. s:read s.1",
    "without an end, to get back": "w:write:1 w. v:write:0 u:write:1 u. r:read r.0 s:read s.0",
    "a read without an end": "r:read w:write:1 w.",
    "refused": "w:write:1 w! q:read q! r:read r.0",
    "swapped": "c:compare_and_swap:0:5 c.0 d:compare_and_swap:0:6 d.5 r:read r.5",
    "swapped, without an end": "c:compare_and_swap:0:5 d:compare_and_swap:0:6 d.5 r:read r.5",
    "swapped behind another": "c:compare_and_swap:1:2 r:read r.0 w:write:1 w. s:read s.2",
    "added": "a:fetch_and_add:3 b:fetch_and_add:4 b.0 a.4 r:read r.7",
    "modulo": f"a:fetch_and_add:{2**64 - 1} a.0 b:fetch_and_add:2 b.{2**64 - 1} r:read r.1",
    "alike, without ends": "a:fetch_and_add:1 b:fetch_and_add:1 r:read r.1 s:read s.2",
    "swapped, after others": "w:write:2 c:compare_and_swap:3:2 a:fetch_and_add:1 r:read r.2 c.3",
    "messages": "m:send:1 n:send:2 n. x:received:1 m. y:received:2",
    "alike": "m:send:1 m. n:send:1 n. x:received:1 y:received:1",
    "perhaps sent": "m:send:1 n:send:2 n. y:received:2",
    "perhaps sent, late": "m:send:1 n:send:2 n. y:received:2 x:received:1",
    "alike, perhaps sent": "m:send:1 n:send:1 n. x:received:1 y:received:1",
    "in time": "a:access a. b:access e:lease_ended b. c:access d:access d!",
    "an end that two have seen": "e:lease_ended f:lease_ended",
}
# Inconsistent histories, each with the operations that the error must show.
BAD = {
    "lost": ("w:write:1 w. r:read r.0", "w r"),
    "from nowhere": ("w:write:1 w. r:read r.3", "w r"),
    "back again": ("w:write:1 r:read r.1 s:read s.0 w.", "w r s"),
    "the one before": ("w:write:1 w. v:write:2 v. r:read r.1 s:read s.1", "v r"),
    "long ago": ("w:write:1 w. r:read r.1 s:read s.1 v:write:2 v. t:read t.1 u:read u.1", "v t"),
    "done twice without an end": (
        "w:write:1 v:write:2 v. r:read r.1 u:write:3 u. s:read s.1",
        "w v r u s",
    ),
    "refused and done": ("w:write:1 w! r:read r.1", "r"),
    "refused and done, later": ("v:write:2 v. w:write:1 w! r:read r.1", "v r"),
    "added twice": ("a:fetch_and_add:1 a.0 b:fetch_and_add:1 b.2", "a b"),
    "added twice, without an end": (
        "z:fetch_and_add:2 z.0 a:fetch_and_add:1 b:fetch_and_add:1 b.2 c:fetch_and_add:1 c.5",
        "a b c",
    ),
    "two have swapped": ("c:compare_and_swap:0:5 d:compare_and_swap:0:6 d.0 c.0", "c d"),
    "swapped, and found what it put": ("c:compare_and_swap:0:5 c.5", "c"),
    "twice": ("m:send:1 m. x:received:1 n:send:2 n. y:received:1", "m x n y"),
    "perhaps sent, twice": ("m:send:1 x:received:1 y:received:1", "m x y"),
    "out of turn": ("m:send:1 m. n:send:2 n. y:received:2 x:received:1", "m n y"),
    "unsent": ("x:received:1 m:send:1 m.", "x"),
    "lost in the end": ("m:send:1 m. n:send:2 n. x:received:1", "n"),
    "seen before, by one that goes on": (
        "a:write:3 a. b:write:3 b. r:read c:write:4 c. w:write:1 w. r.1 z:read z.7",
        "r w z",
    ),
    "late": ("a:access a. e:lease_ended b:access b. c:access c.", "e b"),
}


def replay(events: str) -> tuple[testing.History, dict[str, str]]:
    """Build the history from its events. Also return the text shown for each operation."""
    history, shown = testing.History(), dict[str, str]()
    operations = dict[str, testing.Operation]()
    for event in events.split():
        name, end, text = event[0], event[1], event[2:]
        if end == ":":
            kind, *values = text.split(":")
            shown[name] = f"{kind}({', '.join([repr('x'), *values])})"
            operation = getattr(history, kind)("x", *map(int, values))
            if operation is not None:  # None if it has already ended
                operations[name] = operation.__enter__()
            continue
        if end == "!":
            operations[name].refused()
        elif text:
            operations[name].result = int(text)
            shown[name] += f" -> {text}"
        operations[name].__exit__(None, None, None)
    return history, shown


@pytest.mark.parametrize("events", GOOD.values(), ids=GOOD)
def test_consistent_history_passes_the_check(events: str) -> None:
    replay(events)[0].check()


@pytest.mark.parametrize(("events", "shown"), BAD.values(), ids=BAD)
def test_failed_check_shows_a_minimal_set_of_operations(events: str, shown: str) -> None:
    history, calls = replay(events)
    with pytest.raises(AssertionError, match="'x'") as raised:
        history.check()
    _, *lines = str(raised.value).splitlines()
    found = [re.sub(r"^.*?(?=\w+\()", "", line) for line in lines]
    assert found == [calls[name] for name in shown.split()]


def test_each_key_channel_and_lease_is_checked_separately() -> None:
    history = testing.History()
    for key in "xy":
        with history.fetch_and_add(key, 1) as op:
            op.result = 0
        with history.send(key, b"it"):
            history.received(key, b"it")
    history.lease_ended("x")
    with history.access("y"):
        pass
    history.check()
    history.received("x", b"it")
    history.received("z", b"it")
    with pytest.raises(AssertionError, match=r"(?s)on 'x'.*\n\n.*on 'z'"):
        history.check()


# ---- against all orders --------------------------------------------------------------------------


KINDS = [("read", 0), ("write", 1), ("compare_and_swap", 2), ("fetch_and_add", 1)]


def some_operations(
    draw: random.Random, kinds: list[tuple[str, int]]
) -> list[tuple[int, float, str, tuple[int, ...], int]]:
    """Return the start, end, kind, values and result of each random operation."""
    count = draw.randrange(1, 6)
    places = draw.sample(range(2 * count), 2 * count)
    made = []
    for _ in range(count):
        begin, end = sorted((places.pop(), places.pop()))
        kind, values = draw.choice(kinds)
        ends = end if draw.random() < 0.7 else float("inf")
        made.append((begin, ends, kind, tuple(draw.choices(range(3), k=values)), draw.randrange(3)))
    return made


def has_order(operations: list[Any]) -> bool:
    """Return whether a sequential order explains the results, by trying all orders."""
    most = sum(end < float("inf") for _, end, *_ in operations)
    return any(
        is_order(order)
        for length in range(most, len(operations) + 1)
        for order in permutations(operations, length)
        if sum(end < float("inf") for _, end, *_ in order) == most
    )


def is_order(order: Any) -> bool:
    state, latest = 0, -1
    for begin, end, kind, values, result in order:
        latest = max(latest, begin)
        if end < latest or (kind != "write" and end < float("inf") and result != state):
            return False
        match kind:
            case "write":
                state = values[0]
            case "compare_and_swap" if state == values[0]:
                state = values[1]
            case "fetch_and_add":
                state += values[0]
    return True


@pytest.mark.parametrize(
    ("values", "kinds"),
    [((0, 1, 2), KINDS), ((1, True, 1.0), KINDS[:3]), ((None, b"", (1, True)), KINDS[:3])],
    ids=("numbers", "types of numbers", "others"),
)
def test_history_check_agrees_with_a_brute_force_search(
    values: tuple[Hashable, ...], kinds: list[tuple[str, int]]
) -> None:
    found = []
    for seed in range(3000 if kinds is KINDS else 1000):
        operations = some_operations(random.Random(seed), kinds)
        history = testing.History(initial=values[0])
        begun = {}
        for _, begins, at in sorted(
            [(begin, True, at) for at, (begin, *_) in enumerate(operations)]
            + [(end, False, at) for at, (_, end, *_) in enumerate(operations) if end < float("inf")]
        ):
            _, _, kind, given, result = operations[at]
            if begins:
                call = getattr(history, kind)
                begun[at] = call("x", *(values[number] for number in given)).__enter__()
            else:
                begun[at].result = values[result]
                begun[at].__exit__(None, None, None)
        found.append(has_order(operations))
        try:
            history.check()
        except AssertionError:
            assert not found[-1], seed
        else:
            assert found[-1], seed
    assert len(found) / 6 < sum(found) < len(found) * 5 / 6


# ---- programs ------------------------------------------------------------------------------------


async def test_check_allows_an_unfinished_operation_to_have_taken_effect() -> None:
    """An operation has no end if it raises an exception or never returns."""
    history = testing.History()
    for number in 1, 2:
        with suppress(OSError), history.write("x", number):
            raise OSError
    with suppress(OSError), history.fetch_and_add("y", 1) as op:
        op.result = 5
        raise OSError
    with history.read("y") as op:
        op.result = 1
    waiting = history.write("x", 3)
    waiting.__enter__()
    for seen in 0, 2, 1, 3, 3:
        with history.read("x") as op:
            op.result = seen
    history.check()


def test_read_before_any_write_must_return_the_initial_value() -> None:
    for initial in (b"", None, 7):
        history = testing.History(initial=initial)
        with history.read("x") as op:
            op.result = initial
        with history.compare_and_swap("y", initial, "new") as op:
            op.result = initial
        with history.read("y") as op:
            op.result = "new"
        history.check()
    with history.read("z") as op:
        op.result = 0
    with pytest.raises(AssertionError, match=r"on 'z' .*, given its initial value 7:"):
        history.check()
    history = testing.History()
    with history.read("x") as op:
        op.result = b""
    says = r"on 'x' .*, given its initial value 0 \(History\(initial=\.\.\.\) changes it\):"
    with pytest.raises(AssertionError, match=says):
        history.check()


@pytest.mark.parametrize(
    ("written", "read"), [((1, 2), (True, 2)), (np.int64(1), np.bool_(True)), (b"a", "a")], ids=repr
)
def test_check_distinguishes_equal_values_of_different_types(
    written: Hashable, read: Hashable
) -> None:
    history = testing.History()
    with history.write("x", written):
        pass
    with history.read("x") as op:
        op.result = written
    history.check()
    with history.read("x") as op:
        op.result = read
    with pytest.raises(AssertionError, match="no order of these operations on 'x'"):
        history.check()


def test_equal_keys_of_different_types_are_checked_separately() -> None:
    history = testing.History()
    for number, key in enumerate((1, 1.0, True), 1):
        with history.write(key, number):
            pass
    for number, key in enumerate((1, 1.0, True), 1):
        with history.read(key) as op:
            op.result = number
    with history.send(1, "it"):
        pass
    history.received(True, "it")
    with pytest.raises(AssertionError, match=r"(?s)on 1 never arrived.*on True arrived twice"):
        history.check()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (np.int64(5), 5),
        (np.float32(0.5), 0.5),
        (np.array(5), 5),
        (memoryview(b"a"), b"a"),
        (memoryview(bytearray(b"a")), b"a"),
    ],
    ids=("int64", "float32", "array", "memoryview", "writable memoryview"),
)
def test_history_converts_values_to_python_types(written: Hashable, read: Hashable) -> None:
    history = testing.History()
    with history.write("x", written):
        pass
    for value in written, read:
        with history.read("x") as op:
            op.result = value
            assert type(op.result) is type(read)
    history.check()


def test_history_rejects_unhashable_values() -> None:
    history, wrong = testing.History(), bytearray(b"a")
    calls: dict[str, Callable[[], object]] = {
        "initial": lambda: testing.History(initial=wrong),  # type: ignore[arg-type]
        "value": lambda: history.write("x", wrong),  # type: ignore[arg-type]
        "expected": lambda: history.compare_and_swap("x", wrong, 1),  # type: ignore[arg-type]
        "desired": lambda: history.compare_and_swap("x", 1, wrong),  # type: ignore[arg-type]
        "message": lambda: history.received("x", wrong),  # type: ignore[arg-type]
        "key": lambda: history.read(wrong),  # type: ignore[arg-type]
        "channel": lambda: history.send(wrong, 1),  # type: ignore[arg-type]
        "lease": lambda: history.access(wrong),  # type: ignore[arg-type]
    }
    for name, call in calls.items():
        with pytest.raises(TypeError) as raised:
            call()
        assert str(raised.value) == (
            f"{name} must be a hashable value, not bytearray bytearray(b'a'); write bytes({name})"
        )
    with history.read("x") as op:
        with pytest.raises(TypeError) as raised:
            op.result = [1]
        op.result = 0
        assert str(raised.value) == (
            "op.result must be a hashable value, not list [1]; write a tuple"
        )
        with (
            pytest.raises(TypeError, match=r"not mmap .*; write bytes\(\.\.\.\)"),
            mmap(-1, 8) as m,
        ):
            op.result = m
    for call in (
        lambda: history.fetch_and_add("x", b"1"),  # type: ignore[arg-type]
        lambda: history.fetch_and_add("x", -1),
    ):
        with pytest.raises(
            (TypeError, ValueError), match=r"add must be an int from 0 to 2\^64 - 1, not"
        ):
            call()
    with history.fetch_and_add("x", 1) as op:
        with pytest.raises(TypeError, match=r"^op\.result of fetch_and_add must be an int from 0"):
            op.result = b"0"
        op.result = 0
    history.check()


def test_adding_to_a_non_numeric_value_fails_the_check() -> None:
    history = testing.History(initial=b"")
    history.fetch_and_add("x", 1).__enter__()
    with history.read("x") as op:
        op.result = b""
    history.check()
    with history.read("x") as op:
        op.result = 1
    with pytest.raises(AssertionError):
        history.check()


# ---- wrong use -----------------------------------------------------------------------------------


def test_operation_without_a_result_raises_type_error() -> None:
    history = testing.History()
    operations = {
        "read('x')": history.read("x"),
        "fetch_and_add('x', 1)": history.fetch_and_add("x", 1),
        "compare_and_swap('x', 0, 1)": history.compare_and_swap("x", 0, 1),
    }
    for name, op in operations.items():
        with pytest.raises(TypeError) as raised, op:
            pass
        assert str(raised.value) == (
            f"{name} has no result; set op.result to the call's return value inside the with block"
        )


def test_operation_outside_a_with_block_raises_runtime_error() -> None:
    history = testing.History()
    op = history.read("x")
    with pytest.raises(RuntimeError) as raised:
        op.result = 5
    assert str(raised.value) == (
        "op.result of read('x') must be set inside the with block: put the call and this "
        "assignment inside `with history.read(...) as op:`"
    )
    with history.write("x", 1):
        pass
    with pytest.raises(RuntimeError) as raised:
        history.check()
    assert str(raised.value) == (
        "read('x') was not recorded, because it was used without a with statement; write `with "
        "history.read(...) as op:` around the call"
    )


def test_reusing_an_operation_raises_runtime_error() -> None:
    history = testing.History()
    with history.write("x", 1) as op:
        pass
    for _ in range(2):
        with (
            pytest.raises(RuntimeError, match=r"write\('x', 1\) was already used; call history"),
            op,
        ):
            pass
    history.check()


def test_check_fails_for_an_empty_history() -> None:
    history = testing.History()
    for counted in "", " (refused: 1)":
        with pytest.raises(AssertionError) as raised:
            history.check()
        assert str(raised.value) == (
            f"the history has no operations{counted}, so the check proves nothing; wrap each "
            "of the program's calls in a block such as `with history.read(...) as op:`"
        )
        with history.write("x", 1) as op:
            op.refused()


@pytest.mark.needs("faults")
def test_failed_check_shows_host_and_time() -> None:
    async def main(world: testing.World) -> None:
        history = testing.History()

        async def read(result: int) -> None:
            with history.read("the count") as op:
                await asyncio.sleep(0.25)
                op.result = result

        with history.write("the count", 7):
            pass
        await asyncio.sleep(1)
        for host, result in ("one", 7), ("two", 0):
            await world.host(host).run(read, result)
        with pytest.raises(AssertionError) as raised:
            history.check()
        head, *lines = str(raised.value).splitlines()
        assert head == (
            "no order of these operations on 'the count' explains their results, regardless of its "
            "previous value:"
        )
        rows = [line.split(maxsplit=5) for line in lines]
        assert [(row[0], row[-1]) for row in rows] == [
            ("one", "read('the count') -> 7"),
            ("two", "read('the count') -> 0"),
        ]
        assert [round(float(row[column]), 2) for row in rows for column in (1, 3)] == [
            *(1, 1.25),
            *(1.25, 1.5),
        ]

    testing.simulate(main, seed=1, faults=testing.FaultPlan(testing.Link(jitter=0)))


# ---- large histories -----------------------------------------------------------------------------


def large(count: int, *, lost: float) -> testing.History:
    """Return a history of eight clients. Each operation remains open with probability `lost`."""
    draw, history, state, begun = random.Random(1), testing.History(), 0, list[Any]()
    for number in range(count):
        kind = draw.choice(["read", "write", "fetch_and_add", "compare_and_swap"])
        values = {"read": (), "compare_and_swap": (state, number)}.get(kind, (number,))
        begun.append([getattr(history, kind)("x", *values).__enter__(), kind, values])
        while len(begun) == 8:
            op, kind, values = begun.pop(draw.randrange(8))
            done = draw.random() >= lost
            op.result = state
            if done or draw.random() < 0.5:
                match kind:
                    case "write":
                        [state] = values
                    case "fetch_and_add":
                        state += values[0]
                    case "compare_and_swap" if state == values[0]:
                        state = values[1]
            if done:
                op.__exit__(None, None, None)
    return history


@pytest.mark.parametrize("lost", [0, 0.01])
def test_typical_history_is_checked_within_the_step_limit(lost: float) -> None:
    large(1000, lost=lost).check(steps=10_000)


def test_sequential_operations_are_checked_in_a_single_step() -> None:
    history = testing.History()
    for value in range(100):
        with history.write("x", value):
            pass
    history.check(steps=1)


def test_check_raises_runtime_error_when_it_exceeds_the_step_limit() -> None:
    with pytest.raises(RuntimeError, match=r"1000 operations on 'x' .* \(check\(steps="):
        large(1000, lost=0).check(steps=100)
