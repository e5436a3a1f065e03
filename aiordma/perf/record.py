"""The JSON object describing a run, used for printing, tables and plots.

`docs/perf.md` describes its contents.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

from .client import Result
from .settings import Settings
from .statistics import Summary, Throughput

FORMAT, VERSION = "aiordma-perf", 1

HALF = "half of a round trip between the two programs, as in perftest"
FULL = "from the call until the await returns, as in perftest"
LATENCY = {"send": HALF, "write": HALF, "stream": HALF, "read": FULL, "atomic": FULL}
COMPLETION = "from the call until the await returns, one operation at a time, without replies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The environment a run took place in."""

    aiordma: str
    device: str
    library: str
    via: str
    loop: str
    client: str
    server: str
    polling_us: float
    server_polling_us: float


COPIED_SETTINGS = (
    *("iterations", "warm_up", "connections", "depth", "batch", "imm", "verify_all", "gpu"),
    *("bidirectional", "inline", "moderation"),
)


def record(settings: Settings, where: Where, results: list[Result]) -> dict[str, Any]:
    """Return the results with the settings and the machines, as printed with --json."""
    place = asdict(where)
    polling = {name: place.pop(name) for name in ("polling_us", "server_polling_us")}
    latency = settings.metric == "lat"
    return {
        "format": FORMAT,
        "version": VERSION,
        **place,
        "operation": settings.operation,
        "metric": settings.metric,
        "settings": {
            **{name: getattr(settings, name) for name in COPIED_SETTINGS},
            "duration": settings.duration if settings.iterations is None else None,
            "qp": settings.qp or None,
            **polling,
            "garbage_collection": "off in the timed parts, on both sides",
        },
        "latency_is": LATENCY[settings.operation] if latency else None,
        "completion_is": COMPLETION if latency else None,
        "verified": not any(result.mismatch for result in results),
        "interrupted": any(result.interrupted for result in results),
        "results": [row(result) for result in results],
    }


def row(result: Result) -> dict[str, Any]:
    """Return the results for one message size in the form of the record."""
    throughput = result.throughput
    return {
        "size": result.size,
        "operations": result.operations,
        "seconds": result.seconds,
        "latency_us": times(result.latency),
        "completion_us": times(result.completion),
        "distribution_us": result.distribution
        and [[time * 1e6, part] for time, part in result.distribution],
        "mb_per_s": throughput.mb_per_s,
        "gbit_per_s": throughput.gbit_per_s,
        "mmsg_per_s": throughput.mmsg_per_s,
        "client_cpu": result.cpu[0] / result.seconds,
        "server_cpu": result.cpu[1] / result.seconds,
        "lost": result.lost,
        "slices": spread(result.slices),
        "mismatch": result.mismatch or None,
    }


def spread(slices: list[Throughput] | None) -> dict[str, float] | None:
    """Summarize how the bandwidth varied over time."""
    if not slices:
        return None
    found = [one.mb_per_s for one in slices]
    return {
        "count": len(found),
        "min_mb_per_s": min(found),
        "median_mb_per_s": median_low(found),
        "max_mb_per_s": max(found),
    }


def times(summary: Summary | None) -> dict[str, float] | None:
    if summary is None:
        return None
    return asdict(summary.scaled(1e6))


def check_record(value: object) -> dict[str, Any]:
    """Check that `value` has the format that `record` produces, and return `value`.

    Raises:
        ValueError: If the format is wrong or the version is not supported.
    """
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError(f"the record's format is not {FORMAT!r}")
    if value.get("version") != VERSION:
        raise ValueError(
            f"record version {value.get('version')} is not supported; expected {VERSION}"
        )
    return value
