"""A server that is killed again and again, also in the middle of handshakes, and started anew.

Run as `python -m tests.transport.restarting DEVICE VIA HOST KILLS SEED LOG`.  It prints its port,
and later the kills that hit a handshake.  Each server is a fork of this process, which has imported
everything.  It kills itself at a step that the seed chooses: a call of one of `STEPS`, before or
after its effect, or a message.  The last server lives until this process's input ends.

Before a server answers a message, it appends the message to LOG.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from aiordma import Config, Connection, start_server
from aiordma._transport.acceptor import Acceptor
from aiordma._transport.auth import KeyProof
from aiordma._transport.connect_attempt import ConnectAttempt
from aiordma.transport import Via

KEY = b"the key of the tests of restarts"

# Soon full of connections whose clients were cut off, were they not given back.
CONFIG = Config(close_timeout=0.2, eager_size=1024, max_eager_size=1024, max_connections=64)

# What a server does for a connection before its handler runs, in this order.
STEPS = (
    (Acceptor, "admit"),
    (Acceptor, "take_place"),
    (ConnectAttempt, "post_receives"),
    (ConnectAttempt, "start"),
    (KeyProof, "control"),
)

# So many calls of those belong to the first connections, and so many messages may follow them.
MOST_STEPS = 16
MOST_MESSAGES = 40


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Death:
    """Kills this process at one of its steps, or never."""

    def __init__(self, chance: random.Random) -> None:
        self.in_handshake = chance.random() < 0.6
        self._left = chance.randrange(1, MOST_STEPS if self.in_handshake else MOST_MESSAGES)
        self._before = chance.random() < 0.5
        if self.in_handshake:
            for cls, name in STEPS:
                setattr(cls, name, self._counted(getattr(cls, name)))

    def _counted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def counted(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0 and self._before:
                die()
            result = step(*arguments, **options)
            if self._left == 0:
                die()
            return result

        return counted

    def message(self) -> None:
        """A message has been executed, and is not answered yet."""
        if not self.in_handshake:
            self._left -= 1
            if self._left == 0:
                die()


async def serve(
    device: str, via: str, host: str, port: int, log: int, death: Death | None, told: int
) -> None:
    async def execute(conn: Connection) -> None:
        async for message in conn:
            with message:
                data = bytes(message)
            os.write(log, data + b"\n")  # one write of a file opened with O_APPEND is atomic
            if death is not None:
                death.message()
            await conn.send(data)

    async with await start_server(
        execute, host, port, device=device, via=cast(Via, via), config=CONFIG, auth=KEY
    ) as server:
        os.write(told, server.port.to_bytes(2, "big"))
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main(device: str, via: str, host: str, kills: str, seed: str, path: str) -> None:
    chance = random.Random(int(seed))
    log = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    port = hits = 0
    for number in range(int(kills) + 1):
        told, tell = os.pipe()
        death_seed = chance.random() if number < int(kills) else None
        if (child := os.fork()) == 0:
            death = Death(random.Random(death_seed)) if death_seed is not None else None
            asyncio.run(serve(device, via, host, port, log, death, tell))
            return
        os.close(tell)
        if not port:
            port = int.from_bytes(os.read(told, 2), "big")
            print(port, flush=True)
        os.close(told)
        if death_seed is None:
            print(hits, flush=True)
        _, status = os.waitpid(child, 0)
        if death_seed is not None and status:  # else the test has failed and closed our input
            assert os.WIFSIGNALED(status), f"server {number} ended with {status:#x}"
            assert os.WTERMSIG(status) == signal.SIGKILL
            hits += random.Random(death_seed).random() < 0.6


if __name__ == "__main__":
    main(*sys.argv[1:])
