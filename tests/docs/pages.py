"""The expected contents of the pages with generated parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from softdev.tests.guests import results
from tests import mutants

from . import connection_page, man_pages, sections, states_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def pages() -> dict[Path, str]:
    """Return the text of each generated page by path."""
    states = DOCS / "queue-pair-states.md"
    design = DOCS / "design.md"
    planted = json.loads(mutants.RECORD.read_text())
    contributing = ROOT / "CONTRIBUTING.md"
    return {
        contributing: sections.replace(
            contributing.read_text(), {"mutants": mutants.table(planted)}
        ),
        states: sections.replace(states.read_text(), states_page.sections()),
        design: sections.replace(design.read_text(), connection_page.sections()),
        results.PAGE: results.page(results.load()),
        **man_pages.pages(),
    }


def differing(wanted: Mapping[Path, str]) -> list[Path]:
    """Return the pages that are missing or outdated."""
    return [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
