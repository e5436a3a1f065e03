"""Test the embedded device's two wires on one host: shared memory, and TCP on request."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.processes import run_python

ROOT = Path(__file__).parents[1]

# A program that connects two queue pairs of one process, sends a message and prints the number of
# open TCP streams.
TALKS = """
import asyncio
import sys
from pathlib import Path

import aiordma

def streams():
    tables = [Path("/proc/self/net", name).read_text() for name in ("tcp", "tcp6")]
    mine = {entry.readlink().name for entry in Path("/proc/self/fd").iterdir()
            if entry.is_symlink()}
    fields = [line.split() for table in tables for line in table.splitlines()[1:]]
    return sum(f[3] == "01" and f"socket:[{f[9]}]" in mine for f in fields)

async def main():
    async with await aiordma.listen("127.0.0.1", 0, device="embedded0") as listener:
        asked = asyncio.create_task(listener.accept())
        async with await aiordma.connect(*listener.address, device="embedded0") as conn:
            async with await asked as peer:
                await conn.send(b"hello")
                assert bytes(await peer.recv()) == b"hello"
                for _ in range(500):  # a stream that the other side has opened too is closing
                    if streams() == int(sys.argv[1]):
                        break
                    await asyncio.sleep(0.01)
                print(streams())

asyncio.run(main())
"""


def run(wire: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(*arguments, AIORDMA_EMBEDDED_LINKS=wire)


@pytest.mark.parametrize(("wire", "streams"), [("shared", 0), ("tcp", 2)])
def test_only_the_tcp_wire_opens_tcp_streams(wire: str, streams: int) -> None:
    done = run(wire, "-c", TALKS, str(streams))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == streams
