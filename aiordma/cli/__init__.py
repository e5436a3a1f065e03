"""The command line, started with `aiordma` or `python -m aiordma`.

It needs click and rich, which are in the extra `cli`. The library works without them. If they are
missing, `main` prints how to install them.
"""

from __future__ import annotations

import sys

NEEDED = ("click", "rich")


def main() -> int:
    """Run the command line in this process, and then exit the process.

    Returns 2 if the extra `cli` is not installed.
    """
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
