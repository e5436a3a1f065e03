"""The command-line interface, run as `aiordma` or `python -m aiordma`.

The `cli` extra installs its dependencies, click and rich. If either package is missing, `main`
prints how to install it. The library itself works without these packages.
"""

from __future__ import annotations

import sys

NEEDED = ("click", "rich")


def main() -> int:
    """Run the command-line interface.

    Returns:
        The exit status, which is 2 if the `cli` extra is not installed.

    Raises:
        SystemExit: When a command has finished. The exception contains the command's exit status.
    """
    try:
        # Import here, so that a missing extra can be reported below.
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
