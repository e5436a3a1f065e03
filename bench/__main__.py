"""Run the benchmarks and write bench/RESULTS.md: `python -m bench`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from . import (
    arrays,
    cost,
    imports,
    instructions,
    messages,
    one_sided,
    peers,
    perftest,
    roce,
    styles,
)
from .lanes import TURNS, Comparison, Options
from .machine import facts
from .plots import draw
from .results import Results, markdown, panels, summary
from .ways import DEVICE

HERE = Path(__file__).parent
SAVED = "results.json"
SUMMARY = "summary"
NOTES: dict[str, str] = tomllib.loads((HERE / "notes.toml").read_text())
"""The reasons for missed goals, written by hand."""
COMPARISONS: dict[str, Comparison] = {
    "latency": messages.LATENCY,
    "rate": messages.RATE,
    "styles": styles.COMPARISON,
    "one_sided": one_sided.COMPARISON,
    "connections": messages.CONNECTIONS,
    "arrays": arrays.COMPARISON,
    "encryption": messages.ENCRYPTION,
    "over_tcp": messages.OVER_TCP,
    "perftest": perftest.COMPARISON,
    "imports": imports.COMPARISON,
    "softroce": perftest.SOFTROCE,
    "roce": roce.COMPARISON,
}
IN_ALL = [name for name in COMPARISONS if not COMPARISONS[name].elsewhere]
"""The comparisons run by `all`. The others need root and take longer."""

APART: dict[str, Callable[[Sequence[str]], None]] = {
    "cost": cost.main,
    "peers": peers.main,
    "instructions": instructions.main,
}
"""Measurements with separate arguments and output."""


def measure(names: Sequence[str], options: Options) -> Results:
    results: Results = {"machine": facts(), "turns": options.turns, "data": {}}
    beside = results["machine"]["what else computed"]
    if beside != "nothing":
        print("beside what computes already:", beside, file=sys.stderr)
    if "bench.worker" in beside and options.share == 1:
        sys.exit("a contender of another run goes on: end it, and measure again")
    for name in names:
        print(f"measuring: {COMPARISONS[name].title}", file=sys.stderr, flush=True)
        results["data"][name] = COMPARISONS[name].measure(options)
    return results


def text(results: Results) -> str:
    """Return the contents of RESULTS.md."""
    return markdown(results, COMPARISONS, pictures(results), NOTES)


def pictures(results: Results) -> dict[str, str]:
    """Map each comparison's name to its chart's path in the results folder."""
    names = [SUMMARY, *(name for name in results["data"] if name in COMPARISONS)]
    return {name: f"plots/{name}.svg" for name in names}


def render(results: Results, folder: Path) -> None:
    """Write RESULTS.md and the charts to a folder."""
    data = results["data"]
    for name, path in pictures(results).items():
        whole = name != SUMMARY
        shown = (
            panels(COMPARISONS[name], data[name])
            if whole
            else [p for p, *_ in summary(COMPARISONS, data)]
        )
        draw(shown, folder / path)
    (folder / "RESULTS.md").write_text(text(results))


def save(results: Results, folder: Path) -> None:
    (folder / SAVED).write_text(json.dumps(results, indent=1) + "\n")
    render(results, folder)


def main() -> None:
    os.environ.setdefault("AIORDMA_DEVICE", DEVICE)  # an explicit choice avoids a warning
    if sys.argv[1:] and sys.argv[1] in APART:
        APART[sys.argv[1]](sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "what",
        choices=["all", "render", *COMPARISONS, *APART],
        help="all: everything, into RESULTS.md and results.json; render: the former from the "
        "latter; softroce, roce: what is measured as root, elsewhere, into both; or one "
        "comparison, printed (%(choices)s)",
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="3 turns, of a tenth each")
    parser.add_argument(
        "--folder", type=Path, default=HERE, help="where the results are (%(default)s)"
    )
    chosen = parser.parse_args()
    options = Options(3, 0.1) if chosen.quick else Options(chosen.turns)
    saved = chosen.folder / SAVED
    match chosen.what:
        case "all":
            results = measure(IN_ALL, options)
            before = json.loads(saved.read_text())["data"] if saved.exists() else {}
            results["data"] |= {name: before[name] for name in before if name not in IN_ALL}
            results["cost"] = cost.measure(100, 64 << 20) if chosen.quick else cost.measure()
            save(results, chosen.folder)
        case name if name in COMPARISONS and COMPARISONS[name].elsewhere:
            results = json.loads(saved.read_text())
            results["data"][name] = COMPARISONS[name].measure(options)
            save(results, chosen.folder)
        case "render":
            render(json.loads(saved.read_text()), chosen.folder)
        case name:
            print(markdown(measure([name], options), COMPARISONS, {}, NOTES))


if __name__ == "__main__":
    main()
