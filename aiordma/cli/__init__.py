"""The command line: `aiordma`, or `python -m aiordma`.

click and rich belong to the extra `cli`. The library works without them, and `main` reports how to
install them.
"""

from __future__ import annotations

import sys

NEEDED = ("click", "rich")


def main() -> int:
    """Run the command line in this process and exit. Returns 2 if the extra is not installed."""
    try:
        # Imported here, so that `python -m aiordma` can report a missing extra.
        from .app import app  # noqa: PLC0415

        app(prog_name="aiordma")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        print(
            f"aiordma: the command line requires {missing}, which is not installed: "
            "pip install 'aiordma[cli]'",
            file=sys.stderr,
        )
        return 2
    return 0
