"""Docstrings as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping

_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_LITERAL = re.compile(r"``([^`]+)``")
_CODE = re.compile(r"(?<![`\[])`([^`\n]+)`(?![`\]])")


def from_docstring(doc: str, links: Mapping[str, str]) -> str:
    """``links`` leads from a name to its place; the names in code are linked.

    ``::`` opens a block of code, as in reStructuredText.
    """
    parts: list[str] = []
    for paragraph, is_code in _blocks(doc):
        parts.append(f"```python\n{paragraph}\n```" if is_code else _inline(paragraph, links))
    return "\n\n".join(parts)


def _blocks(doc: str) -> list[tuple[str, bool]]:
    """Split into paragraphs and indented blocks of code, which follow a ``::``."""
    found: list[tuple[str, bool]] = []
    code = False
    for block in filter(None, re.split(r"\n\s*\n", doc)):
        indented = all(line.startswith("    ") for line in block.splitlines() if line)
        if indented and (code or not found or found[-1][1]):
            text = "\n".join(line[4:] for line in block.splitlines())
            if found and found[-1][1]:
                found[-1] = (f"{found[-1][0]}\n\n{text}", True)
            else:
                found.append((text, True))
            continue
        code = block.endswith("::")
        text = block.removesuffix("::").rstrip() + ":" if code and block != "::" else block
        if text != "::":
            found.append((text, indented))
    return found


def _inline(text: str, links: Mapping[str, str]) -> str:
    text = _ROLE.sub(r"`\1`", text)
    text = _LITERAL.sub(r"`\1`", text)

    def linked(match: re.Match[str]) -> str:
        target = links.get(match[1].removesuffix("()"))
        return f"[`{match[1]}`]({target})" if target else match[0]

    return _CODE.sub(linked, text)
