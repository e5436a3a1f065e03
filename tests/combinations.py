"""Choose the event loop, connection method and polling mode in which a test runs.

Each test runs in one combination, chosen so that the tests of a file use all of them about equally
often. With ``--every-combination``, tests with several combinations run in each of them. Tests with
all three parameters run in four of the eight combinations, which cover each pair of values. A
coroutine has the parameter "loop", which pytest-asyncio sets. The other parameters are those of the
fixtures of tests/transport/conftest.py that the test uses. A marker exempts tests to which a
parameter makes no difference.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import uvloop

Loop = asyncio.AbstractEventLoop
Combination = Mapping[str, str]

# Exceptions that reached only an event loop's exception handler.
reported: list[dict[str, Any]] = []
_made = 0


def noting(make: Callable[[], Loop]) -> Callable[[], Loop]:
    """Wrap a loop factory so that its loops append unhandled exceptions to `reported`."""

    def factory() -> Loop:
        global _made  # noqa: PLW0603
        loop = make()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        _made += 1
        return loop

    return factory


def loops_made() -> int:
    """Return the number of loops made by all wrapped factories."""
    return _made


LOOPS: dict[str, Callable[[], Loop]] = {
    "asyncio": noting(asyncio.new_event_loop),
    "uvloop": noting(uvloop.new_event_loop),
}

FIXTURES: dict[str, tuple[str, ...]] = {
    "loop_name": tuple(LOOPS),
    "connection_method": ("cm", "tcp"),
    "polling_mode": ("sleeping", "adaptive"),
}
"""Fixtures with a parameter and its values. Coroutines also have "loop_name"."""

MARKERS = {
    "one_loop": ("loop_name", ("asyncio",)),
    "by_cm": ("connection_method", ("cm",)),
    "by_tcp": ("connection_method", ("tcp",)),
    "counts_turns": ("polling_mode", ("between turns",)),
    "sets_polling": ("polling_mode", ("its own",)),
}
"""Maps each marker that limits a test to the parameter and its remaining values."""

ON_PAIR: Mapping[str, tuple[str, ...]] = {
    "loop_name": ("virtual",),
    "connection_method": ("tcp",),
    "polling_mode": ("sleeping",),
}
"""The parameter values of tests marked `on_pair`, which override their other markers."""

DESCRIPTIONS = (
    "one_loop: the event loop makes no difference, asyncio's will do",
    "by_cm: connected by the connection manager alone",
    "by_tcp: connected by an exchange over TCP alone",
    "counts_turns: awaits must take iterations of the loop, so a task never polls before it waits",
    "sets_polling: says itself how the driver polls",
    "on_pair: on tests/session/pair.py, in virtual time; the test's name is the seed",
    "on_device: not so, though its file is",
)

COMBINATIONS = pytest.StashKey["Chooser"]()


class Chooser:
    """Assigns each test the combination that its file has used least so far."""

    def __init__(self) -> None:
        self.chosen: dict[str, Combination] = {}
        """The combination chosen for each test."""
        self._uses: defaultdict[str, Counter[object]] = defaultdict(Counter)

    def choose(self, test: str, parameters: Mapping[str, Sequence[str]]) -> Combination:
        """Return the combination for a test ID ("file::name"). Later calls return the same one."""
        if test not in self.chosen:
            uses = self._uses[test.partition("::")[0]]

            def used(values: tuple[str, ...]) -> tuple[int, int]:
                return uses[values], sum(uses[value] for value in values)

            values = min(itertools.product(*parameters.values()), key=used)
            uses.update([values, *values])
            self.chosen[test] = dict(zip(parameters, values, strict=True))
        return self.chosen[test]


def is_on_pair(item: pytest.Item) -> bool:
    """Return whether the test runs without a device."""
    return bool(item.get_closest_marker("on_pair") and not item.get_closest_marker("on_device"))


def parameters(definition: pytest.Function) -> dict[str, Sequence[str]]:
    """Return the possible values of the test's parameters."""
    function = getattr(getattr(definition.obj, "hypothesis", None), "inner_test", definition.obj)
    names = set(definition.fixturenames)
    if inspect.iscoroutinefunction(function):
        names.add("loop_name")
    limits: dict[str, Sequence[str]] = {}
    if is_on_pair(definition):
        limits.update(ON_PAIR)
    for marker in definition.iter_markers():  # closest first
        if marker.name in MARKERS:
            limits.setdefault(*MARKERS[marker.name])
    return {name: limits.get(name, FIXTURES[name]) for name in FIXTURES if name in names}


def is_repeated(item: pytest.Item) -> bool:
    """Return whether a run with `--every-combination` includes the item's combination."""
    if not isinstance(item, pytest.Function):
        return False
    count = math.prod(map(len, parameters(item).values()))
    if count < 8:
        return count > 1
    chosen = item.callspec.params
    lasts = [chosen.get(name) == values[-1] for name, values in FIXTURES.items()]
    return sum(lasts, chosen.get("_asyncio_loop_factory") is LOOPS["uvloop"]) % 2 == 0


def values(
    config: pytest.Config, definition: pytest.Function, every: bool
) -> dict[str, Sequence[str]]:
    """Return the values to test for each parameter: all if `every` is true, otherwise one."""
    possible = parameters(definition)
    if config.getoption("--peer") and "connection_method" in possible:
        possible = {**possible, "connection_method": ("tcp",)}
    if every:
        return possible
    chooser = config.stash.setdefault(COMBINATIONS, Chooser())
    return {name: (value,) for name, value in chooser.choose(definition.nodeid, possible).items()}


def parametrize(metafunc: pytest.Metafunc, every: bool) -> None:
    """Parametrize a test. Its name shows only the parameters that have several values."""
    chosen = values(metafunc.config, metafunc.definition, every)
    for name, some in chosen.items():
        if name in metafunc.fixturenames:  # pytest-asyncio parametrizes a coroutine's loop
            ids = some if len(some) > 1 else [pytest.HIDDEN_PARAM]
            metafunc.parametrize(name, some, ids=ids, indirect=True)
