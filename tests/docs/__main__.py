"""Write the generated parts of the pages in docs/.

python -m tests.docs            write them: make docs
python -m tests.docs --check    fail where a page is not what it would be now
"""

from __future__ import annotations

import sys

from .pages import pages


def main(arguments: list[str]) -> str | None:
    if arguments not in ([], ["--check"]):
        return __doc__
    stale = {path: text for path, text in pages().items() if path.read_text() != text}
    for path, text in stale.items():
        if not arguments:
            path.write_text(text)
        print(path)
    return "these pages are out of date: make docs" if stale and arguments else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
