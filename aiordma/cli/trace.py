"""`aiordma trace`: show the work requests of a program that used the embedded device."""

from __future__ import annotations

from pathlib import Path

import click

import aiordma
from aiordma._private_files import open_private
from aiordma.trace import Outcome
from aiordma.verbs import WCStatus

from .file_path import FilePath
from .options import parse_qp_num
from .trace_chrome import chrome_trace
from .trace_listing import listing, load

STATUSES = ["FAILED", *(it.name for it in WCStatus), Outcome.OPEN.name, Outcome.FORGOTTEN.name]


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True,
    type=FilePath(exists=True, dir_okay=False, path_type=Path))  # fmt: skip
@click.option("--qp", "qps", type=parse_qp_num, metavar="NUMBER", multiple=True,
    help="Show only this queue pair, written as 17 or 0x11; repeatable.")  # fmt: skip
@click.option("--status", "statuses", metavar="STATUS", multiple=True,
    type=click.Choice(STATUSES, case_sensitive=False), help="Show only requests with this status, "
    "such as WR_FLUSH_ERR, or FAILED for any error; repeatable.")  # fmt: skip
@click.option("--chrome", "target", metavar="FILE",
    type=FilePath(dir_okay=False, path_type=Path), help="Write this file in the Chrome "
    "trace event format, for Perfetto, instead of printing.")  # fmt: skip
def trace(
    files: tuple[Path, ...], qps: tuple[int, ...], statuses: tuple[str, ...], target: Path | None
) -> None:
    """List work requests with their status, and events of queue pairs, in order of time.

    Each FILE is the trace of a process that used the embedded device with AIORDMA_TRACE=FILE in its
    environment. All times are relative to the first record in any of the files.
    """
    try:
        traces = load(files, qps, statuses)
        if target is not None:
            write(target, chrome_trace(traces), files)
    except (aiordma.RDMAError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if target is not None:
        click.echo(f"Wrote {target}: open it in https://ui.perfetto.dev or chrome://tracing")
        return
    for line in listing(traces):
        click.echo(line)


def write(target: Path, text: str, files: tuple[Path, ...]) -> None:
    """Write a file that only its owner can read, because traces contain keys and addresses."""
    if any(target.exists() and target.samefile(path) for path in files):
        raise click.BadParameter(
            f"cannot overwrite {target}, which is one of the traces", param_hint="--chrome"
        )
    with open_private(target) as file:
        file.write(text)
