"""docs/messages.md lists the modules, classes and methods of the data path that exist."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "messages.md").read_text()
MODULES = {path.name: path.read_text() for path in (ROOT / "aiordma/_datapath").glob("*.pyx")}
OTHERS = [path.read_text() for path in (ROOT / "aiordma/_transport").glob("*.py")]


def test_the_table_has_every_module_with_classes_of_it() -> None:
    rows = re.findall(r"^\| `(\w+\.pyx)` \| (.+) \| .+ \|$", PAGE, re.M)
    assert sorted(name for name, _ in rows) == sorted(MODULES)
    for name, classes in rows:
        for each in re.findall(r"`(\w+)`", classes):
            assert re.search(rf"^cdef class {each}\b", MODULES[name], re.M), f"{name}: {each}"


def test_the_ways_through_the_classes_name_methods_that_exist() -> None:
    table = PAGE.partition("| what happens |")[2].partition("\n\n")[0]
    methods = re.findall(r"`(?:\w+\.)?(\w+)`", table)
    assert len(methods) > 30
    sources = [*MODULES.values(), *OTHERS]
    for method in methods:
        defined = re.compile(rf"^    c?def\b.*\b{method}\(", re.M)
        assert any(defined.search(text) for text in sources), method
