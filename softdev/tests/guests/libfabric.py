"""Rows for libfabric's verbs provider, alone and with its layers for reliable datagrams."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import Command, Row, Software

SOFTWARE = Software(
    "libfabric",
    "libfabric1",
    apt=("libfabric-bin",),
    note="Debian does not package fabtests. If you run its programs, pass the address of a "
    "network interface to `-s`, because the verbs provider drops the port "
    "from a loopback address.",
)

# After the size (64 bytes), the columns are #sent, #ack, total, time, MB/sec and us/transfer.
TIME = r"(?m)^64 +\S+ +\S+ +\S+ +\S+ +[\d.]+ +([\d.]+)"


def pingpong(provider: str, endpoint: str) -> Command:
    words = f"fi_pingpong -p '{provider}' -e {endpoint} -S 64 {{count}}"
    return Command(f"{words} -P {{port}} 127.0.0.1", f"{words} -B {{port}}", TIME)


def rows() -> Iterator[Row]:
    for provider, endpoint, like in (
        ("verbs", "msg", "msg"),
        ("verbs;ofi_rxm", "rdm", "rdm"),
        ("verbs", "dgram", "rdm"),
        ("verbs;ofi_rxd", "rdm", "rdm"),
    ):
        yield Row(
            "libfabric",
            f"fi_pingpong, {provider}, {endpoint}",
            pingpong(provider, endpoint),
            2 * 100 * 64,
            count=("-I 100", "-I 2000"),
            unit="us/transfer",
            tcp=pingpong("tcp", like),
            quick=endpoint == "msg",
        )
