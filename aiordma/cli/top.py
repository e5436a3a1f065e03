"""`aiordma top`: what processes that use aiordma do now."""

from __future__ import annotations

import json
import os
import time
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
from aiordma.monitoring import ConnectionState, Snapshot, Traffic
from aiordma.monitoring_socket import VARIABLE, ask, directories, sockets

# Seconds for which a process may leave a question unanswered.
TIMEOUT = 5.0
# Processes that are asked at a time.
AT_ONCE = 256

NONE = (
    f"{{}} shows its state here ({{}}): start it with {VARIABLE}=1 in its environment, as this user"
)

OTHER = (
    f"process {{}} has aiordma {{}}, whose state aiordma {__version__} cannot show in a table: "
    "--json prints it"
)

# Columns of the tables that a narrow terminal does without, the first one first.
PROCESS_EXTRAS = ("listeners", "messages", "memory", "failed", "broken", "connections")
CONNECTION_EXTRAS = ("device", "side", "age", "wire", "unread", "queue", "messages", "state")
# A longer word of a cell, such as a peer with an IPv6 address, may be broken.
WORD = 15

Shown = dict[str, Snapshot]
"""By the name of the socket: processes of several PID namespaces may have the same PID."""

Known = tuple[float, int, int]
"""The last update: its time, bytes sent and received."""

Columns = dict[str, list[str]]
"""The cells by the heading."""

History = dict[tuple[str, int], Known]
"""By socket and queue pair; 0: the process."""


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
        setting = os.environ.get(VARIABLE)
        where = directories(setting if setting not in {None, "", "0"} else "1")
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    answers, notes = collect(where, pid)
    shown, unknown = readable(answers)
    if not (answers if as_json else shown):
        raise click.ClickException(
            "\n".join(notes + unknown)
            or NONE.format("no process" if pid is None else f"no process {pid}", listed(where))
        )
    if as_json or once:
        for note in notes if as_json else notes + unknown:
            click.echo(note, err=True)
    if as_json:
        click.echo(json.dumps(list(answers.values()), indent=2))
    elif once:
        console = Console()
        console.print(tables(shown, {}, limit, console.width))
    else:
        watch(where, pid, interval, limit)


def listed(where: Sequence[Path]) -> str:
    return ", ".join(map(str, where))


def watch(where: Sequence[Path], pid: int | None, interval: float, limit: int) -> None:
    console = Console()
    history: History = {}
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                answers, notes = collect(where, pid)
                if not answers and not notes:
                    break
                shown, unknown = readable(answers)
                lines = [Text(plain(note)) for note in notes + unknown]
                made = [tables(shown, history, limit, console.width)] if shown else []
                live.update(Group(*made, *lines), refresh=True)
                history = remember(shown)
                time.sleep(interval)
    except KeyboardInterrupt:
        return
    console.print("The last process has ended.")


def collect(where: Sequence[Path], pid: int | None) -> tuple[dict[str, object], list[str]]:
    """The answers of the processes by the names of their sockets, and why others do not answer.

    Sockets of ended processes are removed.
    """
    answers, notes = {}, []
    paths = [path for each in where for path in sockets(each, pid)]
    with ThreadPoolExecutor(AT_ONCE) as threads:  # one that is silent does not delay the others
        asked = [threads.submit(ask, path, TIMEOUT) for path in paths]
    for path, answer in zip(paths, asked, strict=True):
        try:
            answers[path.stem] = json.loads(answer.result())
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)  # it was killed
        except (OSError, ValueError, RecursionError) as error:
            notes.append(f"process {number(path.stem)} does not answer: {error}")
    return answers, notes


def readable(answers: Mapping[str, object]) -> tuple[Shown, list[str]]:
    """The answers that the table can show, and why not others."""
    shown: Shown = {}
    notes = []
    for name, answer in answers.items():
        one = {name: cast("Snapshot", answer)}
        try:
            tables(one, remember(one), 0, 80)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            theirs = answer.get("version") if isinstance(answer, dict) else None
            notes.append(OTHER.format(number(name), plain(theirs or "of another version")))
        else:
            shown |= one
    return shown, notes


def number(name: str) -> str:
    """The PID in the name of a socket."""
    return name.partition("-")[0]


def remember(shown: Shown) -> History:
    kept: History = {}
    for name, taken in shown.items():
        for qp_num, counts in [
            (0, taken["traffic"]),
            *((each["qp_num"], each["traffic"]) for each in taken["connections"]),
        ]:
            values = taken["time"], counts["bytes_sent"], counts["bytes_received"]
            kept[name, qp_num] = values
    return kept


def tables(shown: Shown, history: History, limit: int, width: int) -> Group:
    """A row for each process, and one for each of the busiest connections."""
    processes: Columns = {name: [] for name in ("pid", "connections", "listeners", "messages",
        "sent", "received", "memory", "broken", "failed")}  # fmt: skip
    connections: Columns = {name: [] for name in ("pid", "peer", "side", "device", "wire", "state",
        "age", "messages", "sent", "received", "queue", "unread")}  # fmt: skip
    pids = [taken["pid"] for taken in shown.values()]
    rows: list[tuple[int, str, ConnectionState, float, Known | None]] = []
    for name, taken in shown.items():
        label = str(taken["pid"]) if pids.count(taken["pid"]) == 1 else name
        counts, events, devices = taken["traffic"], taken["connection_events"], taken["devices"]
        row(
            processes,
            label,
            len(taken["connections"]),
            len(taken["listeners"]),
            counts["messages_sent"] + counts["messages_received"],
            *rates(taken["time"], counts, history.get((name, 0))),
            amount(sum(device["pool"]["registered_bytes"] for device in devices)),
            events["broken"],
            events["failed"],
        )
        for each in taken["connections"]:
            known = history.get((name, each["qp_num"]))
            rows.append((busy(each["traffic"], known), label, each, taken["time"], known))
    rows.sort(key=lambda found: -found[0])
    busiest = rows[:limit] if limit else rows
    for _, label, each, now, known in busiest:
        counts = each["traffic"]
        row(
            connections,
            label,
            each["peer"] or "-",
            "accepted" if each["accepted"] else "connected",
            each["device"],
            each["wire"] or "-",
            each["state"].lower().replace("_", " "),
            f"{each['age']:.0f} s",
            counts["messages_sent"] + counts["messages_received"],
            *rates(now, counts, known),
            f"{each['outstanding']}/{each['send_queue']}",
            each["messages_unread"],
        )
    made: list[Table | Text] = [table(processes, PROCESS_EXTRAS, width)]
    if rows:
        made.append(table(connections, CONNECTION_EXTRAS, width))
    if len(busiest) < len(rows):
        made.append(Text(f"{len(rows) - len(busiest)} more: --limit 0 shows all"))
    return Group(*made)


def busy(counts: Traffic, known: Known | None) -> int:
    """Bytes since the last update, or of all its life."""
    _, sent, received = known or (0.0, 0, 0)
    return counts["bytes_sent"] + counts["bytes_received"] - sent - received


def rates(now: float, counts: Traffic, known: Known | None) -> tuple[str, str]:
    """Totals, with the rate since the last update."""
    totals = counts["bytes_sent"], counts["bytes_received"]
    if known is None or now <= known[0]:
        return amount(totals[0]), amount(totals[1])
    seconds = now - known[0]
    first, second = (
        f"{amount(total)} ({amount(max(0, total - before) / seconds)}/s)"
        for total, before in zip(totals, known[1:], strict=True)
    )
    return first, second


def amount(size: float) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def table(columns: Columns, extras: Sequence[str], width: int) -> Table:
    """At most so wide, without those of the `extras` for which there is no room.

    No heading is broken while the others fit.
    """
    names, hidden = list(columns), []
    least = {name: max(len(name), fitting(cells)) for name, cells in columns.items()}
    for name in extras:
        if needed(names, least) <= width:
            break
        names.remove(name)
        hidden.append(name)
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    spare = max(0, width - needed(names, least))
    for name in names:
        more = min(spare, max(0, max(map(len, columns[name])) - least[name]))
        spare -= more
        made.add_column(name, overflow="fold", width=least[name] + more)
    for cells in zip(*(columns[name] for name in names), strict=True):
        made.add_row(*map(escape, cells))
    if hidden:
        made.caption = f"a wider terminal shows: {', '.join(hidden)}"
    return made


def fitting(cells: Sequence[str]) -> int:
    """The width that a column needs for its words."""
    return min(WORD, max(len(word) for cell in cells for word in cell.split()))


def needed(names: Sequence[str], widths: Mapping[str, int]) -> int:
    """The width of a table with its edges, and two spaces between columns."""
    return 1 + sum(widths[name] + 2 for name in names)


def row(columns: Columns, *cells: object) -> None:
    for column, cell in zip(columns.values(), cells, strict=True):
        column.append(plain(cell))


def plain(cell: object) -> str:
    """Without the control characters that another process may have written."""
    return "".join(c for c in str(cell) if c.isprintable())
