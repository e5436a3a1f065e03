"""`aiordma trace`: shows the work requests of a program on the embedded device."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import aiordma
from aiordma.trace import Request

from .trace_chrome import chrome_trace
from .trace_selection import Selection, TimeType, Traced, load
from .trace_tables import show_runs, show_summary, show_timeline, summary, timeline


@click.command()
@click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option("--qp", "qps", type=int, multiple=True, help="Only this queue pair; repeatable.")
@click.option(
    "--status",
    "statuses",
    multiple=True,
    help="Only requests with this status, as in WR_FLUSH_ERR, or FAILED for all but success; "
    "repeatable.",
)
@click.option("--from", "start", type=TimeType(), help="Only from this time on, as in 1.5ms or 2s.")
@click.option("--to", "stop", type=TimeType(), help="Only up to this time.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="Rows of the timeline; 0: all.",
)
@click.option(
    "--chrome",
    "target",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the timeline into this file, in the Chrome trace event format (for Perfetto), "
    "instead of printing it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every request as JSON.")
def trace(
    files: tuple[Path, ...],
    qps: tuple[int, ...],
    statuses: tuple[str, ...],
    start: int | None,
    stop: int | None,
    limit: int,
    target: Path | None,
    as_json: bool,
) -> None:
    """Show work requests, their completions and their status.

    Each FILE was written by a process that ran with AIORDMA_TRACE=FILE on the embedded device.
    The traces of several processes share one time axis, which begins with the first record.
    """
    try:
        traces = load(list(files))
    except (aiordma.RDMAError, OSError) as error:
        raise click.ClickException(str(error)) from error
    selection = Selection(
        frozenset(qps), frozenset(status.upper() for status in statuses), start, stop
    )
    if target is not None:
        try:
            if any(target.exists() and target.samefile(path) for path in files):
                raise click.BadParameter(
                    f"{target} is one of the traces; name another file", param_hint="--chrome"
                )
            # Readable for its owner only, as a trace is: it contains keys and addresses.
            with open(target, "w", opener=for_the_owner) as file:
                file.write(chrome_trace(traces, selection))
        except OSError as error:
            raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(to_json(traces, selection))
        return
    # Output that is not a terminal has no width, and may be a pager.
    console = Console(width=None if sys.stdout.isatty() else 132)
    show_runs(console, traces)
    show_summary(console, summary(traces, selection))
    if target is None:
        show_timeline(console, timeline(traces, selection), limit)
    else:
        console.print(
            f"The timeline is in {target}, for https://ui.perfetto.dev or chrome://tracing",
            highlight=False,
            soft_wrap=True,
        )


def for_the_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def to_json(traces: list[Traced], selection: Selection) -> str:
    """Times in nanoseconds of the common axis."""
    return json.dumps(
        [
            describe(traced, request)
            for traced in traces
            for request in traced.requests
            if selection.request(traced, request)
        ],
        indent=1,
    )


def describe(traced: Traced, request: Request) -> dict[str, Any]:
    return {
        "pid": traced.run.header.pid,
        "qp_num": request.qp_num,
        "operation": request.operation,
        "wr_id": request.wr_id,
        "bytes": request.bytes,
        "posted_ns": None if request.posted is None else traced.at(request.posted.t),
        "ended_ns": None if request.ended is None else traced.at(request.ended),
        "took_ns": request.took,
        "outcome": request.outcome.value,
        "status": request.status,
    }
