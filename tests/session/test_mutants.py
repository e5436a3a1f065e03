"""The mistakes of `tests.session.mutants` have their places in the sources as these are now."""

from __future__ import annotations

from tests.session.mutants import MUTANTS, ROOT


def test_each_mistake_can_be_planted() -> None:
    for name, (file, before, after) in MUTANTS.items():
        found = (ROOT / "aiordma" / file).read_text().count(before)
        assert found == 1, f"{name}: {file} has changed"
        assert after != before
