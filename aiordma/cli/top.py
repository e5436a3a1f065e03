"""`aiordma top`: show the activity of processes that use aiordma."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from aiordma import __version__
from aiordma.monitoring import RailState, Snapshot, Traffic
from aiordma.monitoring_socket import VARIABLE, ask, directories, sockets

from .options import FiniteRange
from .tables import amount, plain

# How long to wait for the response of a process, in seconds.
TIMEOUT = 5.0
# The maximum number of processes to query concurrently.
MAX_CONCURRENT_QUERIES = 256

NOT_FOUND = (
    f"{{}} found in {{}}: start the process as this user, with {VARIABLE}={{}} in its environment"
)

UNSUPPORTED_VERSION = (
    f"process {{}} uses aiordma {{}}, which the table of aiordma {__version__} does not support; "
    "use --json"
)

# Columns to drop on narrow terminals, in this order.
PROCESS_EXTRAS = (
    "listeners", "waited", "p99", "messages", "memory", "failed", "broken", "connections",
)  # fmt: skip
CONNECTION_EXTRAS = ("device", "side", "age", "wire", "unread", "queue", "messages", "state")
RAIL_EXTRAS = ("latest error", "since")
# Words longer than this many characters, such as IPv6 addresses, may be wrapped.
MAX_UNWRAPPED_WORD = 15

Shown = dict[str, Snapshot]
"""Snapshots by socket name.

PIDs are not used as keys, because processes in different PID namespaces can have the same PID.
"""

DIRECTIONS = {
    "sent": ("bytes_sent", "bytes_written", "peer_bytes_read"),
    "received": ("bytes_received", "bytes_read", "peer_bytes_written"),
}
"""The column for each direction, with the snapshot fields that the column adds up."""

Row = dict[str, object]
"""The cells of a table row, by column heading."""


@click.command()
@click.argument("pid", type=int, required=False)
@click.option("--once", is_flag=True, help="Print the tables once and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print the snapshots as JSON once and exit.")
@click.option("--interval", default=2.0, type=FiniteRange(0.1, 3600), show_default=True,
    help="Seconds between updates.")  # fmt: skip
@click.option("--limit", default=30, type=click.IntRange(0), show_default=True,
    help="Maximum number of connections, busiest first; 0 shows all.")  # fmt: skip
def top(pid: int | None, once: bool, as_json: bool, interval: float, limit: int) -> None:
    """Show the traffic, connections and memory of this user's processes that use aiordma.

    The tables contain processes that had AIORDMA_MONITOR=1 in their environment when they imported
    aiordma. If you pass a PID, only this process is shown. Press Ctrl-C to exit.

    The exit status is 1 if no process is found.
    """
    try:
        # Without a setting, show the processes that were started with AIORDMA_MONITOR=1.
        setting = os.environ.get(VARIABLE, "")
        setting = "1" if setting in {"", "0"} else setting
        socket_directories = directories(setting)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"cannot use {VARIABLE}={setting!r}: {error}") from None
    responses, notes = collect(socket_directories, pid)
    shown, unknown = readable(responses)
    if not (responses if as_json else shown):
        raise click.ClickException(
            "\n".join(notes + unknown)
            or NOT_FOUND.format(
                "no process" if pid is None else f"process {pid} not",
                ", ".join(map(str, socket_directories)),
                setting,
            )
        )
    if as_json or once:
        for note in notes if as_json else notes + unknown:
            click.echo(note, err=True)
    if as_json:
        click.echo(json.dumps(list(responses.values()), indent=2))
    elif once:
        console = Console()
        console.print(tables(shown, {}, limit, console.width))
    else:
        watch(socket_directories, pid, interval, limit)


def watch(socket_directories: Sequence[Path], pid: int | None, interval: float, limit: int) -> None:
    """Update the tables in the terminal until Ctrl-C is pressed or the last process has ended."""
    console = Console()
    before: Shown = {}
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                responses, notes = collect(socket_directories, pid)
                if not responses and not notes:
                    break
                shown, unknown = readable(responses)
                lines = [Text(plain(note)) for note in notes + unknown]
                made = [tables(shown, before, limit, console.width)] if shown else []
                live.update(Group(*made, *lines), refresh=True)
                before = shown
                time.sleep(interval)
    except KeyboardInterrupt:
        return
    console.print("The last process has ended.")


def collect(
    socket_directories: Sequence[Path], pid: int | None
) -> tuple[dict[str, object], list[str]]:
    """Query all processes that have a monitoring socket in one of the given directories.

    If `pid` is not None, only processes with this PID are queried. Returns the responses keyed by
    socket name, and a note about each failed query. Sockets left behind by killed processes are
    removed.
    """
    responses, notes = {}, []
    paths = [path for each in socket_directories for path in sockets(each, pid)]
    # Query concurrently, so that a silent process does not delay the others.
    with ThreadPoolExecutor(MAX_CONCURRENT_QUERIES) as threads:
        queries = [threads.submit(ask, path, TIMEOUT) for path in paths]
    for path, query in zip(paths, queries, strict=True):
        try:
            responses[path.stem] = json.loads(query.result())
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)  # the process was killed
        except (OSError, ValueError, RecursionError) as error:
            notes.append(f"process {number(path.stem)} does not respond: {error}")
    return responses, notes


def readable(responses: Mapping[str, object]) -> tuple[Shown, list[str]]:
    """Return the responses that the tables can show, and a note about each unsupported response."""
    shown: Shown = {}
    notes = []
    for name, response in responses.items():
        one = {name: cast("Snapshot", response)}
        try:
            tables(one, one, 0, 80)  # fails if the response lacks a field that the tables need
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            their_version = response.get("version") if isinstance(response, dict) else None
            notes.append(
                UNSUPPORTED_VERSION.format(
                    number(name), plain(their_version or "of another version")
                )
            )
        else:
            shown |= one
    return shown, notes


def number(name: str) -> str:
    return name.partition("-")[0]


def tables(shown: Shown, before: Shown, limit: int, width: int) -> Group:
    """Return tables of processes, their busiest connections, and the connections' rails.

    The rails table covers only connections with several rails. The tables also show transfer rates
    for each process with an earlier snapshot in `before`.
    """
    processes: list[Row] = []
    connections: list[tuple[int, Row, list[Row]]] = []  # bytes since the last update, row, rails
    pids = Counter(snapshot["pid"] for snapshot in shown.values())
    for name, snapshot in shown.items():
        label = snapshot["pid"] if pids[snapshot["pid"]] == 1 else name
        previous = before.get(name)
        seconds = snapshot["time"] - previous["time"] if previous else 0.0
        _, cells = traffic_cells(
            snapshot["traffic"], previous["traffic"] if previous else None, seconds
        )
        processes.append(
            {
                "pid": label,
                "connections": len(snapshot["connections"]),
                "listeners": len(snapshot["listeners"]),
                **cells,
                "memory": amount(sum(it["pool"]["registered_bytes"] for it in snapshot["devices"])),
                "waited": f"{waited(snapshot) - (waited(previous) if previous else 0):.1f} s",
                "p99": p99(snapshot, previous),
                "broken": snapshot["connection_events"]["broken"],
                "failed": snapshot["connection_events"]["failed"],
            }
        )
        earlier = {it["qp_num"]: it for it in previous["connections"]} if previous else {}
        for each in snapshot["connections"]:
            last = earlier.get(each["qp_num"])
            busy, cells = traffic_cells(each["traffic"], last["traffic"] if last else None, seconds)
            row = {
                "pid": label,
                "peer": each["peer"] or "-",
                "side": "accepted" if each["accepted"] else "connected",
                "device": each["device"],
                "wire": each["wire"] or "-",
                "state": each["state"].lower().replace("_", " "),
                "age": f"{each['age']:.0f} s",
                **cells,
                "queue": f"{each['outstanding']}/{each['send_queue']}",
                "unread": each["messages_unread"],
            }
            rails = rail_rows(each["rails"], last["rails"] if last else [], seconds)
            connections.append(
                (busy, row, [{"pid": label, "peer": row["peer"]} | it for it in rails])
            )
    connections.sort(key=lambda it: -it[0])
    busiest = connections[:limit] if limit else connections
    made: list[Table | Text] = [table(processes, PROCESS_EXTRAS, width)]
    if connections:
        made.append(table([row for _, row, _ in busiest], CONNECTION_EXTRAS, width))
    if rows := [row for _, _, rails in busiest for row in rails]:
        made.append(table(rows, RAIL_EXTRAS, width))
    if more := len(connections) - len(busiest):
        made.append(Text(f"{more} more connections; use --limit 0 to show all"))
    return Group(*made)


def traffic_cells(counts: Traffic, previous: Traffic | None, seconds: float) -> tuple[int, Row]:
    """Return the number of bytes transferred since the last update, and table cells for traffic.

    If there was no previous update, all bytes transferred so far are counted.
    """
    busy = 0
    cells: Row = {"messages": counts["messages_sent"] + counts["messages_received"]}
    for heading, parts in DIRECTIONS.items():
        total = transferred_bytes(counts, parts)
        before = transferred_bytes(previous, parts) if previous else None
        busy += total - (before or 0)
        cells[heading] = size_and_rate(total, before, seconds)
    return busy, cells


def transferred_bytes(counts: Traffic | RailState, parts: Sequence[str]) -> int:
    """Return the number of bytes transferred in one direction.

    The number includes both messages and one-sided operations.
    """
    return sum(cast("Mapping[str, int | None]", counts)[part] or 0 for part in parts)


def size_and_rate(total: int, before: int | None, seconds: float) -> str:
    """Format a number of bytes, followed by its growth rate if the previous number is known."""
    if before is None or seconds <= 0:
        return amount(total)
    return f"{amount(total)} ({amount(max(0, total - before) / seconds)}/s)"


def rail_rows(rails: list[RailState], previous: list[RailState], seconds: float) -> list[Row]:
    """Return a row for each rail, or an empty list if the connection has only one rail."""
    if len(rails) == 1:
        return []
    before = {rail["device"]: rail for rail in previous}
    rows: list[Row] = []
    for rail in rails:
        last = before.get(rail["device"])
        transferred = {
            heading: size_and_rate(
                transferred_bytes(rail, parts),
                transferred_bytes(last, parts) if last else None,
                seconds,
            )
            for heading, parts in DIRECTIONS.items()
        }
        rows.append(
            {
                "rail": rail["device"],
                "state": rail["state"],
                "since": f"{rail['age']:.0f} s",
                **transferred,
                "latest error": rail["error"] or "-",
            }
        )
    return rows


def waited(snapshot: Snapshot) -> float:
    return sum(wait["seconds"] for wait in snapshot["waits"].values())


def p99(snapshot: Snapshot, previous: Snapshot | None) -> str:
    """Return an upper bound on the duration of 99% of the requests since the last update.

    The upper bound is a bucket boundary of the latency histogram. Without an earlier snapshot, all
    of the process's requests are included.
    """
    counts: Counter[str] = Counter()
    for measured in snapshot["latencies"].values():
        counts.update(measured["up_to"])
    for measured in previous["latencies"].values() if previous else ():
        counts.subtract(measured["up_to"])
    for bound, count in counts.items():
        if 0 < 0.99 * counts["+Inf"] <= count:
            return "> 1 s" if bound == "+Inf" else f"{float(bound) * 1e6:g} us"
    return "-"


def table(rows: Sequence[Row], extras: Sequence[str], width: int) -> Table:
    """Create a table for a terminal that is `width` characters wide.

    If the table is too wide, columns are dropped in the order of `extras`. Headings wrap only if
    the table is still too wide.
    """
    columns = {name: [plain(row[name]) for row in rows] for name in rows[0]}
    least = {name: max(len(name), min_width(cells)) for name, cells in columns.items()}
    names, hidden = list(columns), []
    for name in extras:
        if table_width(names, least) <= width:
            break
        names.remove(name)
        hidden.append(name)
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    spare = max(0, width - table_width(names, least))
    for name in names:
        more = min(spare, max(0, max(map(len, columns[name])) - least[name]))
        spare -= more
        made.add_column(name, overflow="fold", width=least[name] + more)
    for cells in zip(*(columns[name] for name in names), strict=True):
        made.add_row(*map(escape, cells))
    if hidden:
        made.caption = f"hidden columns: {', '.join(hidden)}"
    return made


def min_width(cells: Sequence[str]) -> int:
    return min(MAX_UNWRAPPED_WORD, max(len(word) for cell in cells for word in cell.split()))


def table_width(names: Sequence[str], widths: Mapping[str, int]) -> int:
    """Return a table's width, including its edges and two spaces between columns."""
    return 1 + sum(widths[name] + 2 for name in names)
