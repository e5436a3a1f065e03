"""docs/from-c.md: every call of the C libraries is there, and every name that it gives exists."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from aiordma import cm, verbs
from aiordma.verbs import raw
from tests.docs.names import attributes
from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "from-c.md").read_text()
SECTIONS = {
    "verbs": (verbs, "## Every call of the verbs"),
    "cm": (cm, "## Every call of the connection manager"),
}


def rows(title: str) -> list[tuple[str, str]]:
    """The two columns of the table of a section."""
    section = PAGE.partition(title + "\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (`.+) \| (.+) \|$", section, re.M)


def listed(title: str) -> list[str]:
    return [name for calls, _ in rows(title) for name in re.findall(r"`(\w+)`", calls)]


def exported(library: str) -> set[str]:
    """The calls of native/abi/calls.h and, of libibverbs, those that no library exports."""
    calls = (ROOT / "native" / "abi" / "calls.h").read_text()
    found = set(re.findall(rf"^(?:CALL|OPTIONAL)\({library}, .+?, _?(\w+), \(", calls, re.M))
    if library == "verbs":
        interface = (ROOT / "native" / "verbs" / "interface.h").read_text()
        found |= set(re.findall(r"\baiordma_(ibv_\w+)\(", interface))
        found |= {name for name in raw.__all__ if name.startswith("ibv_")}
    return found


@pytest.mark.parametrize("library", SECTIONS)
def test_every_call_is_listed_once(library: str) -> None:
    there = listed(SECTIONS[library][1])
    assert len(there) == len(set(there))
    assert exported(library) - set(there) == set()
    header = {"ibv_inc_rkey", "ibv_start_poll", "ibv_next_poll", "ibv_end_poll"}
    assert set(there) - exported(library) == (header if library == "verbs" else set())


def exists(module: ModuleType, path: str) -> bool:
    """Whether a name of the page is there: `verbs.devices`, `Context.alloc_pd`, `MTU`."""
    value: object = {"verbs": verbs, "cm": cm}.get(path.partition(".")[0], module)
    for name in path.removeprefix("verbs.").removeprefix("cm.").split("."):
        if isinstance(value, type) and name in attributes(value):
            return True
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


@pytest.mark.parametrize("library", SECTIONS)
def test_the_names_exist(library: str) -> None:
    module, title = SECTIONS[library]
    names = [
        name
        for _, cell in rows(title)
        for name in re.findall(r"`((?:verbs\.|cm\.)?[A-Z]\w+(?:\.\w+)*|(?:verbs|cm)\.\w+)`", cell)
    ]
    assert len(names) > 20
    assert [name for name in names if not exists(module, name)] == []
