"""Test that each hand-written mistake of `tests.mutants` still matches the source."""

from __future__ import annotations

from tests.mutants import ROOT
from tests.session.mutants import MUTANTS


def test_handwritten_mutants_match_the_source_exactly_once() -> None:
    for name, (file, before, _) in MUTANTS.items():
        found = (ROOT / "aiordma" / file).read_text().count(before)
        assert found == 1, f"{name}: {file} has changed"
