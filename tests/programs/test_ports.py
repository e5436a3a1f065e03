"""Ports are given to one test at a time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from . import ports

HOLDER = """
import sys, time
from tests.programs import ports
claimed = ports.claim(int(sys.argv[1]))
print(claimed is not None, flush=True)
time.sleep(1000)
"""


def test_a_port_has_one_owner(port: int) -> None:
    assert ports.claim(port) is None
    with pytest.raises(pytest.fail.Exception, match=f"has had port {port}"):
        ports.fixed_port(port, limit=0).__enter__()


def test_a_chosen_port_is_not_chosen_again(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with ports.chosen_port() as other:
        pass
    monkeypatch.setattr(ports, "candidates", lambda: [port, other])
    for _ in range(20):
        with ports.chosen_port() as chosen:
            assert chosen == other


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_with_a_socket_is_not_free(port: int, host: str, kind: socket.SocketKind) -> None:
    assert ports.is_free(port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, kind) as taking:
        taking.bind((host, port))
        if kind == socket.SOCK_STREAM:
            taking.listen()
        assert not ports.is_free(port)
        assert not ports.is_free(port, after_connections=True)
    assert ports.is_free(port)


def test_the_port_of_a_process_that_was_killed_has_no_owner() -> None:
    number = 100_000 + os.getpid()  # no port, so that no other test can choose it
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(number)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert ports.claim(number) is None
        holder.kill()
    claimed = ports.claim(number)
    assert claimed is not None
    claimed.close()
