"""Every public name is documented, and a test raises every documented error."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from aiordma._transport.remote_memory import RemoteRegion, RemoteSlice
from tests.docs.names import Name, is_described, member_doc, members, on_pages, public, value_doc
from tests.docs.not_provoked import NOT_PROVOKED
from tests.docs.promises import promises
from tests.docs.provoking import load

ROOT = Path(__file__).parents[2]
NAMES = public()
OFFERED = {name.value for name in NAMES if isinstance(name.value, type)}


# ---- what is written ----------------------------------------------------------------------------


def test_every_public_name_has_a_docstring() -> None:
    def doc(name: Name) -> str:
        return name.doc if is_described(name.value) else value_doc(name)

    bare = [name.key for name in NAMES if not doc(name)]
    for cls in OFFERED:
        bare += [member.key for member in members(cls, OFFERED) if not member_doc(member)]
    assert not bare, f"without a docstring: {', '.join(bare)}"


@pytest.mark.parametrize("cls", [RemoteRegion, RemoteSlice])
def test_what_an_object_of_the_peers_memory_has(cls: type) -> None:
    """No name without an underscore is the library's own: users see it, in a debugger, too."""
    described = {member.name for member in members(cls, OFFERED) if member_doc(member)}
    described |= {each for each in dir(cls) if f"`{each}`" in (cls.__doc__ or "")}
    assert {each for each in dir(cls) if not each.startswith("_")} <= described


def test_every_name_is_on_one_page() -> None:
    """docs/reference has pages by subject, which the site fills (docs/_extensions)."""
    modules, names = on_pages()
    assert sorted(names) == sorted(f"{name.module}.{name.name}" for name in NAMES)
    assert sorted(module for module, _ in modules) == sorted({name.module for name in NAMES})


# ---- what is promised ---------------------------------------------------------------------------

PROMISED = {
    (key, error.__name__) for key, promise in promises().items() for error in promise.errors
}
PROVOKED = {(key, error): test for key, tests in load().items() for error, test in tests.items()}


def test_every_promised_error_is_provoked() -> None:
    """A test raises the error (provoking.py), or there is a reason why none does."""
    for promise in sorted(PROMISED):
        assert (promise in PROVOKED) != (promise in NOT_PROVOKED), (
            f"{promise[0]} promises {promise[1]}: write a test that provokes it and run "
            "`pytest --record-provoked` with it, or give the reason in tests/docs/not_provoked.py"
            if promise not in NOT_PROVOKED
            else f"{PROVOKED[promise]} provokes it, against what tests/docs/not_provoked.py says"
        )


def test_nothing_else_is_listed() -> None:
    assert (PROVOKED.keys() | NOT_PROVOKED.keys()) - PROMISED == set()
    assert all(reason.strip() for reason in NOT_PROVOKED.values())


@functools.cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_the_provoking_tests_are_there() -> None:
    for test in sorted(set(PROVOKED.values())):
        path, _, function = test.partition(" on ")[0].partition("[")[0].rpartition("::")
        assert function in functions(path.partition("::")[0]), test
