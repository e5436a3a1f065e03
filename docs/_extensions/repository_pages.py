"""Adapt the links of Markdown pages, which also work on a forge, to the site.

A page such as docs/changelog.md shows a file from outside docs/. Links to that file lead to the
page, and links to a public module's source lead to its reference. Other files of the repository
become downloads.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

from tests.docs.names import on_pages

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent

SHOWN = {
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "measurements": "bench/RESULTS.md",
    "experiments": "bench/EXPERIMENTS.md",
    "dask": "integrations/dask/README.md",
    "kv": "integrations/kv/README.md",
    "ray": "integrations/ray/README.md",
    "valkey": "integrations/valkey/README.md",
    "softdev": "softdev/README.md",
    **{page.stem: f"softdev/docs/{page.name}" for page in (ROOT / "softdev/docs").glob("*.md")},
}
_INCLUDED = re.compile(r"(?<=^```\{literalinclude\} )\S+", re.MULTILINE)
_LINK = re.compile(r"\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def _sources() -> dict[Path, Path]:
    """Map each file outside docs/ to the page that shows or documents it."""
    pages = {ROOT / file: DOCS / f"{page}.md" for page, file in SHOWN.items()}
    pages[ROOT / "README.md"] = DOCS / "index.md"
    for module, page in on_pages()[0]:
        path = ROOT.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        pages[file] = page
    return pages


PAGES = _sources()


def on_the_site(text: str, file: Path, page: Path) -> str:
    """Return the text of `file`, rewriting its relative links for `page` on the site."""

    def link(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(file.parent / match["path"]))
        target = PAGES.get(target, target)
        return f"]({os.path.relpath(target, page.parent)}{match['anchor'] or ''})"

    included = _INCLUDED.sub(lambda path: os.path.relpath(file.parent / path[0], page.parent), text)
    return _LINK.sub(link, included)


def read(app: Sphinx, name: str, source: list[str]) -> None:
    page = DOCS / f"{name}.md"
    if not page.exists():
        return
    file = ROOT / SHOWN[name] if name in SHOWN else page
    if file != page:
        app.env.note_dependency(str(file), docname=name)
    source[0] = on_the_site(file.read_text(), file, page)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
