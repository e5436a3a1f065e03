"""The pages that are written by a program, in whole or in part, as they should be now."""

from __future__ import annotations

from pathlib import Path

from . import sections, states_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def pages() -> dict[Path, str]:
    """Path and text of each."""
    states = DOCS / "queue-pair-states.md"
    return {states: sections.replace(states.read_text(), states_page.sections())}
