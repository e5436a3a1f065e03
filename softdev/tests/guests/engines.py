"""Rows for Python packages that move memory: NIXL, Mooncake, InfiniStore and ibverbs."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import Command, Row, Software
from .ucx import OVER_RDMA, OVER_TCP

NIXL = Software("NIXL", "nixl-cu12", pip=("--no-deps", "nixl", "nixl-cu12", "numpy"))
MOONCAKE = Software(
    "Mooncake",
    "mooncake-transfer-engine-non-cuda",
    apt=("libcurl4", "libnuma1"),
    pip=("mooncake-transfer-engine-non-cuda", "numpy"),
    note="This package is built from the same source as `mooncake-transfer-engine`, but does not "
    "need a CUDA driver.",
)

IBVERBS = Software(
    "ibverbs",
    "ibverbs",
    pip=("ibverbs",),
    note="Like NCCL, this package opens libibverbs with `dlopen`.",
)

INFINISTORE = Software(
    "InfiniStore",
    "infinistore",
    # The server passes structures of its bundled libuv to uvloop's event loop. The libuv in uvloop
    # must therefore be compatible.
    pip=("--no-deps", "infinistore", "numpy", "uvloop==0.21.0"),
    note="The server requires uvloop 0.21. With uvloop 0.23, it aborts in libuv's `uv__io_cb` "
    "when a client connects.",
)

TRANSFERS = 21 << 24  # programs/meeting.py
STORED = 1 << 24  # programs/infinistore_cache.py


def rows() -> Iterator[Row]:
    for operation, said in (("READ", r"(?m)^read$"), ("WRITE", r"(?m)^written$")):
        program = "{python} {here}/programs/nixl_transfer.py"
        command = Command(
            f"{program} {operation} {{port}}", f"{program} target {{port}}", r"([\d.]+) MiB/s"
        )
        yield Row(
            "NIXL",
            f"UCX backend, {operation} of 16 MiB",
            command,
            TRANSFERS,
            unit="MiB/s",
            environment=OVER_RDMA,
            tcp=command,
            tcp_environment=OVER_TCP,
            says=said,
            quick=operation == "READ",
        )
    program = "{python} {here}/programs/mooncake_transfer.py"
    initiator, target = f"{program} initiator {{port}}", f"{program} target {{port}}"
    yield Row(
        "Mooncake",
        "transfer engine, writes of 16 MiB",
        Command(f"{initiator} rdma", f"{target} rdma", r"([\d.]+) MiB/s"),
        TRANSFERS,
        unit="MiB/s",
        tcp=Command(f"{initiator} tcp", f"{target} tcp", r"([\d.]+) MiB/s"),
        says=r"(?m)^written$",
        quick=True,
    )
    program = "{python} {here}/programs/ibverbs_transfer.py"
    for operation, said in (("WRITE", r"(?m)^written$"), ("READ", r"(?m)^read$")):
        yield Row(
            "ibverbs",
            f"{operation} of 16 MiB",
            Command(
                f"{program} {operation} {{port}}", f"{program} target {{port}}", r"([\d.]+) MiB/s"
            ),
            TRANSFERS,
            unit="MiB/s",
            says=said,
            quick=operation == "WRITE",
        )
    program = "{python} {here}/programs/infinistore_cache.py"
    yield Row(
        "InfiniStore",
        "256 values of 64 KiB",
        Command(f"{program} client {{port}}", f"{program} server {{port}}", endless=True),
        2 * STORED,
        says=r"(?m)^equal\nnot found$",
        quick=True,
    )
