"""The `aiordma echo` report, as a table or as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from rich.console import Console

from aiordma.errors import host_port

from .round_trips import Result
from .tables import size_text, table, time_text, verdict

CAPTION = (
    "One message is in flight at a time. A round trip begins with the call of send and ends when "
    "the echo has been received. Throughput is the number of bytes in both directions divided by "
    "the total time of the round trips. 1 GB is 10^9 bytes. The comparison is not timed."
)
TIMES = ("min", "median", "p99")


@dataclass(frozen=True, slots=True)
class Report:
    device: str
    library: str
    via: str
    loop: str
    local_address: tuple[str, int] | None
    peer_address: tuple[str, int] | None
    results: list[Result]

    @property
    def verified(self) -> bool:
        return not any(result.mismatch for result in self.results)

    def to_json(self) -> str:
        """Return the report as JSON.

        Times are in microseconds, throughput is in GB/s, and sizes are in bytes.
        """
        report = {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "verified": self.verified,
            "results": [
                {
                    "size": result.size,
                    "whole_file": result.whole_file,
                    "messages": len(result.times),
                    **{f"{name}_us": getattr(result.us, name) for name in TIMES},
                    "gb_per_s": result.throughput / 1e9,
                    "verified": not result.mismatch,
                    "mismatch": result.mismatch or None,
                }
                for result in self.results
            ],
        }
        return json.dumps(report, indent=2)

    def show(self, console: Console) -> None:
        console.print(
            f"device {self.device} ({self.library} library), via {self.via}, {self.loop} loop\n"
            f"from {address_text(self.local_address)} to {address_text(self.peer_address)}",
            highlight=False,
        )
        headings = "size", "messages", *(f"{name} us" for name in TIMES), "GB/s", "verified"
        rows = table(*headings, numbers=headings[:-1], caption=CAPTION)
        for result in self.results:
            rows.add_row(
                size_text(result.size) + (" (all)" if result.whole_file else ""),
                f"{len(result.times):,}",
                *(time_text(getattr(result.us, name)) for name in TIMES),
                throughput_text(result.throughput / 1e9),
                verdict(result.mismatch),
            )
        console.print(rows)
        for result in self.results:
            if result.mismatch:
                console.print(f"[bold red]{size_text(result.size)}: {result.mismatch}[/]")


def address_text(address: tuple[str, int] | None) -> str:
    return "an unknown address" if address is None else host_port(address)


def throughput_text(gb_per_s: float) -> str:
    return f"{gb_per_s:.3f}" if gb_per_s >= 0.001 else "< 0.001"
