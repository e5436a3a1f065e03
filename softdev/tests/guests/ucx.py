"""Rows for UCX over verbs, measured by ucx_perftest."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import Command, Row, Software

SOFTWARE = Software(
    "UCX",
    "ucx-utils",
    apt=("ucx-utils",),
    note="If `UCX_TLS` is not set, processes on the same host use UCX's own shared memory "
    "instead of RDMA. UCX 1.23 needs `UCX_FENCE_MODE=weak` for fences between one-sided "
    "operations. UCX's strong fence issues a READ with an invalid key, and this device rejects "
    "the READ.",
)

# UCX's own shared memory is not among the transports. ud_verbs sets up the connections.
OVER_RDMA = {"UCX_TLS": "rc_verbs,ud_verbs,self", "UCX_NET_DEVICES": "embedded0:1"}
OVER_TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
# These patterns match the median latency and the overall average bandwidth.
UCX_LATENCY = r"(?m)^ +\d+ +([\d.]+)"
UCX_BANDWIDTH = r"(?m)^ +\d+(?: +[\d.]+){4} +([\d.]+)"
UCX_TESTS = [
    ("tag_lat", 8), ("tag_bw", 65536), ("tag_sync_lat", 8), ("stream_lat", 8),
    ("stream_bw", 65536), ("ucp_put_lat", 8), ("ucp_put_bw", 65536), ("ucp_get", 65536),
    ("ucp_add", 8), ("ucp_fadd", 8), ("ucp_swap", 8), ("ucp_cswap", 8), ("ucp_am_lat", 8),
    ("ucp_am_bw", 65536), ("tag_bw", 1 << 20),
]  # fmt: skip


def rows() -> Iterator[Row]:
    for test, size in UCX_TESTS:
        latency = test.endswith("lat") or size == 8
        command = Command(
            f"ucx_perftest -p {{port}} -f -t {test} -s {size} -w 10 {{count}} 127.0.0.1",
            "ucx_perftest -p {port}",
            UCX_LATENCY if latency else UCX_BANDWIDTH,
        )
        yield Row(
            "UCX",
            f"{test} of {size} bytes",
            command,
            100 * size,
            count=("-n 100", "-n 2000"),
            unit="us" if latency else "MB/s",
            environment=OVER_RDMA,
            tcp=command,
            tcp_environment=OVER_TCP,
            quick=test in {"tag_lat", "ucp_get"},
        )
