"""Tables printed by the commands, and functions that format their cells."""

from __future__ import annotations

from collections.abc import Collection

from rich.box import SIMPLE_HEAD
from rich.table import Table

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def table(*columns: str, numbers: Collection[str] = (), caption: str | None = None) -> Table:
    """Create a table in which only the last column wraps on a narrow terminal.

    All other columns keep their full width.
    """
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in numbers else "left",
            no_wrap=column != columns[-1],
            overflow="fold",
        )
    return made


def plain(value: object) -> str:
    """Convert a value to text, and remove control characters.

    Values from other processes may contain control characters that would affect the terminal.
    """
    return "".join(c for c in str(value) if c.isprintable())


def size_text(size: int) -> str:
    """Format a size requested by the user, without rounding it."""
    for unit, factor in UNITS:
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size:,} B"


def amount(size: float) -> str:
    """Format a measured number of bytes, rounded to at most one decimal place."""
    for unit, factor in UNITS:
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def time_text(us: float) -> str:
    return f"{us:,.1f}" if us < 1000 else f"{us:,.0f}"


def verdict(mismatch: object) -> str:
    return "[bold red]NO[/]" if mismatch else "[green]yes[/]"
