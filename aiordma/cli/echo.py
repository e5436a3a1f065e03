"""`aiordma echo`: run an echo client and an echo server in two processes, and verify every byte."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import aiordma
from aiordma import verbs
from aiordma.perf.ends import device_names

from .child import ChildError, listening_child
from .file_path import FilePath
from .options import (
    NO_MEMORY,
    FiniteRange,
    Via,
    check_sizes,
    chosen_devices,
    connection_options,
    loop_factory,
    own_address,
    parse_sizes,
)
from .report import Report
from .round_trips import Plan, Result, measure, plans
from .tables import size_text

DEFAULT_SIZES = ",".join(str(4**power) for power in range(13))  # 1 B to 16 MiB

# The command that starts the server, without options.
SERVER = [sys.executable, "-m", "aiordma", "echo-server"]

FILE = FilePath(exists=True, dir_okay=False, path_type=Path)


@click.command()
@connection_options
@click.option("--sizes", type=parse_sizes, metavar="SIZE,...", default=DEFAULT_SIZES,
    help="Message sizes, such as 1,64,4KiB,1M [default: powers of 4 from 1 to 16M].")  # fmt: skip
@click.option("--count", type=click.IntRange(min=1),
    help="Messages per size [default: up to 1000 within a second, but at least 3].")  # fmt: skip
@click.option("--timeout", "time_limit", metavar="SECONDS", default=30.0, show_default=True,
    type=FiniteRange(min=0, min_open=True), help="Maximum duration of a round trip.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.argument("file", required=False, type=FILE)
def echo(
    device: str | None,
    via: Via,
    host: str | None,
    loop: str,
    sizes: list[int],
    count: int | None,
    time_limit: float,
    as_json: bool,
    file: Path | None,
) -> None:
    """Echo messages over RDMA and verify every byte.

    The client and the server run in two processes. By default, the messages have random contents.
    If you pass FILE, the client sends the contents of the file instead: first in pieces of each
    size, and then as a whole. The exit status is 1 if an echo differs from its message, or if an
    operation fails.
    """
    check_sizes(sizes)
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        try:
            first_device, device_names = chosen_devices(device)
            host = host or own_address(first_device)
            size_plans = plans(sizes, None if file is None else file.read_bytes())
            report = runner.run(
                run_client_and_server(
                    first_device, device_names, via, host, loop, size_plans, count, time_limit
                )
            )
        except MemoryError as error:
            raise click.ClickException(NO_MEMORY) from error
        except (aiordma.RDMAError, ChildError, OSError) as error:
            raise click.ClickException(str(error) or type(error).__name__) from error
    if as_json:
        click.echo(report.to_json())
    else:
        report.show(Console())
    if not report.verified:
        raise SystemExit(1)


async def run_client_and_server(
    device: verbs.Device,
    names: str,
    via: Via,
    host: str,
    loop: str,
    size_plans: list[Plan],
    count: int | None,
    time_limit: float,
) -> Report:
    options = ["--device", names, "--via", via, "--host", host, "--loop", loop]
    async with listening_child([*SERVER, *options]) as server:
        connecting = aiordma.connect(server.host, server.port, device=names, via=via)
        async with await server.guard(connecting) as conn:
            return Report(
                device=await device_names(conn),
                library=device.library.name,
                via=via,
                loop=loop,
                local_address=conn.local_address,
                peer_address=conn.peer_address,
                results=await server.guard(echo_all(conn, size_plans, count, time_limit)),
            )


async def echo_all(
    conn: aiordma.Connection, size_plans: list[Plan], count: int | None, time_limit: float
) -> list[Result]:
    results = []
    errors = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as progress:
        bar = progress.add_task("", total=len(size_plans))
        for plan in size_plans:
            progress.update(bar, description=f"echoing {size_text(plan.size)}")
            try:
                results.append(await measure(conn, plan, count, time_limit))
            except TimeoutError as error:
                raise TimeoutError(
                    f"timed out after {time_limit:g} s waiting for the echo of a {plan.size}-byte "
                    "message"
                ) from error
            progress.advance(bar)
    return results
