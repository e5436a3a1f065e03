"""The tables that the commands print, and texts for them."""

from __future__ import annotations

from collections.abc import Collection

from rich.box import SIMPLE_HEAD
from rich.table import Table

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def table(*columns: str, numbers: Collection[str] = (), caption: str | None = None) -> Table:
    """A table whose last column is folded on a narrow terminal: the others are never cut."""
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
    """Without the control characters that another process may have written."""
    return "".join(c for c in str(value) if c.isprintable())


def size_text(size: int) -> str:
    """A size as it was asked for, without rounding."""
    for unit, factor in UNITS:
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size:,} B"


def amount(size: float) -> str:
    """A measured number of bytes, rounded."""
    for unit, factor in UNITS:
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def time_text(us: float) -> str:
    return f"{us:,.1f}" if us < 1000 else f"{us:,.0f}"


def verdict(mismatch: object) -> str:
    return "[bold red]NO[/]" if mismatch else "[green]yes[/]"
