"""Test that each hand-written mistake of `tests.mutants` still matches the source."""

from __future__ import annotations

from tests.mutants import ROOT
from tests.session.mutants import MUTANTS


def test_each_mistake_by_hand_can_be_planted() -> None:
    for name, (file, before, _) in MUTANTS.items():
        found = (ROOT / "aiordma" / file).read_text().count(before)
        assert found == 1, f"{name}: {file} has changed"
