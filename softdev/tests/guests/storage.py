"""Rows for storage over RDMA: fio's engine, and iSER between tgtd and libiscsi."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .rows import Command, Row, Software

FIO = Software(
    "fio",
    "fio",
    apt=("fio",),
    note="After connecting, fio's rdma engine sleeps for half a second. The measured time includes "
    "this delay. If the receiver has not posted all its receives by then, the sender reports "
    "`cq completion status 13` and hangs, because the engine does not retry (rnr_retry_count 0).",
)
ISER = Software(
    "tgt and libiscsi",
    "tgt",
    apt=("tgt", "libiscsi-bin"),
    note="tgtd accepts an iSER initiator only if both its address and its name are bound to the "
    "target. Otherwise, it responds with `Target not found`. The option `--iser port=` does not "
    "work, even without RDMA.",
)


def fio(engine: str, client: str, server: str = "{count}") -> Command:
    words = f"fio --thread --ioengine={engine} --port={{port}} --bs=1m --output-format=json"
    return Command(
        f"{words} --name=client --hostname=127.0.0.1 --rw=write {{count}} {client}",
        f"{words} --name=server --rw=read {server}",
        r'(?s)"write" : \{.*?"bw_bytes" : (\d+)',
    )


def iser(transport: str, options: str) -> Command:
    return Command(
        f"sh {{here}}/iser.sh {transport} {{port}} {{count}}",
        f"tgtd --foreground {options}",
        r"iops average (\d+)",
    )


def rows() -> Iterator[Row]:
    # fio counts a short read as a full block, so a receiver with the sender's size would stop too
    # early. With `--size=1t`, it reads until the connection ends.
    tcp = fio("net", "--protocol=tcp", "--protocol=tcp --listen --size=1t")
    for verb in ("write", "read"):
        yield Row(
            "fio",
            f"verb={verb}",
            fio("rdma", f"--verb={verb} --iodepth=8", "{count} --iodepth=128"),
            16 << 20,
            count=("--size=16m", "--size=4g"),
            unit="bytes/s",
            tcp=tcp,
        )
    # Each send needs a receive, so the client sends only the 128 messages for which the server's
    # `--iodepth` provides receives. They are too few to measure a figure.
    yield Row(
        "fio",
        "verb=send",
        replace(fio("rdma", "--verb=send --iodepth=8", "{count} --iodepth=128"), figure=""),
        128 << 20,
        count=("--size=128m", ""),
    )
    yield Row(
        "tgt and libiscsi",
        "iSER, write and read, 64 KiB",
        # tgtd always uses port 3260 for iSER. Its default port for iSCSI is the same, so iSCSI
        # moves to port 3261.
        iser("iser", "--iscsi portal=127.0.0.1:3261 --iser pool_sz_mb=128"),
        1 << 20,
        count=("1", "5"),
        unit="/s",
        tcp=iser("iscsi", "--iscsi portal=127.0.0.1:3260"),
        port=3260,
        says=r"tests +2 +2 +2 +0",
    )
