"""Ports are given to one test at a time."""

from __future__ import annotations

import socket

import pytest

from . import ports


def test_a_port_has_one_owner(port: int) -> None:
    assert ports.claim(port) is None
    with pytest.raises(pytest.fail.Exception, match=f"has had port {port}"):
        ports.fixed_port(port, limit=0).__enter__()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_with_a_socket_is_not_free(port: int, kind: socket.SocketKind) -> None:
    assert ports.is_free(port)
    with socket.socket(socket.AF_INET, kind) as taking:
        taking.bind(("127.0.0.1", port))
        assert not ports.is_free(port)
    assert ports.is_free(port)
