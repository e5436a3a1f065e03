"""Let the two processes of a transfer find each other over TCP, as real deployments do."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

SIZE = 1 << 24
COUNT = 20
BEFORE, AFTER = 7, 9


def serve(port: int, about: object, meet: Callable[[Any], object] | None = None) -> None:
    """Run the target: describe its memory to an initiator, and wait until the initiator is done.

    With ``meet``, the initiator also describes itself, and waits until ``meet`` returns.
    """
    with socket.create_server(("127.0.0.1", port)) as listening:
        conn, _ = listening.accept()
        with conn, conn.makefile("rw") as stream:
            print(json.dumps(about), file=stream, flush=True)
            if meet is not None:
                meet(json.loads(stream.readline()))
                print("ready", file=stream, flush=True)
            stream.readline()


def initiate(
    port: int, transfer: Callable[[Any], None], meet: Callable[[Any], object] | None = None
) -> None:
    """Run the initiator. The first transfer is not measured, because it sets up the connection."""
    with socket.create_connection(("127.0.0.1", port)) as conn, conn.makefile("rw") as stream:
        about = json.loads(stream.readline())
        if meet is not None:
            print(json.dumps(meet(about)), file=stream, flush=True)
            stream.readline()
        transfer(about)
        start = time.perf_counter()
        for _ in range(COUNT):
            transfer(about)
        print(f"{SIZE * COUNT / (time.perf_counter() - start) / 2**20:.1f} MiB/s")
        print("done", file=stream, flush=True)
