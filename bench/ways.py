"""Ways to move messages between two processes, and what a worker can be asked to measure on each.

Every contender carries messages, not bytes: a receiver handles a message when it is complete.  Over
sockets a message is an 8-byte length and its contents, and the client makes that frame before the
clock starts.
"""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from typing import Protocol

HOST = os.environ.get("AIORDMA_BENCH_HOST", "127.0.0.1")
DEVICE = os.environ.get("AIORDMA_DEVICE", "embedded0")
"""The device, and an address that it has."""

Place = int | str
"""A port, or the path of a Unix socket."""

ENOUGH = b"?"
"""A message that a sink answers: everything before it has arrived."""


class Client(Protocol):
    """One connection."""

    async def echo(self, data: bytes) -> bytes | memoryview:
        """One message there and back; the view is good until the next call."""

    async def echo_many(self, data: bytes, count: int, window: int) -> None:
        """`count` messages there and back, `window` of them under way."""

    async def send_many(self, data: bytes, count: int, window: int) -> None:
        """`count` messages one way, and a word that the last one has arrived."""

    async def send_gather(self, data: bytes, count: int, window: int) -> None:
        """As `send_many`, by coroutines that send one each, `window` of them gathered at a time."""

    async def echo_tasks(self, data: bytes, count: int, window: int) -> None:
        """`count` messages there and back by `window` tasks, each with one under way."""


class Way(Protocol):
    """`serve` gives the places of its services, by name, and serves until it is left.

    "echo" answers each message with the same; "sink" takes messages, and answers ENOUGH.
    """

    def prepare(self, data: bytes) -> bytes:
        """What `Client` takes for a message of these contents."""

    def serve(self, folder: str) -> AbstractAsyncContextManager[dict[str, Place]]: ...

    def connect(self, place: Place) -> AbstractAsyncContextManager[Client]: ...
