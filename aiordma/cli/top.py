"""`aiordma top`: what processes that use aiordma do now."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import cast

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from aiordma.monitoring import ConnectionState, Snapshot
from aiordma.monitoring_socket import VARIABLE, ask, directory

# Seconds for which a process may leave a question unanswered.
TIMEOUT = 5.0

NONE = (
    f"no process shows its state here ({{}}): start it with {VARIABLE}=1 in its environment, as "
    "this user"
)

History = dict[tuple[int, int], tuple[float, int, int]]
"""By process and queue pair (0: the process): when, bytes sent and received."""


@click.command()
@click.argument("pid", type=int, required=False)
@click.option("--once", is_flag=True, help="Print once and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print the snapshots once, as JSON.")
@click.option("--interval", default=2.0, type=click.FloatRange(0.1, 3600), show_default=True,
    help="Seconds between updates.")  # fmt: skip
@click.option("--limit", default=30, type=click.IntRange(0), show_default=True,
    help="Connections that are shown, the busiest first; 0: all.")  # fmt: skip
def top(pid: int | None, once: bool, as_json: bool, interval: float, limit: int) -> None:
    """Show what the processes of this user that use aiordma do: traffic, connections, memory.

    PID selects one process. A process is shown if AIORDMA_MONITOR=1 was in its environment when it
    imported aiordma. Ctrl-C ends the table.

    The exit status is 1 when there is no such process.
    """
    try:
        where = directory(os.environ.get(VARIABLE) or "1")
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    snapshots = collect(where, pid)
    if not snapshots:
        raise click.ClickException(NONE.format(where))
    console = Console()
    if as_json:
        click.echo(json.dumps(snapshots, indent=2))
    elif once:
        console.print(tables(snapshots, {}, limit))
    else:
        watch(console, where, pid, interval, limit, snapshots)


def watch(
    console: Console,
    where: Path,
    pid: int | None,
    interval: float,
    limit: int,
    snapshots: list[Snapshot],
) -> None:
    history: History = {}
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while snapshots:
                live.update(tables(snapshots, history, limit), refresh=True)
                history = remember(snapshots)
                time.sleep(interval)
                snapshots = collect(where, pid)
    except KeyboardInterrupt:
        return
    console.print("The last process has ended.")


def collect(where: Path, pid: int | None) -> list[Snapshot]:
    """The snapshots of the processes that answer; sockets of ended processes are removed."""
    found = []
    for path in sorted(where.glob("*.sock" if pid is None else f"{pid}.sock")):
        if path.stem == str(os.getpid()):
            continue
        try:
            found.append(cast("Snapshot", json.loads(ask(path, TIMEOUT))))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)  # it was killed
        except (OSError, ValueError) as error:
            click.echo(f"process {path.stem} does not answer: {error}", err=True)
    return found


def remember(snapshots: list[Snapshot]) -> History:
    kept: History = {}
    for taken in snapshots:
        for qp_num, counts in [
            (0, taken["traffic"]),
            *((each["qp_num"], each["traffic"]) for each in taken["connections"]),
        ]:
            values = taken["time"], counts["bytes_sent"], counts["bytes_received"]
            kept[taken["pid"], qp_num] = values
    return kept


def tables(snapshots: list[Snapshot], history: History, limit: int) -> Group:
    """A row for each process, and one for each of the busiest connections."""
    processes = table("pid", "connections", "listeners", "messages", "sent", "received", "memory",
        "broken", "failed")  # fmt: skip
    connections = table("pid", "peer", "side", "device", "wire", "state", "age", "messages",
        "sent", "received", "queue", "unread")  # fmt: skip
    rows: list[tuple[int, ConnectionState, Snapshot]] = []
    for taken in snapshots:
        counts, events, devices = taken["traffic"], taken["connection_events"], taken["devices"]
        row(
            processes,
            taken["pid"],
            len(taken["connections"]),
            len(taken["listeners"]),
            counts["messages_sent"] + counts["messages_received"],
            *rates(taken, 0, counts["bytes_sent"], counts["bytes_received"], history),
            amount(sum(device["pool"]["registered_bytes"] for device in devices)),
            events["broken"],
            events["failed"],
        )
        rows += [(busy(taken, each, history), each, taken) for each in taken["connections"]]
    rows.sort(key=lambda found: -found[0])
    shown = rows[:limit] if limit else rows
    for _, each, taken in shown:
        counts = each["traffic"]
        row(
            connections,
            taken["pid"],
            each["peer"] or "-",
            "accepted" if each["accepted"] else "connected",
            each["device"],
            each["wire"] or "-",
            each["state"].lower().replace("_", " "),
            f"{each['age']:.0f} s",
            counts["messages_sent"] + counts["messages_received"],
            *rates(taken, each["qp_num"], counts["bytes_sent"], counts["bytes_received"], history),
            f"{each['outstanding']}/{each['send_queue']}",
            each["messages_unread"],
        )
    if len(shown) < len(rows):
        connections.caption = f"{len(rows) - len(shown)} more: --limit 0 shows all"
    return Group(processes, connections) if rows else Group(processes)


def busy(taken: Snapshot, each: ConnectionState, history: History) -> int:
    """Bytes since the last update, or of all its life."""
    counts = each["traffic"]
    _, sent, received = history.get((taken["pid"], each["qp_num"]), (0.0, 0, 0))
    return counts["bytes_sent"] + counts["bytes_received"] - sent - received


def rates(
    taken: Snapshot, qp_num: int, sent: int, received: int, history: History
) -> tuple[str, str]:
    """Totals, with the rate since the last update."""
    known = history.get((taken["pid"], qp_num))
    if known is None or taken["time"] <= known[0]:
        return amount(sent), amount(received)
    seconds = taken["time"] - known[0]
    both = zip((sent, received), known[1:], strict=True)
    first, second = (
        f"{amount(now)} ({amount(max(0, now - before) / seconds)}/s)" for now, before in both
    )
    return first, second


def amount(size: float) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def table(*columns: str) -> Table:
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def row(table: Table, *cells: object) -> None:
    # Another process wrote them: neither markup nor control characters.
    table.add_row(*(escape("".join(c for c in str(cell) if c.isprintable())) for cell in cells))
