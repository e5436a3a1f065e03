"""The documentation site: `make site` builds it with Sphinx, MyST and furo.

Pages are Markdown that a forge shows as well; `_extensions` has what the site adds to them.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_extensions")]
PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]

project = PROJECT["name"]
author = "the aiordma founders"
copyright = author
release = version = PROJECT["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.graphviz",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "diagrams",
    "narrow_screens",
    "public_names",
    "repository_pages",
]
exclude_patterns = ["_*"]
nitpicky = True
nitpick_ignore_regex = [("py:class", r"h\.\w+|Resource|IPAddress")]  # undocumented types

myst_enable_extensions = ["colon_fence", "html_admonition"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4  # link anchors for headings, as on forges

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

graphviz_output_format = "svg"
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
pygments_dark_style = "github-dark"  # furo's default underlines names like links
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "_extensions" / "search_scorer.js")
html_copy_source = False

# The target of the "Source code" link on every page.
SOURCE_URL = os.environ.get("SOURCE_URL") or PROJECT.get("urls", {}).get("Source")
templates_path = ["_templates"]
html_context = {"source_url": SOURCE_URL}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/source.html",
        "sidebar/scroll-end.html",
    ]
}
