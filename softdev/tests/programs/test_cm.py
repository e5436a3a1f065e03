"""Tests of the programs of librdmacm, such as rping(1)."""

from __future__ import annotations

import re
import sys

import pytest

from .conftest import is_member, run_pair, run_pair_when, run_program
from .ports import fixed_port


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_rping_exchanges_verified_pings(address: str, port: int) -> None:
    """With -V, the client checks the data that the server has read and written back."""
    words = ["rping", "-v", "-V", "-C", "20", "-S", "1000", "-p", str(port), "-a", address]
    server, client = run_pair([*words, "-s"], [*words, "-c"], port)
    for text, prefix in ((server.expect(), "server ping data"), (client.expect(), "ping data")):
        pings = re.findall(rf"^{prefix}: rdma-ping-(\d+): (.*)$", text, re.MULTILINE)
        assert [int(number) for number, _ in pings] == list(range(20))
        assert pings[0][1].startswith("ABCDEFGHIJKLM")
        assert {len(data) + len(f"rdma-ping-{number}: ") for number, data in pings} == {999}


@pytest.mark.parametrize("options", ["", "-c 4 -C 20 -S 5000", "-m"])
def test_ucmatose_transfers_messages(options: str, port: int) -> None:
    """With -m, the events of the connections migrate to another channel."""
    words = ["ucmatose", "-p", str(port), *options.split()]
    server, client = run_pair([*words, "-b", "127.0.0.1"], [*words, "-s", "127.0.0.1"], port)
    for done in (server, client):
        assert done.expect().splitlines()[-1] == "return status 0"
        assert "data transfers complete" in done.text
        assert "error" not in done.text + done.errors


UDADDY_PORT = 7174  # it has no option for another one


def test_udaddy_transfers_datagrams() -> None:
    words = ["udaddy", "-C", "20", "-S", "1000", "-c", "3"]
    with fixed_port(UDADDY_PORT) as port:
        server, client = run_pair([*words, "-b", "127.0.0.1"], [*words, "-s", "127.0.0.1"], port)
    for done in (server, client):
        assert done.expect().splitlines()[-1] == "return status 0"
        assert "data transfers complete" in done.text


def test_rdma_server_and_client_exit_successfully(port: int) -> None:
    """These programs use rdma_create_ep and blocking calls. See rdma_server(1)."""
    server, client = run_pair(
        ["rdma_server", "-p", str(port)], ["rdma_client", "-s", "127.0.0.1", "-p", str(port)], port
    )
    assert server.expect() == "rdma_server: start\nrdma_server: end 0\n"
    assert client.expect() == "rdma_client: start\nrdma_client: end 0\n"


def test_mckey_transfers_multicast_datagrams(port: int) -> None:
    """The group is derived from the port, so no other test uses it."""
    group = f"239.70.{port >> 8}.{port & 255}"
    words = ["mckey", "-m", group, "-b", "127.0.0.1", "-C", "20", "-S", "1000"]
    receiver, sender = run_pair_when(lambda: is_member(group), words, [*words, "-s"])
    for done in (receiver, sender):
        assert done.expect().splitlines()[-1] == "return status 0"
        assert "data transfers complete" in done.text


def test_rdma_xserver_and_xclient_exit_successfully(port: int) -> None:
    """The id creates a queue pair with a shared receive queue. See rdma_xserver(1)."""
    server, client = run_pair(
        ["rdma_xserver", "-c", "r", "-p", str(port)],
        ["rdma_xclient", "-c", "r", "-s", "127.0.0.1", "-p", str(port)],
        port,
    )
    assert server.expect() == "rdma_xserver: start\nrdma_xserver: end 0\n"
    assert client.expect() == "rdma_xclient: start\nrdma_xclient: end 0\n"


@pytest.mark.parametrize("program", ["rstream", "riostream"])
def test_rsocket_programs_report_missing_rsockets(program: str) -> None:
    done = run_program(program, "-s", "127.0.0.1")
    assert done.status != 0
    assert "rsocket failed: Operation not supported" in done.text + done.errors
    assert done.errors.count("the embedded device has no rsockets") == 1


def test_librspreload_reports_that_it_uses_kernel_tcp() -> None:
    """It is preloaded within the program, because `aiordma run` refuses to start with it."""
    preload = "/usr/lib/*/rsocket/librspreload.so"
    program = "import socket; socket.socket(); socket.socket(); print('went on')"
    done = run_program(
        "sh", "-c", f'LD_PRELOAD="$LD_PRELOAD:$(echo {preload})" exec "$0" -c "$1"',
        sys.executable, program,
    )  # fmt: skip
    assert done.expect() == "went on\n"
    (line,) = done.errors.splitlines()
    assert "it uses the kernel's TCP instead of RDMA" in line
