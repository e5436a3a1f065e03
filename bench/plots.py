"""The comparisons as pictures."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from .lanes import Comparison, Data, by_work, spread

OURS, OTHERS = "#c44e52", "#8c9bb0"


def draw(comparison: Comparison, data: Data, path: Path) -> None:
    """Bars of medians, with the lowest and the highest turn; a panel for each kind of work."""
    panels = list(by_work(data))
    heights = [len(entries) + 1.5 for _, entries in panels]
    figure = Figure(figsize=(8, 0.28 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)
    for axis, (work, entries) in zip(axes[:, 0], panels, strict=True):
        shown = [spread(comparison.figure(work, one) for one in e["seconds"]) for e in entries]
        typical = [one.typical for one in shown]
        names = [entry["who"] for entry in entries]
        axis.barh(
            names,
            typical,
            xerr=[
                [one.typical - min(one.values) for one in shown],
                [max(one.values) - one.typical for one in shown],
            ],
            color=[OURS if "aiordma" in name else OTHERS for name in names],
            error_kw={"elinewidth": 0.8},
        )
        axis.invert_yaxis()
        axis.set_title(f"{work}, {comparison.unit}", fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
    path.parent.mkdir(exist_ok=True)
    # The same data make the same file.
    with mpl.rc_context({"svg.hashsalt": "aiordma", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
