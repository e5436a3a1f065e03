"""Tests of `aiordma perf` with two processes on the device under test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aiordma._event_loop import completion_reader
from aiordma._event_loop.adaptive_polling import AdaptivePolling
from aiordma.cli.app import app

from ..interrupt import interrupt

pytestmark = pytest.mark.any_device

PAGE = (Path(__file__).parents[2] / "docs" / "perf.md").read_text()

FEW = ["--iterations", "20", "--warm-up", "2"]


def perf(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["perf", *arguments], prog_name="aiordma")


def test_perf_table_lists_each_size(device_name: str) -> None:
    done = perf("--local", "send", "lat", "--device", device_name, "--sizes", "1,4K", *FEW)
    assert done.exit_code == 0, done.output
    assert f"send lat on {device_name} " in done.stdout
    assert re.findall(r"^ *(1 B|4 KiB) +20 .* yes", done.stdout, re.MULTILINE) == ["1 B", "4 KiB"]
    assert "half of a round trip" in " ".join(done.stdout.split())


def names(heading: str) -> set[str]:
    """Return the first-column names of a table in docs/perf.md. `heading` starts its header row."""
    table = PAGE[PAGE.index(heading) :].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def listed(heading: str, row: str) -> set[str]:
    """Return the names in one row of a docs/perf.md table. `row` is the first cell of that row."""
    table = PAGE[PAGE.index(heading) :].partition("\n\n")[0]
    line = next(line for line in table.splitlines() if line.startswith(f"| {row} |"))
    return set(re.findall(r"`(\w+)`", line.partition("|")[2].partition("|")[2]))


def test_perf_json_has_the_documented_fields(device_name: str) -> None:
    done = perf("local", "write", "lat", "--device", device_name, "--json", *FEW)
    assert done.exit_code == 0, done.output
    reported: dict[str, Any] = json.loads(done.stdout)
    assert set(reported) == names("| name | meaning")
    assert set(reported["settings"]) == listed("| name | meaning", "`settings`")
    (row,) = reported["results"]
    assert set(row) == names("| name in a result |")
    times = set(row["latency_us"])
    assert times == set(row["completion_us"])
    assert times == listed("| name in a result |", "`latency_us`, `completion_us`")
    assert (reported["format"], reported["version"]) == ("aiordma-perf", 1)
    assert (reported["device"], reported["operation"], reported["metric"]) == (
        device_name,
        "write",
        "lat",
    )
    assert (reported["verified"], reported["interrupted"], row["mismatch"]) == (True, False, None)
    assert (row["size"], row["operations"], row["latency_us"]["count"]) == (64, 20, 20)
    first, last = row["distribution_us"][0], row["distribution_us"][-1]
    assert first == [pytest.approx(row["latency_us"]["min"]), 1.0]
    assert last == [pytest.approx(row["latency_us"]["max"]), 1 / 20]


@pytest.mark.parametrize("us", [0, 50])
def test_perf_polling_option_applies_to_both_processes(
    device_name: str, monkeypatch: pytest.MonkeyPatch, us: int
) -> None:
    used = []

    def observed(spin_us: int) -> AdaptivePolling:
        used.append(spin_us)
        return AdaptivePolling(spin_us)

    monkeypatch.setattr(completion_reader, "AdaptivePolling", observed)
    device = ["--device", device_name]
    done = perf("local", "send", "lat", *device, "--polling", str(us), "--json", *FEW)
    assert done.exit_code == 0, done.output
    assert set(used) == {us}
    settings = json.loads(done.stdout)["settings"]
    assert (settings["polling_us"], settings["server_polling_us"]) == (us, us)


def test_perf_json_reports_min_median_and_max_throughput(device_name: str) -> None:
    done = perf("local", "read", "bw", "--device", device_name, "--json", "--duration", "0.6")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["results"]
    assert set(row["slices"]) == listed("| name in a result |", "`slices`")
    for figure in (row["slices"]["median_mb_per_s"], row["mb_per_s"]):
        assert row["slices"]["min_mb_per_s"] <= figure <= row["slices"]["max_mb_per_s"]
    assert row["latency_us"] is row["completion_us"] is row["distribution_us"] is None


def test_perf_prints_queue_pair_type_and_cpu_use(device_name: str) -> None:
    done = perf(
        "local", "send", "bw", "--device", device_name, "--cpu", "--sizes", "64", *FEW,
        "--qp", "ud", "--depth", "4", "--inline", "64", "--moderation", "2",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert ", ud queue pairs\n" in done.stdout
    assert re.search(r"^64 B: CPU client \d+ %, server \d+ %$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["local", "send", "lat", "--all", "--sizes", "4"], "--all and --sizes cannot be combined"),
        (["local", "send", "lat", "--depth", "2"], "one operation at a time"),
        (["local", "send", "swim"], "'swim' is not one of 'lat', 'bw', 'rate'"),
        (["local", "jump", "lat"], "'jump' is not one of"),
        (["--local"], "Missing argument"),
        (["local", "send", "bw", "--duration", "0"], "duration must be positive"),
    ],
)
def test_perf_rejects_contradictory_options(arguments: list[str], text: str) -> None:
    done = perf(*arguments)
    assert done.exit_code == 2
    assert text in done.stderr


def test_perf_server_serves_several_clients(device_name: str, host: str) -> None:
    """`aiordma perf server` picks a free port and prints it."""
    words = ["aiordma", "perf", "server", "--port", "0", "--device", device_name, "--host", host]
    command = [sys.executable, "-W", "error", "-m", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        match = re.search(r":(\d+), via ", line)
        assert match, line
        for operation, metric in (("send", "bw"), ("stream", "lat")):
            done = perf(
                "client", host, operation, metric, "--device", device_name, "--port", match[1],
                "--json", *FEW,
            )  # fmt: skip
            assert done.exit_code == 0, done.output
            reported = json.loads(done.stdout)
            assert (reported["operation"], reported["verified"]) == (operation, True)
        assert interrupt(server) == 130


def test_perf_client_fails_without_a_server(device_name: str, host: str) -> None:
    done = perf("client", host, "send", "lat", "--device", device_name, "--port", "9")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: ")


def test_perf_prints_partial_results_when_interrupted(device_name: str) -> None:
    """A separate process interrupts itself at the first progress report."""
    code = (
        "import os, signal, sys\n"
        "from aiordma.cli import main\n"
        "from aiordma.perf.client import PerfClient\n"
        "measure = PerfClient.measure\n"
        "parts = []\n"
        "def once(part):\n"
        "    if part > 0 and not parts: os.kill(os.getpid(), signal.SIGINT)\n"
        "    parts.extend([part] if part > 0 else [])\n"
        "PerfClient.measure = lambda self, size, progress: measure(self, size, once)\n"
        "main()\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-c", code, "perf", "--local", "send", "lat"),
            *("--json", "--device", device_name, "--iterations", "100000000"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 130
    reported = json.loads(done.stdout)
    assert reported["interrupted"] is True
    assert reported["verified"] is True
    assert reported["results"][0]["latency_us"]["count"] > 0
