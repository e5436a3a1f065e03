"""`aiordma perf`: measure operation latency, bandwidth and rate between two processes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import aiordma
from aiordma import Config, LoopConfig, verbs
from aiordma.config import DEFAULT
from aiordma.errors import host_port
from aiordma.perf.client import PerfClient, RefusedError, Result
from aiordma.perf.gpu import GPUError
from aiordma.perf.machine import machine
from aiordma.perf.record import Where, check_record, record
from aiordma.perf.server import Limits, PerfServer
from aiordma.perf.settings import (
    METRICS,
    OPERATIONS,
    QP_TYPES,
    Settings,
    default_depth,
    default_sizes,
)

from .app import Group
from .child import ChildError, listening_child
from .echo_server import end_of_input
from .file_path import FilePath
from .options import (
    NO_MEMORY,
    SizeType,
    Via,
    check_sizes,
    chosen_devices,
    connection_options,
    loop_factory,
    own_address,
    parse_sizes,
    plain_host,
    transport_options,
)
from .perf_plot import PlotError, check_target, plot
from .perf_table import show
from .tables import size_text

DEFAULT_PORT = 7472

# The command that starts the server, without options.
SERVER = [sys.executable, "-m", "aiordma", "perf", "server", "--child"]

# The exit status that shells report for a program interrupted by Ctrl-C.
INTERRUPTED = 130

# Errors that are reported without a traceback.
FAILURES = (aiordma.RDMAError, ChildError, EOFError, GPUError, OSError, PlotError, RefusedError)

Record = dict[str, Any]

Command = TypeVar("Command", bound=Callable[..., Any])


class PerfGroup(Group):
    """A command group that treats `perf --local ...` as `perf local ...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["--local"]:
            args = ["local", *args[1:]]
        return super().parse_args(ctx, args)


@click.group(cls=PerfGroup)
@click.option("--local", is_flag=True, help="Same as the command `local`.")
def perf(local: bool) -> None:
    """Measure latency, bandwidth or rate between two processes.

    To run both processes on this machine, use `aiordma perf --local send lat`, for example. To
    measure between two machines, use `server` on one of them and `client` on the other.
    """


POLLING = click.option("--polling", type=click.IntRange(0, 1_000_000), metavar="US",
    default=round(LoopConfig().polling * 1e6), show_default=True,
    help="Time in us that a process polls before it sleeps; 0 turns polling off.")  # fmt: skip


@dataclass(frozen=True)
class MeasurementOptions:
    """The options that the `local` and `client` commands share."""

    settings: Settings
    device: str | None
    via: Via
    loop: str
    polling: int
    cpu: bool
    as_json: bool
    targets: tuple[Path, ...]

    @classmethod
    def of(cls, **given: Any) -> MeasurementOptions:
        """Create the options from the keyword arguments click passes to a command."""
        # The first field, `settings`, combines all options that have no field of their own.
        own_options = {field.name: given.pop(field.name) for field in fields(cls)[1:]}
        return cls(settings_of(**given), **own_options)


def measurement_options(command: Command) -> Command:
    """Add the OPERATION and METRIC arguments and the measurement options to a command."""
    for option in (
        POLLING,
        click.option("--plot", "targets", metavar="FILE", multiple=True,
            type=FilePath(dir_okay=False, path_type=Path),
            help="Plot into this .png or .svg file; repeatable."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table."),
        click.option("--verify-all", is_flag=True,
            help="Verify the contents of every message, not only of the first and last."),
        click.option("--gpu", is_flag=True,
            help="Use GPU memory on the client's side (write and read only)."),
        click.option("--cpu", is_flag=True, help="Show the CPU usage of both processes."),
        click.option("--imm", is_flag=True, help="Use immediate data (send and write only)."),
        click.option("--bidirectional", is_flag=True,
            help="Send or write in both directions: the server responds to each operation with one "
            "of the same kind (bw and rate only)."),
        click.option("--qp", type=click.Choice(QP_TYPES),
            help="Use plain queue pairs of this type instead of aiordma's connections."),
        click.option("--inline", type=int, default=0,
            help="With --qp: maximum number of bytes to send inline."),
        click.option("--moderation", type=int, default=1,
            help="With --qp: number of operations per completion [default: 1]."),
        click.option("--batch", type=int, default=1,
            help="Number of operations per doorbell [default: 1]."),
        click.option("--connections", type=int, default=1,
            help="Number of connections [default: 1]."),
        click.option("--depth", type=int,
            help="Number of outstanding operations per connection [default: 64; 1 for lat and "
            "stream]."),
        click.option("--warm-up", type=int,
            help="Number of operations before the timed ones [default: up to 200, fewer for large "
            "sizes]."),
        click.option("--duration", type=float, metavar="SECONDS", default=1.0,
            help="Seconds per size [default: 1]."),
        click.option("--iterations", type=int,
            help="Number of operations per size; replaces --duration."),
        click.option("--all", "every", is_flag=True,
            help="Measure all powers of two from 2 B to 8 MiB."),
        click.option("--sizes", type=parse_sizes, metavar="SIZE,...",
            help="Sizes in bytes, such as 64,4KiB,1M [default: 64; 64K for bw; 8 for atomic]."),
        click.argument("metric", type=click.Choice(METRICS)),
        click.argument("operation", type=click.Choice(OPERATIONS)),
    ):  # fmt: skip
        command = option(command)
    return command


def settings_of(
    operation: str,
    metric: str,
    sizes: list[int] | None,
    every: bool,
    depth: int | None,
    qp: str | None,
    **rest: Any,
) -> Settings:
    """Return the settings for a command's options, with defaults for the omitted ones."""
    if every and sizes:
        raise click.UsageError("--all and --sizes cannot be combined")
    chosen = tuple(sizes or default_sizes(operation, metric, qp or "", every))
    try:
        return Settings(
            operation=operation,
            metric=metric,
            sizes=chosen,
            depth=default_depth(operation, metric) if depth is None else depth,
            qp=qp or "",
            **rest,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


RECEIVES = click.option("--receives", type=click.IntRange(1, 0xFFFF),
    default=DEFAULT.data_receives, show_default=True,
    help="Maximum number of messages in flight to the server per connection.")  # fmt: skip


@perf.command()
@RECEIVES
@connection_options
@measurement_options
def local(host: str | None, receives: int, **given: Any) -> None:
    """Measure an operation between two processes on this machine.

    OPERATION is send, write, read, atomic or stream. METRIC is lat, bw or rate.
    """
    asked = MeasurementOptions.of(**given)
    check_sizes(asked.settings.sizes)

    async def run() -> Record:
        first_device, device_names = chosen_devices(asked.device)
        server_host = host or own_address(first_device)
        options = ["--device", device_names, "--via", asked.via]
        options += ["--host", server_host, "--loop", asked.loop]
        options += ["--polling", str(asked.polling), "--receives", str(receives)]
        async with listening_child([*SERVER, *options]) as server:
            return await server.guard(
                measure(asked, first_device, device_names, server.host, server.port)
            )

    finish(run, asked)


def finish(run: Callable[[], Coroutine[Any, Any, Record]], asked: MeasurementOptions) -> None:
    """Run a measurement, and then print and plot its results.

    The process exits with status 1 if verification failed, or with status 130 after Ctrl-C.
    """
    with asyncio.Runner(loop_factory=loop_factory(asked.loop)) as runner:
        try:
            for target in asked.targets:
                check_target(target)
            result = runner.run(run())
        except MemoryError as error:
            raise click.ClickException(NO_MEMORY) from error
        except FAILURES as error:
            raise click.ClickException(str(error) or type(error).__name__) from error
    if asked.as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        show(Console(width=None if sys.stdout.isatty() else 132), result, asked.cpu)
    for target in asked.targets:
        draw([result], target)
    if not result["verified"]:
        raise SystemExit(1)
    if result["interrupted"]:
        raise SystemExit(INTERRUPTED)


def draw(records: list[Record], target: Path) -> None:
    try:
        plot(records, target)
    except (PlotError, OSError) as error:
        raise click.ClickException(str(error)) from error


async def measure(
    asked: MeasurementOptions, device: verbs.Device, names: str, host: str, port: int
) -> Record:
    """Measure each size against a server, and return the results for printing and plotting."""
    settings = asked.settings
    results: list[Result] = []
    config = Config(polling=asked.polling / 1e6)
    async with PerfClient.connect(
        settings, host, port, device=names, via=asked.via, config=config
    ) as client:
        with stopped_by_ctrl_c(client), progress_bar(settings) as progress:
            for number, size in enumerate(settings.sizes):
                result = await client.measure(size, progress(number))
                if result is not None:
                    results.append(result)
                if client.stopped:
                    break
    where = Where(
        aiordma=aiordma.__version__,
        device=client.device,
        library=device.library.name,
        via=asked.via,
        loop=asked.loop,
        client=machine(),
        server=client.server.machine,
        polling_us=asked.polling,
        server_polling_us=client.server.polling_us,
    )
    return record(settings, where, results)


@contextmanager
def stopped_by_ctrl_c(client: PerfClient) -> Iterator[None]:
    """End the measurement cleanly on the first Ctrl-C, and immediately on the second."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        client.stop()

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def progress_bar(settings: Settings) -> Iterator[Callable[[int], Callable[[float], None]]]:
    """Show a progress bar if the output is a terminal.

    Yields:
        A function that takes an index into ``settings.sizes`` and returns a progress callback.
    """
    errors = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        auto_refresh=False,  # a refresh thread would disturb the measurement
        disable=not errors.is_terminal,
    ) as progress:
        bar = progress.add_task("", total=len(settings.sizes))

        def updater_for(number: int) -> Callable[[float], None]:
            text = f"{settings.operation} {settings.metric}, {size_text(settings.sizes[number])}"

            def update(part: float) -> None:
                progress.update(bar, description=text, completed=number + part, refresh=True)

            return update

        yield updater_for


@perf.command()
@click.argument("server_host", metavar="HOST", callback=plain_host)
@click.option("--port", type=click.IntRange(1, 0xFFFF), default=DEFAULT_PORT, show_default=True)
@transport_options
@measurement_options
def client(server_host: str, port: int, **given: Any) -> None:
    """Measure against `aiordma perf server` on HOST.

    OPERATION is send, write, read, atomic or stream. METRIC is lat, bw or rate.
    """
    asked = MeasurementOptions.of(**given)
    check_sizes(asked.settings.sizes)

    async def run() -> Record:
        return await measure(asked, *chosen_devices(asked.device), server_host, port)

    finish(run, asked)


@perf.command("plot")
@click.argument("files", metavar="JSON...", nargs=-1, required=True,
    type=FilePath(exists=True, dir_okay=False, path_type=Path))  # fmt: skip
@click.option("--output", "target", metavar="FILE", required=True,
    type=FilePath(dir_okay=False, path_type=Path),
    help="The .png or .svg file to write.")  # fmt: skip
def plot_files(files: tuple[Path, ...], target: Path) -> None:
    """Plot several runs that were saved with --json in one figure."""
    records = []
    for file in files:
        try:
            records.append(check_record(json.loads(file.read_text())))
        except ValueError as error:
            raise click.ClickException(
                f"{file} is not the output of aiordma perf --json: {error}"
            ) from error
    try:
        draw(records, target)
    except (KeyError, TypeError, ValueError) as error:
        raise click.ClickException(
            f"cannot plot: one of the files is incomplete ({error!r}); use the unmodified output "
            "of aiordma perf --json"
        ) from error


@perf.command()
@click.option("--port", type=click.IntRange(0, 0xFFFF), default=DEFAULT_PORT, show_default=True,
    help="Port to listen on; 0 selects a free one.")  # fmt: skip
@click.option("--max-size", type=SizeType(), default="1G", show_default=True,
    help="Maximum size of an operation in bytes, such as 64M.")  # fmt: skip
@click.option("--max-memory", type=SizeType(), default="2G", show_default=True,
    help="Maximum total size of the operations of all connections.")  # fmt: skip
@click.option("--max-connections", type=click.IntRange(1, 0xFFFF), default=1024, show_default=True)
@click.option("--child", is_flag=True, hidden=True)
@RECEIVES
@POLLING
@connection_options
def server(
    port: int,
    max_size: int,
    max_memory: int,
    max_connections: int,
    child: bool,
    receives: int,
    polling: int,
    device: str | None,
    via: Via,
    host: str | None,
    loop: str,
) -> None:
    """Serve measurements, one client at a time, until Ctrl-C is pressed.

    Without --host, the server listens on all addresses. It does not authenticate clients, so any
    host that can reach the port can use it.
    """
    limits = Limits(size=max_size, memory=max_memory, connections=max_connections)
    config = Config(data_receives=receives, polling=polling / 1e6)

    async def run() -> None:
        starting = PerfServer.start(
            host or "", 0 if child else port, device=device, via=via, config=config, limits=limits
        )
        async with await starting as server:
            if child:
                print(server.listening.host, server.listening.port, flush=True)
                await end_of_input()
            else:
                at = server.listening
                where = f"{at.device}, {host_port((at.host, at.port))}, via {via}"
                click.echo(f"serving on {where}")
                await server.forever()

    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        try:
            runner.run(run())
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
        except (aiordma.RDMAError, OSError) as error:
            raise click.ClickException(f"perf server: {error}") from error
