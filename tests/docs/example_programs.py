"""The programs of examples/verbs in their pages, and the output that a page gives for each."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "verbs"
_PAGES = {"cm": ROOT / "docs" / "cm.md", "verbs": ROOT / "docs" / "verbs.md"}
_OUTPUT = re.compile(r"<!-- end of (\w+) -->\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def pages() -> dict[Path, dict[str, str]]:
    """The generated parts of each page."""
    found: dict[Path, dict[str, str]] = {page: {} for page in _PAGES.values()}
    for path in sorted(EXAMPLES.glob("*.py")):
        page = _PAGES["cm" if path.stem.startswith("cm_") else "verbs"]
        found[page][path.stem] = f"```python\n{path.read_text()}```\n"
    return found


def outputs() -> dict[str, str]:
    """What each program prints, as its page says."""
    return dict(pair for page in _PAGES.values() for pair in _OUTPUT.findall(page.read_text()))
