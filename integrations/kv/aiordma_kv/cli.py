"""The command `aiordma-kv`."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from pathlib import Path

import click
import uvloop

import aiordma
from aiordma.errors import host_port

from .arena import ALIGNMENT
from .common import MAX_SIZE, disable_polling, parse_address, read_key
from .server import Store, allocate, start_server

GRACE = 5.0
"""The time for calls in progress to finish when the server is shut down, in seconds."""

REPORT_INTERVAL = 10.0
"""Minimum time between two warnings about rejected clients, so that they cannot fill the log."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Return a number of bytes given as 512M or 8GiB, for example. Units are powers of 1024."""
    match = re.fullmatch(r"([0-9]{1,18})([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise click.BadParameter(
            f"invalid size {text!r}: expected a whole number such as 512M or 8G"
        )
    size = int(match[1]) * _UNITS[match[2].upper()]
    if not 2 * ALIGNMENT <= size <= MAX_SIZE:
        raise click.BadParameter(f"invalid size {text!r}: expected 8K to {MAX_SIZE >> 40}T")
    return size


@click.group()
@click.version_option(package_name="aiordma-kv")
def main() -> None:
    """Store KV-cache blocks in memory that clients read and write over RDMA."""


@main.command()
@click.argument("host")
@click.argument("port", type=click.IntRange(0, 65535))
@click.option("--size", type=parse_size, metavar="SIZE", default="1G", show_default=True,
    help="Memory for blocks.")  # fmt: skip
@click.option("--auth-file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the pre-shared key that clients need.")  # fmt: skip
@click.option("--encrypt", is_flag=True, help="Encrypt the data, which is slower.")
@click.option("--device", metavar="NAME", envvar="AIORDMA_DEVICE", show_envvar=True,
    help="RDMA device [default: one with an active port, or the embedded device].")  # fmt: skip
@click.option("--metrics", metavar="HOST:PORT",
    help="Address to serve metrics to Prometheus.")  # fmt: skip
def serve(
    host: str,
    port: int,
    size: int,
    auth_file: Path | None,
    encrypt: bool,
    device: str | None,
    metrics: str | None,
) -> None:
    """Serve a block store on HOST and PORT until SIGTERM or SIGINT.

    Port 0 selects a free port. When the server is ready, it prints its device and address.
    """
    if encrypt and auth_file is None:
        raise click.UsageError("--encrypt requires --auth-file")
    if metrics is not None:
        try:
            from .metrics import serve_metrics  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise click.UsageError(
                "--metrics requires prometheus_client: pip install 'aiordma-kv[prometheus]'"
            ) from error

    next_report = 0.0

    def report_rejection(change: aiordma.ConnectionChange) -> None:
        nonlocal next_report
        now = time.monotonic()
        if isinstance(change.error, aiordma.AuthenticationError) and now >= next_report:
            next_report = now + REPORT_INTERVAL
            click.echo(f"rejected {change.peer}: {change.error}", err=True)

    async def run() -> None:
        disable_polling()
        auth = read_key(auth_file)
        metrics_address = None if metrics is None else parse_address(metrics, min_port=0)
        # Report an invalid address or device now, because allocating memory can take minutes.
        await (await aiordma.listen(host, port, auth=auth, encrypt=encrypt, device=device)).close()
        try:
            memory = allocate(size)
        except OSError as error:
            raise click.ClickException(f"cannot allocate memory for --size: {error}") from error
        store = Store(memory, encrypt=encrypt)
        terminated = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, terminated.set)
        aiordma.add_connection_hook(report_rejection)
        server = await start_server(store, host, port, auth=auth, device=device)
        try:
            size_mib = store.arena.size >> 20
            address = host_port((host, server.port))
            lines = [f"serving {size_mib} MiB on {server.device} at {address}"]
            if metrics_address is not None:
                lines.append(f"serving metrics at {serve_metrics(store, *metrics_address)}")
            click.echo("\n".join(lines))
            await terminated.wait()
        finally:
            await server.close(GRACE)
            store.close()

    try:
        uvloop.run(run())
    except (aiordma.RDMAError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
