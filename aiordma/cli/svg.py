"""Just enough of SVG for a picture: shapes with a tooltip each, collected as text."""

from __future__ import annotations

from html import escape

FONT = "system-ui, 'DejaVu Sans', 'Segoe UI', Helvetica, Arial, sans-serif"


class Drawing:
    """Shapes on a white sheet of ``width``; the height is known when everything is drawn."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, title: str = "",
        more: str = "",
    ) -> None:  # fmt: skip
        self._shape(
            f'rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" '
            f'fill="{fill}"{more}',
            title,
        )

    def path(self, data: str, fill: str = "none", *, title: str = "", more: str = "") -> None:
        self._shape(f'path d="{data}" fill="{fill}"{more}', title)

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str) -> None:
        self._shape(
            f'line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"', ""
        )

    def text(
        self, x: float, y: float, text: str, *, size: float = 11, colour: str = "#333",
        anchor: str = "start", bold: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{colour}" '
            f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def include(self, other: Drawing) -> None:
        """Put the shapes of another one over those that are there."""
        self._parts += other._parts

    def _shape(self, inner: str, title: str) -> None:
        name = inner.partition(" ")[0]
        self._parts.append(
            f"<{inner}><title>{escape(title)}</title></{name}>" if title else f"<{inner}/>"
        )

    def finish(self, height: float) -> str:
        """The whole file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height:.0f}" '
            f'viewBox="0 0 {self.width} {height:.0f}" font-family="{FONT}">\n'
            f'<rect width="100%" height="100%" fill="#fff"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )
