"""Links of pages that a forge shows as well: to pages, to modules, to files of the repository.

A page such as docs/changelog.md stands for a file outside docs/: on the site it has that file's
text. A link to such a file leads to its page, one to a public module's source to its reference;
other files of the repository can be downloaded, and are shown where a page includes them.
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
    "ray": "integrations/ray/README.md",
    "valkey": "integrations/valkey/README.md",
    "softdev": "softdev/README.md",
    **{page.stem: f"softdev/docs/{page.name}" for page in (ROOT / "softdev/docs").glob("*.md")},
}
_INCLUDED = re.compile(r"(?<=^```\{literalinclude\} )\S+", re.MULTILINE)
_LINK = re.compile(r"\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def _sources() -> dict[Path, Path]:
    """The page of each file outside docs/ that has one."""
    pages = {ROOT / file: DOCS / f"{page}.md" for page, file in SHOWN.items()}
    pages[ROOT / "README.md"] = DOCS / "index.md"
    for module, page in on_pages()[0]:
        path = ROOT.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        pages[file] = page
    return pages


PAGES = _sources()


def on_the_site(text: str, file: Path, page: Path) -> str:
    """The text of a file with its links as they are on the site, where its page is."""

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
