"""Replace the generated parts of a page, which are between marks."""

from __future__ import annotations

import re
from collections.abc import Mapping


def replace(page: str, sections: Mapping[str, str]) -> str:
    """Replace the text between the marks of each section.

    Raises KeyError for an unknown section, and ValueError if the marks of a section are missing.
    """
    seen: set[str] = set()

    def written(match: re.Match[str]) -> str:
        seen.add(match["name"])
        return f"{match['begin']}\n{sections[match['name']]}\n{match['end']}"

    result = re.sub(
        r"(?P<begin><!-- (?P<name>[\w-]+): written by `make docs` -->\n)"
        r".*?(?P<end><!-- end of (?P=name) -->)",
        written,
        page,
        flags=re.DOTALL,
    )
    if missing := sections.keys() - seen:
        raise ValueError(f"the page has no marks for: {', '.join(sorted(missing))}")
    return result
