"""Tests of unmodified RDMA software: each row of the matrix on each kind of link."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from .conftest import Found
from .installing import BUILD, environment, install, version
from .results import LINKS
from .rows import Command, Row
from .running import HERE, carried, run
from .table import TABLE

# The timeout in seconds covers the installation and all programs of a row. Row.limit applies to
# each program.
pytestmark = pytest.mark.timeout(3600)


def figure(command: Command, text: str) -> float:
    match = re.search(command.figure, text)
    if match is None:
        pytest.fail(f"no match for {command.figure!r} in:\n{text}", pytrace=False)
    return float(match[1]) * command.times


def commands(row: Row, port: int, count: str) -> dict[str, object]:
    """Return the values of the placeholders in a row's commands."""
    venv = environment(install(row.software))
    places = {"venv": venv, "python": venv / "bin" / "python", "here": HERE}
    return {"port": port, "count": count, **places}


def over_tcp(row: Row, command: Command, port: int) -> float:
    """Measure the row's figure over kernel TCP."""
    found = commands(row, port, row.count[1])
    plain = {name: text.format(**found) for name, text in row.tcp_environment.items()}
    text = run(command, found, plain, BUILD / row.id / "kernel-tcp", row.limit, device=False)
    return figure(command, text)


def verdict(row: Row, link: str, port: int, tmp_path: Path) -> None:
    """Run the row briefly with tracing, and fail the test if it does not work."""
    found = commands(row, port, row.count[0])
    of_row = variables(row, link, found) | {"AIORDMA_TRACE": f"{tmp_path}/%p"}
    text = run(row.command, found, of_row, BUILD / row.id / link, row.limit)
    if row.says and not re.search(row.says, text):
        pytest.fail(f"no match for {row.says!r} in:\n{text}", pytrace=False)
    total = carried(tmp_path)
    if total < row.carries:
        pytest.fail(f"only {total} bytes by RDMA, not {row.carries}:\n{text}", pytrace=False)


def variables(row: Row, link: str, found: Mapping[str, object]) -> dict[str, str]:
    named = {name: text.format(**found) for name, text in row.environment.items()}
    return named | {"AIORDMA_EMBEDDED_LINKS": link}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.id)
def test_unmodified_program_succeeds_unless_listed_as_failing(
    row: Row, link: str, port: int, tmp_path: Path, found: Found, request: pytest.FixtureRequest
) -> None:
    known = row.fails.get(link)
    result = found.row(row, link, version(install(row.software)))
    try:
        verdict(row, link, port, tmp_path)
    except pytest.fail.Exception:
        if known is None:
            raise
        return
    result["works"] = True
    if known is not None:
        pytest.fail(f"it works, so take this out of the table: {known}", pytrace=False)
    options = request.config.option
    if not row.command.figure or options.quick or options.no_figures:
        return
    found_here = commands(row, port, row.count[1])
    of_row = variables(row, link, found_here)
    text = run(row.command, found_here, of_row, BUILD / row.id / f"{link}-figure", row.limit)
    result["figure"] = figure(row.command, text)
    if row.tcp is not None:
        # Rows with the same TCP command share one measurement.
        if row.tcp not in found.over_tcp:
            found.over_tcp[row.tcp] = over_tcp(row, row.tcp, port)
        found.rows[row.id]["kernel_tcp"] = found.over_tcp[row.tcp]
