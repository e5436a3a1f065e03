"""Tests that docs/from-c.md has every call of the C libraries, and only existing names."""

from __future__ import annotations

import operator
import re
from types import ModuleType

import pytest

import aiordma
from aiordma import cm, verbs
from aiordma.verbs import raw
from aiordma.verbs.raw import ffi
from tests.docs.names import attributes
from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "from-c.md").read_text()
SECTIONS = {
    "verbs": (verbs, "## Every call of the verbs"),
    "cm": (cm, "## Every call of the connection manager"),
}


def rows(title: str) -> list[tuple[str, str]]:
    """Return the two columns of the table in a section."""
    section = PAGE.partition(title + "\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (`.+) \| (.+) \|$", section, re.M)


def listed(title: str) -> list[str]:
    return [name for calls, _ in rows(title) for name in re.findall(r"`(\w+)`", calls)]


def exported(library: str) -> set[str]:
    """Return a library's calls, including the inline calls of libibverbs that aiordma wraps."""
    calls = (ROOT / "softdev" / "abi" / "calls.h").read_text()
    found = set(re.findall(rf"^(?:CALL|OPTIONAL)\({library}, .+?, _?(\w+), \(", calls, re.M))
    if library == "verbs":
        interface = (ROOT / "native" / "verbs" / "interface.h").read_text()
        found |= set(re.findall(r"\baiordma_(ibv_\w+)\(", interface))
        found |= {name for name in raw.__all__ if name.startswith("ibv_")}
    return found


@pytest.mark.parametrize("library", SECTIONS)
def test_page_lists_every_c_function_exactly_once(library: str) -> None:
    there = listed(SECTIONS[library][1])
    assert len(there) == len(set(there))
    assert exported(library) - set(there) == set()
    header = {"ibv_inc_rkey", "ibv_start_poll", "ibv_next_poll", "ibv_end_poll"}
    assert set(there) - exported(library) == (header if library == "verbs" else set())


def test_structures_and_constants_on_the_c_page_exist() -> None:
    """Each constant has the value of the Python name in the same position."""
    both = [
        (re.findall(r"`(\w+)`", c), re.findall(r"`([\w.]+)`", names))
        for c, names in rows("## Structures and constants")
    ]
    constants = [row for row in both if row[0][0].isupper()]
    assert len(constants) > 4
    for there, names in constants:
        values = [operator.attrgetter(n)(aiordma if n.startswith("cm.") else verbs) for n in names]
        assert [getattr(raw, name) for name in there] == values
    structures = {name for row in both if row not in constants for name in row[0]}
    for name in structures - {"ibv_gid"}:  # a union
        assert ffi.typeof(f"struct {name}").fields


def exists(module: ModuleType, path: str) -> bool:
    """Return whether a name on the page exists, such as `verbs.devices` or `MTU`."""
    value: object = {"verbs": verbs, "cm": cm}.get(path.partition(".")[0], module)
    for name in path.removeprefix("verbs.").removeprefix("cm.").split("."):
        if isinstance(value, type) and name in attributes(value):
            return True
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


@pytest.mark.parametrize(
    ("module", "title"), [*SECTIONS.values(), (verbs, "## Structures and constants")]
)
def test_python_names_on_the_c_page_exist(module: ModuleType, title: str) -> None:
    names = [
        name
        for _, cell in rows(title)
        for name in re.findall(r"`((?:verbs\.|cm\.)?[A-Z]\w+(?:\.\w+)*|(?:verbs|cm)\.\w+)`", cell)
    ]
    assert len(names) > 20
    assert [name for name in names if not exists(module, name)] == []
