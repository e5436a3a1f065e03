"""The command line: `aiordma`, or `python -m aiordma`.

click and rich are the extra `cli`: the library works without them, and `main` says what to install.
"""

from __future__ import annotations

import sys

NEEDED = ("click", "rich")


def main() -> int:
    """Run the command line of this process and exit; return 2 where the extra is missing."""
    try:
        # Imported here, so that `python -m aiordma` can report a missing extra.
        from .app import app  # noqa: PLC0415

        app(prog_name="aiordma")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        print(
            f"aiordma: the command line needs {missing}, which is not installed: "
            "pip install 'aiordma[cli]'",
            file=sys.stderr,
        )
        return 2
    return 0
