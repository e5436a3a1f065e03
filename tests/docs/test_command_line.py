"""Tests of the commands of docs/command-line.md.

softdev/tests/programs tests those for `aiordma run`.
"""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from aiordma.cli.app import app
from aiordma.cli.doctor_checks import CHECKS

from .command_line import PAGE, run_section

TEXT = PAGE.read_text()


def test_devinfo_section_prints_devices(tmp_path: Path) -> None:
    printed = run_section("devinfo", tmp_path)
    assert printed.count("embedded0 (embedded library)") >= 3
    assert '"name": "embedded0"' in printed


def test_doctor_section_prints_findings(tmp_path: Path) -> None:
    printed = run_section("doctor", tmp_path)
    assert "embedded0 works" in printed
    assert printed.endswith(("no card\n", "RDMA devices of this machine can be used.\n"))


def test_echo_section_prints_a_row_for_each_size(tmp_path: Path) -> None:
    printed = run_section("echo", tmp_path)
    assert re.findall(r"^ *(\S+ \w+) +20 ", printed, re.MULTILINE) == ["64 B", "1 MiB"]


def test_perf_section_prints_results(tmp_path: Path) -> None:
    printed = run_section("perf", tmp_path)
    assert "send lat on embedded0" in printed
    assert re.findall(r"^ *(64 B|4 KiB) .* yes", printed, re.MULTILINE) == ["64 B", "64 B", "4 KiB"]


def test_top_section_reports_that_no_process_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("AIORDMA_MONITOR", raising=False)
    assert run_section("top", tmp_path).splitlines().count("no process is shown") == 2


def test_trace_section_prints_traces(tmp_path: Path) -> None:
    printed = run_section("trace", tmp_path)
    assert len(re.findall(r"^process \d+ on ", printed, re.MULTILINE)) == 4
    assert re.search(r"^ +\S+ +\d+ +\d+  SEND wr_id=\S+ bytes=\d+ ", printed, re.MULTILINE)
    assert re.search(r"^Wrote /\S+/run\.json: open it in https://ui", printed, re.MULTILINE)


def test_every_visible_command_has_a_section() -> None:
    shown = [
        name for name in app.list_commands(click.Context(app)) if not app.commands[name].hidden
    ]
    assert sorted(re.findall(r"^## (\w+)$", TEXT, re.MULTILINE)) == sorted(shown)
    assert re.findall(r"^\| `aiordma (\w+)` \|", TEXT, re.MULTILINE) == shown


def test_doctor_section_lists_every_check() -> None:
    named = re.findall(r"^\| (\w+) \| ", TEXT[TEXT.index("## doctor") :], re.MULTILINE)
    checks = [check.__name__.replace("gids", "GIDs") for check in CHECKS]
    assert [name for name in named if name in checks] == checks
