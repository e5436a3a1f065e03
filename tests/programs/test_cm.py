"""The programs of librdmacm: rping(1) and its relatives."""

from __future__ import annotations

import re

import pytest

from .conftest import run_pair


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_rping(address: str, port: int) -> None:
    """-V: the client compares what the server has read and written back."""
    words = ["rping", "-v", "-V", "-C", "20", "-S", "1000", "-p", str(port), "-a", address]
    server, client = run_pair([*words, "-s"], [*words, "-c"], port)
    for text, prefix in ((server.expect(), "server ping data"), (client.expect(), "ping data")):
        pings = re.findall(rf"^{prefix}: rdma-ping-(\d+): (.*)$", text, re.MULTILINE)
        assert [int(number) for number, _ in pings] == list(range(20))
        assert pings[0][1].startswith("ABCDEFGHIJKLM")
        assert {len(data) + len(f"rdma-ping-{number}: ") for number, data in pings} == {999}
