"""Plots of `aiordma perf` runs: a metric by size, or the latency distribution for one size.

Only this module uses matplotlib, which is in the extra `plot`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tables import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
else:
    # The annotations must be resolvable even if matplotlib is not installed.
    Axes = Axis = Figure = Any

Record = dict[str, Any]

FORMATS = (".png", ".svg")

# The colour-blind-safe palette of Okabe and Ito.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
MARKERS = "osD^vPX"
GRID, INK, FAINT = "#e3e6ea", "#22272e", "#66707c"

WIDTH, HEIGHT, DPI = 8.6, 5.4, 160

# The x coordinate at which empty messages are drawn. A logarithmic axis has no zero.
EMPTY_MESSAGE_X = 0.5

TITLES = {"lat": "latency", "bw": "bandwidth", "rate": "rate"}
LABELS = {
    "lat": "latency in µs",
    "bw": "bandwidth in MB/s (2²⁰ bytes)",
    "rate": "millions of operations per second",
}
METRIC_FIELDS = {"bw": "mb_per_s", "rate": "mmsg_per_s"}
QUANTILES = {"median": 0.5, "p90": 0.1, "p99": 0.01, "p99.9": 0.001, "p99.99": 0.0001}


class PlotError(Exception):
    """Raised if the data cannot be plotted or matplotlib is not installed."""


def check_target(target: Path) -> None:
    """Raise PlotError if `target` has an unsupported suffix, or if matplotlib is not installed."""
    if target.suffix.lower() not in FORMATS:
        raise PlotError(
            f"unsupported plot format: {target}; use a name that ends in {' or '.join(FORMATS)}"
        )
    if find_spec("matplotlib") is None:
        raise PlotError(
            "plotting requires matplotlib, which is not installed; "
            "run \"pip install 'aiordma[plot]'\""
        )


def plot(records: Sequence[Record], target: Path) -> None:
    """Plot runs of the same metric to a PNG or SVG file.

    Raises:
        PlotError: If the runs cannot be plotted together, or if matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    check_target(target)
    metrics = {record["metric"] for record in records}
    if len(metrics) != 1:
        raise PlotError(
            f"cannot plot {' and '.join(sorted(metrics))} in one figure; "
            "plot each metric separately"
        )
    if not any(record["results"] for record in records):
        raise PlotError("cannot plot: no run has results")
    from matplotlib import rc_context  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    # In SVG files, keep text as text, and make ids reproducible with a fixed salt.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "aiordma", "font.size": 10}):
        figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
        draw(figure, records, metrics.pop())
        # Omit the date, so that the same data produces the same file.
        figure.savefig(target, metadata={"Date": None} if target.suffix.lower() == ".svg" else None)


def draw(figure: Figure, records: Sequence[Record], metric: str) -> None:
    axes = figure.add_subplot()
    sizes = sorted({row["size"] for record in records for row in record["results"]})
    if metric == "lat" and len(sizes) == 1:
        distributions(axes, records)
        what = f"latency of {size_text(sizes[0])}"
    else:
        by_size(axes, records, metric, sizes)
        what = TITLES[metric]
    operations = ", ".join(each_once(record["operation"] for record in records))
    axes.set_title(
        f"{operations}: {what}", loc="left", pad=36, color=INK, fontsize=14, fontweight="bold"
    )
    axes.annotate(
        subtitle(records),
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 8),
        textcoords="offset points",
        color=FAINT,
        fontsize=8,
        linespacing=1.4,
    )
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.8)
    axes.tick_params(which="both", color=GRID, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)


def each_once(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))


def subtitle(records: Sequence[Record]) -> str:
    devices = each_once(
        f"{record['device']}, via {record['via']}, {record['loop']} loop" for record in records
    )
    machines = each_once(record[end] for record in records for end in ("client", "server"))
    return f"{'; '.join(devices)}\n{'; '.join(machines)}"


def names(records: Sequence[Record]) -> list[str]:
    """Return a label for each run.

    A label contains the operation and any settings that differ between the runs.
    """
    parts = [
        {
            "operation": record["operation"],
            "device": record["device"],
            "via": f"via {record['via']}",
            "loop": record["loop"],
            **{
                name: f"{name} {record['settings'][name]}"
                for name in ("connections", "depth", "batch", "inline", "moderation")
            },
            "qp": record["settings"]["qp"],
            "bidirectional": "bidirectional" if record["settings"]["bidirectional"] else "",
            "imm": "immediate data" if record["settings"]["imm"] else "",
            "polling": polling_text(record["settings"]["polling_us"]),
        }
        for record in records
    ]
    differing = [
        name for name in parts[0] if name == "operation" or len({part[name] for part in parts}) > 1
    ]
    return [", ".join(part[name] for name in differing if part[name]) for part in parts]


def polling_text(us: float) -> str:
    return f"polling {us:g} µs" if us else "no polling"


# ---- by size ------------------------------------------------------------------------------------


def by_size(axes: Axes, records: Sequence[Record], metric: str, sizes: list[int]) -> None:
    """Plot the metric of each run over the message size."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    positions = [size or EMPTY_MESSAGE_X for size in sizes]
    step = -(-len(positions) // 12)
    axes.set_xticks(positions[::step], [size_text(size) for size in sizes[::step]], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("size", color=INK)
    axes.set_ylabel(LABELS[metric], color=INK)
    plain_numbers(axes.yaxis)
    for record, name, colour, marker in zip(
        records, names(records), cycle(COLOURS), cycle(MARKERS), strict=False
    ):
        if metric == "lat":
            latencies(axes, record, f"{name}: " if len(records) > 1 else "", colour, marker)
        else:
            rows = record["results"]
            values = [row[METRIC_FIELDS[metric]] for row in rows]
            positions = [row["size"] or EMPTY_MESSAGE_X for row in rows]
            axes.plot(positions, values, color=colour, marker=marker, markersize=5, label=name)
    if metric == "bw":
        both_ways: Any = (to_gbit, to_mb)  # matplotlib's annotations are too narrow
        right = axes.secondary_yaxis("right", functions=both_ways)
        plain_numbers(right.yaxis)
        right.set_ylabel("Gb/s", color=INK)
        right.tick_params(which="both", color=GRID, labelcolor=INK)
        right.spines["right"].set_color(FAINT)


def to_gbit(mb: float) -> float:
    """Convert MiB/s to Gbit/s. Accepts a number or an array."""
    return mb * ((1 << 20) * 8 / 1e9)


def to_mb(gbit: float) -> float:
    return gbit / ((1 << 20) * 8 / 1e9)


def latencies(axes: Axes, record: Record, label_prefix: str, colour: str, marker: str) -> None:
    """Plot a run's median latency by size, and shade the range from the minimum to p99."""
    rows = [row for row in record["results"] if row["latency_us"]]
    sizes = [row["size"] or EMPTY_MESSAGE_X for row in rows]

    def column(which: str, key: str) -> list[float]:
        return [row[which][key] for row in rows]

    axes.fill_between(
        sizes,
        column("latency_us", "min"),
        column("latency_us", "p99"),
        color=colour,
        alpha=0.14,
        linewidth=0,
        label=f"{label_prefix}min to p99",
    )
    line: dict[str, Any] = {"color": colour, "marker": marker}
    median = column("latency_us", "median")
    axes.plot(sizes, median, **line, markersize=5, label=f"{label_prefix}median")
    if record["operation"] in ("send", "write") and all(row["completion_us"] for row in rows):
        line |= {"linestyle": (0, (4, 2)), "linewidth": 1.2, "markerfacecolor": "white"}
        median = column("completion_us", "median")
        axes.plot(sizes, median, **line, markersize=4, label=f"{label_prefix}completion, median")


def plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers, such as 1,000, instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


# ---- a single size ------------------------------------------------------------------------------


def distributions(axes: Axes, records: Sequence[Record]) -> None:
    """Plot latency distributions: the fraction of operations that took at least a given time.

    The fraction axis is logarithmic, so that rare outliers are visible as well.
    """
    from matplotlib.ticker import FuncFormatter  # noqa: PLC0415

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(LABELS["lat"], color=INK)
    axes.set_ylabel("share of operations that took at least this long", color=INK)
    plain_numbers(axes.xaxis)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda part, _: f"{100 * part:,.10g} %"))
    least = 1.0
    for record, name, colour in zip(records, names(records), cycle(COLOURS), strict=False):
        for row in record["results"]:
            times, parts = zip(*row["distribution_us"], strict=True)
            least = min(least, parts[-1])
            axes.step(times, parts, where="pre", color=colour, linewidth=1.8, label=name)
    for name, part in QUANTILES.items():
        if part >= least:
            axes.axhline(part, color=FAINT, linewidth=0.7, linestyle=(0, (1, 3)))
            axes.annotate(
                name,
                (0.995, part),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=8,
                color=FAINT,
            )
