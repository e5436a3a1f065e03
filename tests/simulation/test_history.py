"""Which histories can be, and what is said of those that cannot."""

from __future__ import annotations

import asyncio
import random
import re
from contextlib import suppress
from itertools import permutations
from typing import Any

import pytest

from aiordma import testing

# The operations of a history in the order of their beginnings and ends, by names: "w:write:1"
# begins one, "w." and "r.1" end those with that result, "w!" is refused.
GOOD = {
    "nothing": "",
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
# And the operations that are shown.
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
    """The history, and how each of its operations is shown."""
    history, shown = testing.History(), dict[str, str]()
    operations = dict[str, testing.Operation]()
    for event in events.split():
        name, end, text = event[0], event[1], event[2:]
        if end == ":":
            kind, *values = text.split(":")
            shown[name] = f"{kind}({', '.join([repr('x'), *values])})"
            operation = getattr(history, kind)("x", *map(int, values))
            if operation is not None:  # else it has ended at once
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
def test_what_can_be(events: str) -> None:
    replay(events)[0].check()


@pytest.mark.parametrize(("events", "shown"), BAD.values(), ids=BAD)
def test_what_cannot_be_is_shown_by_the_fewest_operations(events: str, shown: str) -> None:
    history, calls = replay(events)
    with pytest.raises(AssertionError, match="'x'") as raised:
        history.check()
    _, *lines = str(raised.value).splitlines()
    found = [re.sub(r"^.*?(?=\w+\()", "", line) for line in lines]
    assert found == [calls[name] for name in shown.split()]


def test_keys_channels_and_leases_are_alone() -> None:
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
    with pytest.raises(AssertionError, match=r"(?s)of 'x'.*\n\n.*of 'z'"):
        history.check()


# ---- against all orders --------------------------------------------------------------------------


def some_operations(draw: random.Random) -> list[tuple[int, float, str, tuple[int, ...], int]]:
    """Beginnings, ends, kinds, values and results."""
    count = draw.randrange(1, 6)
    places = draw.sample(range(2 * count), 2 * count)
    made = []
    for _ in range(count):
        begin, end = sorted((places.pop(), places.pop()))
        kind, values = draw.choice(
            [("read", 0), ("write", 1), ("compare_and_swap", 2), ("fetch_and_add", 1)]
        )
        ends = end if draw.random() < 0.7 else float("inf")
        made.append((begin, ends, kind, tuple(draw.choices(range(3), k=values)), draw.randrange(3)))
    return made


def has_order(operations: list[Any]) -> bool:
    """By trying all."""
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


def test_it_finds_an_order_where_there_is_one() -> None:
    found = []
    for seed in range(3000):
        operations = some_operations(random.Random(seed))
        history = testing.History()
        begun = {}
        for _, begins, at in sorted(
            [(begin, True, at) for at, (begin, *_) in enumerate(operations)]
            + [(end, False, at) for at, (_, end, *_) in enumerate(operations) if end < float("inf")]
        ):
            _, _, kind, values, result = operations[at]
            if begins:
                begun[at] = getattr(history, kind)("x", *values).__enter__()
            else:
                begun[at].result = result
                begun[at].__exit__(None, None, None)
        found.append(has_order(operations))
        try:
            history.check()
        except AssertionError:
            assert not found[-1], seed
        else:
            assert found[-1], seed
    assert 500 < sum(found) < 2500


# ---- programs ------------------------------------------------------------------------------------


async def test_a_block_without_an_end() -> None:
    """By an exception, or because it never ends; results are numbers."""
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
    with pytest.raises(TypeError, match="the result of read is"), history.read("x"):
        pass
    for wrong in -1, 1 << 64:
        with pytest.raises(ValueError, match="value is"):
            history.write("x", wrong)


@pytest.mark.needs("faults")
def test_it_says_which_host_and_when() -> None:
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
            "no order of these operations on 'the count', whatever it was before, fits their "
            "results:"
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
    """Of eight clients, some of whose operations have no end."""
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
def test_a_usual_history_takes_few_steps(lost: float) -> None:
    large(1000, lost=lost).check(steps=10_000)


def test_one_operation_after_another_takes_no_further_steps() -> None:
    history = testing.History()
    for value in range(100):
        with history.write("x", value):
            pass
    history.check(steps=1)


def test_a_history_that_is_too_hard_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"1000 operations on 'x' .* check\(steps=...\)"):
        large(1000, lost=0).check(steps=100)
