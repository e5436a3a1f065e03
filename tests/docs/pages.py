"""The generated pages, and pages with generated parts, as they should be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.guests import results

from . import connection_page, reference, sections, states_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"


def pages() -> dict[Path, str]:
    """The path and text of each page."""
    states = DOCS / "queue-pair-states.md"
    connections = DOCS / "connections.md"
    return {
        states: sections.replace(states.read_text(), states_page.sections()),
        connections: sections.replace(connections.read_text(), connection_page.sections()),
        results.PAGE: results.page(results.load()),
        **{REFERENCE / name: text for name, text in reference.pages().items()},
    }


def differing(wanted: Mapping[Path, str]) -> list[Path]:
    """Pages that are missing or outdated, and files in the reference that are not generated."""
    old = {path for path, text in wanted.items() if not path.exists() or path.read_text() != text}
    too_many = {page for page in REFERENCE.glob("*") if page not in wanted}
    return sorted(old | too_many)
