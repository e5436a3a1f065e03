"""Write the generated parts of the pages in docs/: `make docs`."""

from __future__ import annotations

from .pages import differing, pages

wanted = pages()
for path in differing(wanted):
    print(path)
    path.write_text(wanted[path])
