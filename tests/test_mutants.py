"""The mistakes that `tests.mutants` plants: what each kind says, and always the same list."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests import mutants
from tests.mutants import PARTS, ROOT, marked, mutants_of, planted
from tests.session.mutants import MUTANTS

BODIES = {
    "if x < 1:": ["if not (x < 1):", "if x <= 1:", "if x < 2:"],
    "while a and b:": ["while not (a and b):", "while a or b:"],
    "x = a == b": ["x = a != b"],
    "await self.close()": ["pass"],
    "self.count += n": ["pass"],
    "x = f(a, g(b, c))": ["x = f(g(b, c), a)", "x = f(a, g(c, b))"],
    "x = f(a) + g(b, key=c)": [],
    "x = max(a, b), <Frame> a": [],
    "x = a in (b, c)": [],
    "return a, b": ["return ((a, b), None)[1]"],
    "return None": [],
    "logger.info(a, b)": [],
    "assert x < y": [],
    "raise ValueError(1, 2)": [],
    'x = f"{a + 1}"': [],
    '"""if 1 < 2:"""': [],
}


def made(header: str, body: str) -> list[str]:
    source = f"class A:\n    x: int = 1\n    {header}\n        {body}\n"
    rest = f"class A:\n    x: int = 1\n    {header}\n        "
    found = [it.plant(source) for it in mutants_of("a.pyx", source)]
    assert all(it.startswith(rest) for it in found)
    return [it[len(rest) : -1] for it in found]


@pytest.mark.parametrize("body", BODIES)
def test_each_kind_is_what_it_says(body: str) -> None:
    assert made("async def f(self, *, y: int = 1 << 2):", body) == BODIES[body]


def test_a_function_of_a_c_number_returns_one() -> None:
    assert made("cdef int f(self, int a) except -1:", "return a") == ["return 0"]
    assert made("cdef int f(self) except -1:", "return 0") == []
    assert made("cdef object f(self, int a):", "return a") == ["return ((a), None)[1]"]


@pytest.mark.parametrize("header", ["def __repr__(self):", "cdef str text(self):"])
def test_what_only_people_read_stays(header: str) -> None:
    assert made(header, "return f(a, b)") == []


def test_the_list_is_the_same_and_can_be_planted() -> None:
    found = planted()
    assert list(found) == list(planted())
    for part, (_, most, _) in PARTS.items():
        assert sum(it == part for it, _ in found.values()) == (most or len(MUTANTS))
    for _, mutant in list(found.values())[::4]:
        source = mutants.git("show", f"HEAD:aiordma/{mutant.path}")
        assert source[mutant.start : mutant.end] == mutant.before != mutant.after
        if mutant.path.endswith(".py"):
            compile(mutant.plant(source), mutant.path, "exec")


def test_each_mistake_by_hand_can_be_planted() -> None:
    for name, (file, before, _) in MUTANTS.items():
        found = (ROOT / "aiordma" / file).read_text().count(before)
        assert found == 1, f"{name}: {file} has changed"


def test_functions_say_that_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    monkeypatch.setitem(sys.modules, "reached", SimpleNamespace(note=noted.append))
    source = (
        "class A:\n    x = 1\n\n    def f(self):\n"
        "        '''Text.'''\n        @staticmethod\n        def g(): pass\n"
        "        def h():\n            for it in (1,):\n                return it\n"
        "        return h()\n"
    )
    names: dict[str, Any] = {}
    exec(marked("a.py", source), names)
    assert not noted
    assert names["A"]().f() == 1
    assert noted == ["a.py A.f", "a.py A.f.h"]
    assert names["A"].f.__doc__ == "Text."
