"""SVG charts of comparisons, suitable for light and dark pages and for narrow screens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .lanes import Spread

WIDTH, MARGIN = 480, 8
TITLE, ROW, AXIS, GAP = 26, 28, 18, 10  # heights
LINEAR = 12.0
"""The largest ratio between two figures for which the axis is linear rather than logarithmic."""

STYLE = """\
text { font: 12px sans-serif; fill: #24292f }
.title { font-weight: bold } .tick { font-size: 10px; fill: #57606a }
.grid { stroke: #d0d7de } .turns { stroke: #24292f }
.ours { fill: #c44e52 } .other { fill: #6e7f9a }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .tick { fill: #9ea7b3 } .grid { stroke: #3d444d } .turns { stroke: #e6edf3 }
.ours { fill: #e5787c } .other { fill: #8fa3c2 }
}
"""


@dataclass(frozen=True)
class Panel:
    """A chart for one kind of work, with each contender's figures from every turn."""

    title: str
    unit: str
    rows: Sequence[tuple[str, Spread]]

    @property
    def height(self) -> int:
        return TITLE + ROW * len(self.rows) + AXIS + GAP


def ticks(values: Sequence[float]) -> tuple[bool, list[float]]:
    """Return whether the axis is logarithmic, and its tick positions.

    A linear axis starts at 0. A logarithmic axis has ticks at powers of 10 and at both ends.
    """
    least, most = min(values), max(values)
    if most > LINEAR * least:
        powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        steps = [(part, part * 10.0**power) for power in powers for part in (1, 2, 5)]
        low = max(step for _, step in steps if step <= least)
        high = min(step for _, step in steps if step >= most)
        return True, [
            step
            for part, step in steps
            if low <= step <= high and (part == 1 or step in (low, high))
        ]
    scale = 10.0 ** math.floor(math.log10(most))
    step = next(scale * part for part in (0.2, 0.5, 1, 2) if most <= 5 * scale * part)
    return False, [step * number for number in range(math.ceil(most / step) + 1)]


def short(value: float, digits: int = 3) -> str:
    """Format a value to `digits` significant digits, with an M or k suffix if needed."""
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if value >= scale * 0.9995:
            return f"{float(f'{value / scale:.{digits}g}'):g} {unit}"
    return f"{float(f'{value:.{digits}g}'):g}"


def two_digits(value: float) -> str:
    return short(value, 2)


def panel(one: Panel, top: int) -> list[str]:
    """Draw a bar for each contender, or a point if the axis is logarithmic.

    A line spans the range of each contender's figures across all turns.
    """
    logarithmic, marks = ticks([value for _, found in one.rows for value in found.values])

    def at(value: float) -> float:
        low, high = marks[0], marks[-1]
        part = math.log(value / low, high / low) if logarithmic else value / high
        return round(MARGIN + part * (WIDTH - 2 * MARGIN), 1)

    better = "less" if one.unit in ("us", "ms") else "more"
    bottom = top + TITLE + ROW * len(one.rows)
    drawn = [
        f'<text class="title" x="{MARGIN}" y="{top + 16}">{escape(one.title)}</text>',
        f'<text class="tick" x="{WIDTH - MARGIN}" y="{top + 16}" text-anchor="end">'
        f"{one.unit}, {better} is better</text>",
    ]
    for number, mark in enumerate(marks):
        anchor = "start" if number == 0 else "end" if mark == marks[-1] else "middle"
        drawn += [
            f'<path class="grid" d="M{at(mark)} {top + TITLE}V{bottom}"/>',
            f'<text class="tick" x="{at(mark)}" y="{bottom + 13}" text-anchor="{anchor}">'
            f"{short(mark)}</text>",
        ]
    for number, (who, found) in enumerate(one.rows):
        y = top + TITLE + ROW * number
        kind = "ours" if "aiordma" in who else "other"
        typical, least, most = map(at, (found.typical, min(found.values), max(found.values)))
        middle = y + 20
        shape = (
            f'circle cx="{typical}" cy="{middle}" r="4"'
            if logarithmic
            else f'rect x="{MARGIN}" y="{middle - 3}" width="{typical - MARGIN:.1f}" height="6"'
        )
        drawn += [
            f'<text x="{MARGIN + 3}" y="{y + 12}">{escape(who.replace("`", ""))}</text>',
            f'<text x="{WIDTH - MARGIN}" y="{y + 12}" text-anchor="end">'
            f"{short(found.typical)}</text>",
            f'<{shape} class="{kind}"/>',
            f'<path class="turns" d="M{least} {middle}H{most}"/>',
        ]
    return drawn


def draw(panels: Sequence[Panel], path: Path) -> None:
    lines, top = [], 0
    for one in panels:
        lines += panel(one, top)
        top += one.height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" '
        f'height="{top}">'
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([head, f"<style>\n{STYLE}</style>", *lines, "</svg>\n"]))
