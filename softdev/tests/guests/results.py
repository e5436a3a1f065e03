"""Results of the last complete run of each row, and the page that shows them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .rows import Row
from .table import SOFTWARE, TABLE

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "guests.md"
LINKS = {"shared": "shared memory", "tcp": "TCP wire"}

INTRODUCTION = """\
# Unmodified RDMA software on the embedded device

`make guests` installs the programs on this page from Debian 12 and PyPI packages and runs them
unchanged under `aiordma run`, once over shared memory and once over TCP
(`AIORDMA_EMBEDDED_LINKS`). Each row of the tables is a test. A test passes if
its programs succeed within a time limit, and if a [trace](../../docs/trace.md) shows that work
requests on the device transferred their data. CI runs the tests that are marked with \\*
(`make guests ARGS=--quick`).

To run one of these programs on two hosts, select a GID that can reach the other host
(`-g` for the pingpongs, `-x` for perftest). `aiordma devinfo` lists the GIDs. Index 0 is the
first address that is neither link-local nor loopback. With the connection manager (perftest
`-R`, qperf `-cm1`, rping), the IP addresses determine the GID. All of this also applies to
[RoCE v2](roce-v2.md).

Each table shows only the rows that CI runs and the rows that fail. If there are none, it shows
the first row. The other rows are named below the table. The figures are those that the programs
print. For comparison, the last column shows the same software over kernel TCP on the loopback
interface. For perftest, that figure comes from qperf.
[results.json](../tests/guests/results.json) contains all figures.

{machine}
"""

BY_HAND = """\
## Tried by hand

The following software is not part of `make guests`. It was built and run manually under \
`aiordma run` in 2026:

| software | result |
|---|---|
| QEMU | live migration works |
| librpma | works |
| the Rust test suites of rust-ibverbs, sideway, async-rdma and rust-rdma-io | 313 of 315 tests \
pass |
| rdma4py with its own ibverbs, on two embedded devices | 88 tests pass, and two are skipped \
(GPUs, mlx5) |
| rdma-core 64's tests | 187 tests pass, and none fail |
| gloo with its ibverbs transport | failed, because idle queue pairs broke when a peer exited, and \
has not been retried since |

These programs were tried on 2026-11-30, on a machine with 2 busy cores:

| software | programs | result |
|---|---|---|
| perftest 6.29 (00b55b6) | ib_send_bw `--use-srq` (1 and 4 queue pairs), ib_send_lat `--use-srq`, \
ib_write_bw `-R` | work over shared memory, TCP and RoCE |
| perftest 6.29 (00b55b6) | 122 option sets of ib_send, ib_write, ib_read and ib_atomic, `_lat` \
and `_bw`: `-a`, `-b`, `-c UC`, `-c UD`, `-c XRC`, `-D`, `-e`, `-I`, `-l`, `-q`, `-Q`, `-R`, `-t`, \
`--use-srq` and others | 113 work over shared memory. perftest itself rejects 5: UC with `-R` (4) \
and ib_send_bw `--data_validation`. ib_read_lat `-a` and ib_write_bw `-a` finished only with fewer \
iterations. ib_send_lat `-a` and ib_write_lat `-a` did not finish within 60 s. These 4 are slow \
because perftest measures the CPU clock for each size, which takes seconds on a machine with a \
load of 20 |
| fabtests 1.17.0, Debian's libfabric | fi_recv_cancel, `verbs;ofi_rxm` | works over shared \
memory and TCP |
| fabtests 1.17.0, Debian's libfabric | 20 tests of msg and dgram endpoints, `verbs` | 13 of 15 \
with msg work over shared memory. fi_bw `-T 1` did not finish within 20 s, and fi_multi_ep fails \
in fi_domain (EINVAL). None of the 5 with dgram work: 4 fail with ENODATA, and fi_cq_data did not \
finish within 20 s |
| OSU micro-benchmarks 5.7, Open MPI 4.1.4 over UCX 1.13.1 | 33 programs with 2 processes, up to \
64 KiB, 10 iterations | 29 work over shared memory, including osu_latency, osu_bw and \
osu_allreduce. osu_bcast, osu_gatherv, osu_reduce and osu_scatter did not finish within 40 s on a \
machine with a load of 20 |
| InfiniStore 0.2.35 (PyPI), uvloop 0.21.0 | its benchmark with `--rdma`; writing, reading, \
finding and deleting keys, missing keys, unregistered memory, 64 requests at a time | everything \
works over shared memory. Over TCP, everything but the benchmark was tried, and works. \
The server code that sets oom_score_adj was removed, \
because it requires privileges |
| GPI-2 (9eae0f2) | allreduce, 2 processes | works over shared memory, in 15 s |
| GPI-2 (9eae0f2) | allreduce, 3 and 4 processes | did not finish within 100 s over shared memory \
or TCP. The programs poll, and there were more processes than cores |
| rdma-core's mckey 44.0 | two hosts, RoCE | received all datagrams in 43 runs, four of them \
through a bridge with multicast snooping. The sender waits 3 s after joining the group, and \
receivers that join later miss datagrams |
"""


def load() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def store(versions: Mapping[str, str], rows: Mapping[str, Any]) -> None:
    """Store the results and write the page, keeping old results of rows still in the table."""
    before = load()
    known = {**before.get("rows", {}), **rows}
    results = {
        "machine": {"kernel": platform.release().partition("-")[0], "cores": os.cpu_count()},
        "versions": dict(sorted({**before.get("versions", {}), **versions}.items())),
        "rows": {row.id: known[row.id] for row in TABLE if row.id in known},
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def cell(result: Mapping[str, Any], link: str) -> str:
    one = result.get(link)
    if one is None:
        return "not run"
    if not one["works"]:
        return "**no**"
    return number(one.get("figure")) or "yes"


def works(result: Mapping[str, Any]) -> bool:
    return all(result.get(link, {}).get("works") for link in LINKS)


def tally(rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe how many of the rows were run, and how many of these work on every link."""
    ran = [found[row.id] for row in rows if row.id in found]
    left = len(rows) - len(ran)
    return f"{sum(map(works, ran))} of {len(ran)} rows work" + (f", {left} not run" if left else "")


def page(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    cores = f"{machine['cores']} cores shared by the client and the server"
    about = f"Measured on Linux {machine['kernel']}, {cores}."
    parts = [INTRODUCTION.format(machine=about)]
    for software in SOFTWARE:
        rows = [row for row in TABLE if row.software == software.name]
        found = results["rows"]
        version = results["versions"].get(software.name, "not run")
        parts += [f"## {software.name}\n", f"{version}: {tally(rows, found)}.\n"]
        shown = [row for row in rows if row.quick or not works(found.get(row.id, {}))] or rows[:1]
        parts += [
            f"| row | unit | {' | '.join(LINKS.values())} | kernel TCP |",
            "|---|---|---|---|---|",
        ]
        for row in shown:
            result = found.get(row.id, {})
            cells = [cell(result, link) for link in LINKS]
            mark = " \\*" if row.quick else ""
            tcp = number(result.get("kernel_tcp"))
            parts.append(f"| {row.name}{mark} | {row.unit} | {' | '.join(cells)} | {tcp} |")
        if others := [row.name for row in rows if row not in shown]:
            parts += ["", f"These rows also work: {', '.join(f'`{name}`' for name in others)}."]
        reasons: dict[str, list[str]] = {}
        for row in rows:
            for link, reason in row.fails.items():
                reasons.setdefault(reason, []).append(f"{row.name} ({LINKS[link]})")
        if reasons:
            parts.append("")
            parts += [f"- {', '.join(names)}: {reason}" for reason, names in reasons.items()]
        if software.note:
            parts += ["", software.note]
        parts.append("")
    return "\n".join([*parts, BY_HAND])
