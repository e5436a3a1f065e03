"""Strangers that connect, send some bytes or none, and stay silent until they are told to leave.

Run as `python -m tests.transport.silent_crowd HOST PORT ONE MANY BYTES`. ONE strangers connect from
HOST, and MANY strangers each from a different address in 127.0.0.0/8. All of them send BYTES
(hexadecimal). The program prints "ready" when all are connected, and closes them at the end of its
input.
"""

from __future__ import annotations

import ipaddress
import resource
import socket
import sys
from contextlib import suppress

FIRST = int(ipaddress.IPv4Address("127.77.0.1"))


def main() -> None:
    host, port, one, many, text = sys.argv[1:]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sources = [host] * int(one)
    sources += [str(ipaddress.IPv4Address(FIRST + n)) for n in range(int(many))]
    crowd = []
    for source in sources:
        silent = socket.socket()
        silent.bind((source, 0))
        silent.connect((host, int(port)))
        with suppress(ConnectionError):  # it may have been hung up on already
            silent.sendall(bytes.fromhex(text))
        crowd.append(silent)
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
