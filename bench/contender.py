"""A way to echo on an event loop: its server in a process of its own, its client in this one.

python -m bench.contender WAY LOOP          the server: prints its port, ends with its input
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from time import perf_counter
from types import TracebackType
from typing import Self

from .ways import WAYS, Echo


def loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loops there are, by name."""
    found: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if find_spec("uvloop"):
        import uvloop  # noqa: PLC0415 - it need not be installed

        found["uvloop"] = uvloop.new_event_loop
    return found


class Contender:
    """Runs in `with`. Its client's event loop stands still while others are measured."""

    def __init__(self, way: str, loop: str) -> None:
        self.name = way if way == "aiordma" else f"{loop} {way}"
        self.loop = loop
        self._way = WAYS[way]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._runner = stack.enter_context(asyncio.Runner(loop_factory=loops()[self.loop]))
            server = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "bench.contender", self._way.name, self.loop],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            assert server.stdin is not None
            assert server.stdout is not None
            stack.callback(server.stdin.close)
            connection = self._way.connect(int(server.stdout.readline()))
            self._echo: Echo = self._runner.run(connection.__aenter__())
            stack.callback(lambda: self._runner.run(connection.__aexit__(None, None, None)))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def round_trips(self, data: bytes, count: int) -> list[float]:
        """The seconds of `count` round trips of a message, each compared, one after another."""
        return self._runner.run(self._round_trips(data, count))

    async def _round_trips(self, data: bytes, count: int) -> list[float]:
        prepared = self._way.prepare(data)
        times = []
        for _ in range(count):
            start = perf_counter()
            back = await self._echo(prepared)
            times.append(perf_counter() - start)
            if bytes(back) != data:
                raise ValueError(f"{self.name}: a message of {len(data)} bytes came back different")
        return times


async def serve(way: str) -> None:
    async with WAYS[way].serve() as port:
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loops()[sys.argv[2]]) as runner:
        runner.run(serve(sys.argv[1]))
