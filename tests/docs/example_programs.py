"""The programs of examples/verbs, and the output that a page gives for each."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "verbs"
_PAGES = (ROOT / "docs" / "cm.md", ROOT / "docs" / "verbs.md")
_OUTPUT = re.compile(
    r"^```\{literalinclude\} \.\./examples/verbs/(\w+)\.py\n:language: python\n```\n\n"
    r"```text\n(.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def outputs() -> dict[str, str]:
    """Return the output of each program as its page shows it."""
    return dict(pair for page in _PAGES for pair in _OUTPUT.findall(page.read_text()))
