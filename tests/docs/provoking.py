"""Which test raises which documented error: recorded, and checked when the test runs.

``provoked.json`` names a test for each error that a docstring promises, and its device. When such a
test runs there, what was promised is watched: unless the error leaves it, the test fails. So the
table cannot claim what is not so. ``pytest --record-provoked`` watches everything in every test and
fills in what is missing: on the embedded device first, then, for what that has and others lack, on
another.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from .compiled import is_compiled
from .names import Member
from .promises import Promise, promises

TABLE = Path(__file__).with_name("provoked.json")

Provoked = dict[str, dict[str, str]]
"""The key of the function -> the name of the error -> the test, and its device if it is not
the embedded one."""

Seen = set[tuple[str, str]]
"""The key of the function, and the name of the error."""

RECORD: pytest.StashKey[Provoked] = pytest.StashKey()


def load() -> Provoked:
    table: Provoked = json.loads(TABLE.read_text())
    return table


def save(table: Provoked) -> None:
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


# ---- watching -----------------------------------------------------------------------------------


@contextmanager
def watching(watched: Iterable[Promise]) -> Iterator[Seen]:
    """Record the documented errors that functions raise while the block runs."""
    seen: Seen = set()
    with ExitStack() as stack:
        for promise in watched:
            note = functools.partial(_note, seen, promise)
            for member in promise.callables:
                stack.enter_context(_replaced_member(member, note))
            if promise.function is not None:
                stack.enter_context(_replaced_function(promise.function, note))
        yield seen


def _note(seen: Seen, promise: Promise, error: BaseException) -> None:
    name = promise.kept_by(error)
    if name is not None:
        seen.add((promise.key, name))


Note = Callable[[BaseException], None]


@contextmanager
def _replaced_member(member: Member, note: Note) -> Iterator[None]:
    if is_compiled(member.owner):
        with _replaced_in_subclasses(member, note):
            yield
        return
    there = vars(member.owner)[member.name]  # may be wrapped already
    setattr(member.owner, member.name, _watched(there, note))
    try:
        yield
    finally:
        setattr(member.owner, member.name, there)


@contextmanager
def _replaced_in_subclasses(member: Member, note: Note) -> Iterator[None]:
    """Replace a compiled method, whose class takes no attributes, where users find it."""
    with ExitStack() as stack:
        subclasses: list[type] = member.owner.__subclasses__()
        for cls in subclasses:
            here = vars(cls).get(member.name)
            there = getattr(cls, member.name)
            setattr(cls, member.name, _watched(there, note, member.value))
            if here is None:
                stack.callback(delattr, cls, member.name)
            else:
                stack.callback(setattr, cls, member.name, here)
        yield


@contextmanager
def _replaced_function(function: Callable[..., Any], note: Note) -> Iterator[None]:
    """Replace a function in every module that has imported it."""
    watched = _watched(function, note)
    places = [
        (module, name)
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] in ("aiordma", "tests")
        for name, value in list(vars(module).items())
        if value is function
    ]
    for module, name in places:
        setattr(module, name, watched)
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, function)


@contextmanager
def _noting(note: Note) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        note(error)
        raise


def _watched(value: Any, note: Note, like: Any = None) -> Any:
    """`like` has the kind of a compiled function, which does not show it."""
    like = value if like is None else like
    if isinstance(value, (classmethod, staticmethod)):
        return type(value)(_watched(value.__func__, note))
    if isinstance(value, property):
        return property(_watched(value.fget, note), value.fset, value.fdel, value.__doc__)
    if inspect.isasyncgenfunction(like) or getattr(value, "__name__", "") == "__aiter__":

        @functools.wraps(value)
        async def generate(*arguments: Any, **keywords: Any) -> Any:
            with _noting(note):
                async for item in value(*arguments, **keywords):
                    yield item

        return generate
    if inspect.iscoroutinefunction(like):

        @functools.wraps(like)
        async def wait(*arguments: Any, **keywords: Any) -> Any:
            with _noting(note):
                return await value(*arguments, **keywords)

        return wait

    @functools.wraps(value)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with _noting(note):
            return value(*arguments, **keywords)

    return call


# ---- in a run of pytest, through conftest.py ----------------------------------------------


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-provoked",
        action="store_true",
        help="note in tests/docs/provoked.json which test provokes which promised error",
    )


def check(config: pytest.Config) -> None:
    """Refuse what would lose records: each worker of xdist would write the file anew."""
    if config.getoption("--record-provoked") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--record-provoked needs all tests in one process: add -n 0")


def watch(item: pytest.Item) -> Generator[None, object, object]:
    """Check one test; for a hook wrapper."""
    record = bool(item.config.getoption("--record-provoked"))
    device = item.config.getoption("--device")
    here = item.nodeid if device == "embedded0" else f"{item.nodeid} on {device}"
    if RECORD not in item.config.stash:
        item.config.stash[RECORD] = load()
    table = item.config.stash[RECORD]
    claimed = {
        (key, name) for key, tests in table.items() for name, test in tests.items() if test == here
    }
    if not record and not claimed:
        return (yield)
    every = promises()
    keys = every.keys() if record else {key for key, _ in claimed} & every.keys()
    with watching(every[key] for key in keys) as seen:
        result = yield
    if record:
        for key, name in claimed - seen:
            del table[key][name]
        for key, name in seen:
            table.setdefault(key, {}).setdefault(name, here)
    elif unkept := sorted(claimed - seen):
        pytest.fail(
            f"it does not provoke {unkept}, as tests/docs/provoked.json says of it: delete the line"
            " there, and let a run of `pytest --record-provoked` find another test"
        )
    return result


def finish(config: pytest.Config) -> None:
    """Write the records at the end of a run, without errors that are not documented any more."""
    if not config.getoption("--record-provoked") or RECORD not in config.stash:
        return
    every = promises()
    kept: Provoked = {}
    for key, tests in config.stash[RECORD].items():
        promised = {error.__name__ for error in every[key].errors} if key in every else set()
        if still := {name: test for name, test in tests.items() if name in promised}:
            kept[key] = still
    save(kept)
