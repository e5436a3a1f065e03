"""The table printed by `aiordma perf`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from .tables import size_text, table, time_text, verdict

ENDS = ("client", "server")
TIMES = {name: name.replace("_", ".") for name in ("min", "median", "p90", "p99", "p99_9", "max")}


def show(console: Console, record: dict[str, Any], cpu: bool = False) -> None:
    """Print a run's results as a table with a legend.

    If `cpu` is True, also print the CPU usage.
    """
    settings = record["settings"]
    how = f", {settings['qp']} queue pairs" if settings.get("qp") else ""
    how += ", bidirectional" if settings.get("bidirectional") else ""
    console.print(
        f"{record['operation']} {record['metric']} on {record['device']} "
        f"({record['library']} library), via {record['via']}, {record['loop']} loop, "
        f"{settings['connections']} connection{'s' * (settings['connections'] > 1)}, "
        f"depth {settings['depth']}, batch {settings['batch']}"
        f"{how}\n"
        f"client {record['client']}\nserver {record['server']}",
        highlight=False,
    )
    console.print(latencies(record) if record["metric"] == "lat" else throughputs(record))
    for row in record["results"]:
        if cpu:
            used = ", ".join(f"{end} {100 * row[f'{end}_cpu']:.0f} %" for end in ENDS)
            console.print(f"{size_text(row['size'])}: CPU {used}", highlight=False)
        if row["lost"]:
            console.print(f"{size_text(row['size'])}: {row['lost']:,} lost", highlight=False)
        if row["mismatch"]:
            console.print(f"[bold red]{size_text(row['size'])}: {row['mismatch']}[/]")
    if record["interrupted"]:
        console.print("[yellow]interrupted: the results are those up to then[/]")


def latencies(record: dict[str, Any]) -> Table:
    headings = ("size", "count", *TIMES.values(), "completion", "p99", "verified")
    rows = table(
        *headings,
        numbers=headings[:-1],
        caption=f"Times in us. Latency: {record['latency_is']}. Completion: "
        f"{record['completion_is']}. Python's garbage collection is off during the measurement.",
    )
    for column in rows.columns[-3:-1]:
        column.style = "cyan"
    for row in record["results"]:
        latency, completion = row["latency_us"], row["completion_us"]
        if latency is None:
            continue
        rows.add_row(
            size_text(row["size"]),
            f"{latency['count']:,}",
            *(time_text(latency[key]) for key in TIMES),
            *(time_text(completion[key]) if completion else "-" for key in ("median", "p99")),
            verdict(row["mismatch"]),
        )
    return rows


def throughputs(record: dict[str, Any]) -> Table:
    headings = ("size", "count", "seconds", "MB/s", "Gb/s", "Mmsg/s", "min MB/s", "max MB/s")
    rows = table(
        *headings,
        "verified",
        numbers=headings,
        caption="1 MB is 2^20 bytes, as in perftest. 1 Gb is 10^9 bits. Only the payload counts. "
        "min and max are the slowest and the fastest quarter of a second. "
        "Python's garbage collection is off during the measurement.",
    )
    for row in record["results"]:
        spread = row["slices"]
        rows.add_row(
            size_text(row["size"]),
            f"{row['operations']:,}",
            f"{row['seconds']:.2f}",
            *(amount(row[key]) for key in ("mb_per_s", "gbit_per_s")),
            f"{row['mmsg_per_s']:.4f}",
            *(amount(spread[key]) if spread else "-" for key in ("min_mb_per_s", "max_mb_per_s")),
            verdict(row["mismatch"]),
        )
    return rows


def amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
