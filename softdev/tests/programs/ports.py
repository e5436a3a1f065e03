"""Ports for programs that bind a port they are given, or always the same one.

A test cannot bind a port on behalf of its program, and another process may take a free port at any
time. All test runs on this machine therefore share a convention: a port belongs to the process that
holds an abstract Unix socket with the port in its name. The kernel keeps these names per network
namespace, as it does ports, and frees a name when its process ends for any reason (unix(7)). The
ports are outside the range from which the kernel chooses, so other programs do not get them.
"""

from __future__ import annotations

import errno
import random
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

# Port of the embedded device's multicast groups (softdev/src/ud/multicast.c).
MULTICAST_PORT = 14791

# Maximum time in seconds to wait until another test releases the port.
LIMIT = 300.0


def claim(port: int) -> socket.socket | None:
    """Claim a port until the returned socket is closed. Return None if it is already claimed."""
    claimed = socket.socket(socket.AF_UNIX)
    try:
        claimed.bind(f"\0aiordma test port {port}")
    except OSError as error:
        claimed.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return claimed


def is_free(port: int, after_connections: bool = False) -> bool:
    """Return whether a port is free. `after_connections` allows TCP connections in TIME_WAIT."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET6, kind) as probe:
            if after_connections and kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("::", port))
            except OSError:
                return False
    return True


def candidates() -> list[int]:
    """Return the ports outside the kernel's ephemeral range, or all ports if there are none."""
    least, most = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [port for port in range(10000, 65536) if port != MULTICAST_PORT]
    return [port for port in ports if not least <= port <= most] or ports


@contextmanager
def chosen_port() -> Iterator[int]:
    """Claim a random free port and provide its number."""
    ports = candidates()
    while True:
        port = random.choice(ports)
        if (claimed := claim(port)) is None:
            continue
        with closing(claimed):
            if is_free(port):
                yield port
                return


@contextmanager
def fixed_port(port: int, limit: float = LIMIT) -> Iterator[int]:
    """Wait until no other test has claimed a port, claim it, and provide its number."""
    deadline = time.monotonic() + limit
    while (claimed := claim(port)) is None:
        if time.monotonic() > deadline:
            pytest.fail(f"another test has had port {port} for {limit:g} s", pytrace=False)
        time.sleep(0.01)
    with closing(claimed):
        if not is_free(port, after_connections=True):
            pytest.fail(f"port {port} has to be free, but a program has it", pytrace=False)
        yield port
