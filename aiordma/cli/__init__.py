"""The command line: `aiordma`, or `python -m aiordma`.

click and rich are the extra `cli`: the library works without them, and `main` says what to install.
"""

from __future__ import annotations

import sys

NEEDED = ("click", "rich")


def main() -> int:
    """Runs the command line of this process and exits; returns 2 where the extra is missing."""
    try:
        # Not before the question is asked: `python -m aiordma` must be able to explain itself.
        from .app import app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        print(
            f"aiordma: the command line needs {missing}, which is not installed; "
            "pip install 'aiordma[cli]'",
            file=sys.stderr,
        )
        return 2
    app(prog_name="aiordma")
    return 0
