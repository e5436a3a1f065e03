"""Tests of plots of measurements: their contents, and errors for invalid files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from click.testing import CliRunner, Result

from aiordma.cli import perf_plot
from aiordma.cli.app import app
from aiordma.cli.perf_plot import PlotError, plot
from aiordma.perf.client import Result as Measured
from aiordma.perf.record import Where, record
from aiordma.perf.settings import Settings
from aiordma.perf.statistics import Summary, tail

WHERE = Where(
    aiordma="0.1.0",
    device="mlx5_0",
    library="system",
    via="cm",
    loop="uvloop",
    client="alpha: 2 x CPU",
    server="beta: 4 x CPU",
    polling_us=50,
    server_polling_us=50,
)


def measured(operation: str, metric: str, *sizes: int, connections: int = 1) -> dict[str, Any]:
    """Return a benchmark record with plausible results."""
    settings = Settings(operation=operation, metric=metric, sizes=sizes, connections=connections)
    results = []
    for size in sizes:
        result = Measured(size, 1000, 0.1 + size / 1e8)
        if metric == "lat":
            times = [1e-5 + size / 1e9 + math.exp(step / 100) * 1e-7 for step in range(1000)]
            result.latency, result.distribution = Summary.of(times), tail(times)
            result.completion = None if operation == "stream" else Summary.of(times).scaled(0.8)
        results.append(result)
    told: dict[str, Any] = json.loads(json.dumps(record(settings, WHERE, results)))
    return told


@pytest.fixture(scope="module", autouse=True)
def first_picture(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make matplotlib open its font files before the leak check, because they stay open."""
    for name in ("first.png", "first.svg"):
        plot([measured("send", "lat", 64)], tmp_path_factory.mktemp("pictures") / name)


def texts(picture: Path) -> list[str]:
    root = ET.parse(picture).getroot()
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(
    ("runs", "found", "missing"),
    [
        (
            [measured("send", "lat", 0, 64, 4096)],
            {
                *("send: latency", "mlx5_0, via cm, uvloop loop", "alpha: 2 x CPU; beta: 4 x CPU"),
                *("latency in µs", "size", "0 B", "64 B", "4 KiB"),
                *("min to p99", "median", "completion, median"),
            },
            set(),
        ),
        (
            [measured("stream", "lat", 64), measured("read", "lat", 64)],
            {
                *("stream, read: latency of 64 B", "stream", "read"),
                *("median", "p90", "p99", "p99.9", "0.1 %"),
            },
            {"p99.99"},  # not measurable with 1,000 operations
        ),
        (
            [measured("write", "bw", 64, 4096, connections=count) for count in (1, 4)],
            {
                *("bandwidth in MB/s (2²⁰ bytes)", "Gb/s"),
                *("write, connections 1", "write, connections 4"),
            },
            set(),
        ),
        (
            [measured("write", "rate", 64, 4096)],
            {"millions of operations per second", "write"},
            {"Gb/s"},
        ),
    ],
    ids=["latencies", "distribution", "bandwidth", "rate"],
)
def test_plot_contains_expected_labels_and_is_reproducible(
    tmp_path: Path, runs: list[dict[str, Any]], found: set[str], missing: set[str]
) -> None:
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    for target in (first, second):
        plot(runs, target)
    said = set(texts(first))
    assert found <= said
    assert not missing & said
    assert first.read_text() == second.read_text()


def test_plot_has_logarithmic_axes_and_the_measured_points() -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    run = measured("read", "bw", 64, 4096)
    figure = Figure()
    perf_plot.draw(figure, [run], "bw")
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    (line,) = axes.get_lines()
    assert np.asarray(line.get_xydata()).tolist() == [
        [row["size"], row["mb_per_s"]] for row in run["results"]
    ]
    assert perf_plot.to_gbit(1) == 8.388608 * 1e-3
    assert perf_plot.to_mb(perf_plot.to_gbit(7)) == pytest.approx(7)


def test_plot_rejects_incompatible_runs_and_unsupported_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [measured("send", "lat", 64), measured("send", "bw", 64)]
    with pytest.raises(PlotError, match="cannot plot bw and lat in one figure"):
        plot(runs, tmp_path / "x.png")
    with pytest.raises(PlotError, match="no run has results"):
        plot([{**runs[0], "results": []}], tmp_path / "x.png")
    with pytest.raises(
        PlotError,
        match=r"unsupported plot format: .*x\.pdf; use a name that ends in \.png or \.svg",
    ):
        plot(runs[:1], tmp_path / "x.pdf")
    monkeypatch.setattr(perf_plot, "find_spec", lambda name: None)
    with pytest.raises(PlotError, match=r"pip install 'aiordma\[plot\]'"):
        plot(runs[:1], tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


# ---- the commands -------------------------------------------------------------------------------


def perf(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["perf", *arguments], prog_name="aiordma")


def test_perf_plot_draws_several_files(tmp_path: Path) -> None:
    for name in ("send", "write"):
        (tmp_path / name).write_text(json.dumps(measured(name, "rate", 64, 128)))
    target = tmp_path / "both.svg"
    done = perf("plot", str(tmp_path / "send"), str(tmp_path / "write"), "--output", str(target))
    assert done.exit_code == 0, done.output
    assert "send, write: rate" in texts(target)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{}", "the record's format is not 'aiordma-perf'"),
        ("[1]", "the record's format is not"),
        ("nonsense", "is not the output of aiordma perf --json: Expecting value"),
        ('{"format": "aiordma-perf", "version": 2}', "record version 2 is not supported"),
        ('{"format": "aiordma-perf", "version": 1}', "one of the files is incomplete"),
    ],
)
def test_perf_plot_rejects_files_that_are_not_perf_records(
    tmp_path: Path, content: str, text: str
) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    done = perf("plot", str(file), "--output", str(tmp_path / "x.svg"))
    assert done.exit_code == 1
    assert text in done.stderr


def test_perf_plot_writes_svg_and_png(tmp_path: Path) -> None:
    targets = [tmp_path / "run.svg", tmp_path / "run.PNG"]
    done = perf(
        *("local", "send", "lat", "--sizes", "1,2", "--device", "embedded0"),
        *("--iterations", "5", "--polling", "0"),
        *(word for target in targets for word in ("--plot", str(target))),
    )
    assert done.exit_code == 0, done.output
    assert "send: latency" in texts(targets[0])
    assert targets[1].read_bytes().startswith(b"\x89PNG")
    assert targets[1].stat().st_size > 10_000


def test_invalid_plot_target_is_rejected_before_the_run(tmp_path: Path) -> None:
    done = perf("local", "send", "lat", "--device", "nonsense0", "--plot", str(tmp_path / "x.gif"))
    assert done.exit_code == 1
    assert "x.gif; use a name that ends in" in done.stderr
