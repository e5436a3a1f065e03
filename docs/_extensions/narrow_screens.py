"""Prepare code and headings for narrow screens, where docs/_static/site.css lets them wrap."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge

# A conservative estimate of the number of characters on a line 400 pixels wide.
_FITS = 36
_TAG = re.compile(r"<[^>]*>")
_HEADING = re.compile(r"<h[1-6]>.*?</h[1-6]>", re.DOTALL)
_DOT = re.compile(r"(?<=\w)\.(?=\w)(?![^<]*>)")


class CodeLines(HtmlFormatter):  # type: ignore[misc]
    """A formatter that marks long lines and passes their indentation to the style sheet."""

    def _format_lines(self, tokensource: Any) -> Iterator[tuple[int, str]]:
        lines: Iterable[tuple[int, str]] = super()._format_lines(tokensource)
        for is_code, line in lines:
            text = html.unescape(_TAG.sub("", line)).rstrip("\n")
            if is_code and len(text) > _FITS:
                indent = len(text) - len(text.lstrip())
                code = line.removesuffix("\n")
                yield is_code, f'<span class="long" style="--indent: {indent}ch">{code}</span>\n'
            else:
                yield is_code, line


def allow_breaks(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Allow line breaks after the dots of module names in headings."""
    if "body" in context:
        context["body"] = _HEADING.sub(
            lambda heading: _DOT.sub(".<wbr>", heading[0]), context["body"]
        )


def setup(app: Sphinx) -> dict[str, bool]:
    PygmentsBridge.html_formatter = CodeLines
    app.connect("html-page-context", allow_breaks)
    return {"parallel_read_safe": True}
