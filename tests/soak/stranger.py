"""A hostile process: what hosts and users without the key can do to the listeners of a soak.

Each worker repeats one of `ATTACKS` at random. What it must not reach counts as wrong: a connection
with a listener that asks for a key, memory that was not shared with it.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import aiordma
from aiordma import RegionToken, Rights
from aiordma.transport import Via

from ..transport.connection_factory import forged
from .plan import CONFIGS, patient
from .tally import Member

WRONG_KEY = b"known to no process of the soak"
VIAS: tuple[Via, Via] = ("cm", "tcp")
# Silent sockets that one worker keeps at a time, and for how many seconds at most.
SILENT, HELD = 60, 3.0
LARGEST = 4096
# Errors that end an attack, as they should.
ENDS = (OSError, aiordma.RDMAError, asyncio.IncompleteReadError)


class Stranger(Member):
    """The attacks of one process, against the listeners that it has met."""

    def __init__(self, options: dict[str, Any], say: Callable[[object], None]) -> None:
        super().__init__(options, say)
        self._targets: list[dict[str, int]] = []

    # ---- commands ------------------------------------------------------------------------

    async def open(self) -> dict[str, int]:
        """It does not listen."""
        return {}

    async def meet(self, targets: dict[str, dict[str, Any]]) -> None:
        """Set the ports to attack."""
        self._targets = [target["ports"] for target in targets.values()]

    async def run(self, workers: int) -> None:
        """Attack from now on."""
        for _ in range(workers):
            chance = random.Random(self._chance.getrandbits(64))
            self._workers.append(asyncio.create_task(self._work(chance)))

    async def pause(self) -> None:
        """Stop, whatever is under way."""
        for worker in self._workers:
            worker.cancel()
        for worker in self._workers:
            try:
                await worker
            except asyncio.CancelledError:
                pass
            except Exception as error:
                self._wrong("an attack ended otherwise than it may", error)
        self._workers.clear()

    # ---- attacks -------------------------------------------------------------------------

    async def _work(self, chance: random.Random) -> None:
        while True:
            attack = chance.choice(ATTACKS)
            try:
                await attack(self, chance)
            except ENDS:
                self._tally.count("attacks that were turned away")
            else:
                self._tally.count("attacks that ended")
            await asyncio.sleep(chance.random() * 0.1)

    def _port(self, chance: random.Random, *names: str) -> int:
        ports = chance.choice(self._targets)
        return ports[chance.choice(names)]

    async def _silence(self, chance: random.Random) -> None:
        """Sockets that say nothing, to the exchange and to the streams' listeners."""
        made: list[socket.socket] = []
        loop = asyncio.get_running_loop()
        try:
            for _ in range(chance.randint(1, SILENT)):
                silent = socket.socket()
                made.append(silent)
                silent.setblocking(False)
                port = self._port(chance, "tcp default", "tcp small", "tcp stream")
                async with asyncio.timeout(HELD):
                    await loop.sock_connect(silent, (self._host, port))
            await asyncio.sleep(chance.random() * HELD)
        except TimeoutError:
            pass  # the listener's backlog is full
        finally:
            for silent in made:
                silent.close()

    async def _nonsense(self, chance: random.Random) -> None:
        """Bytes that are no handshake, until the listener hangs up."""
        port = self._port(chance, "tcp default", "tcp small", "tcp tls")
        reader, writer = await asyncio.open_connection(self._host, port)
        try:
            begin = chance.choice((b"", b"GET / HTTP/1.0\r\n\r\n", b"aiordma\x01", b"\x16\x03\x01"))
            writer.write(begin + chance.randbytes(chance.randint(1, LARGEST)))
            async with asyncio.timeout(HELD):
                await reader.read()
        except TimeoutError:
            pass  # it waits for the rest
        finally:
            writer.transport.abort()

    async def _connect(self, chance: random.Random, name: str, auth: bytes | None) -> None:
        via = chance.choice(VIAS)
        conn = await aiordma.connect(
            self._host,
            self._port(chance, f"{via} {name}"),
            device=self._device,
            via=via,
            config=patient(CONFIGS[name]),
            auth=auth,
        )
        try:
            if name == "small":
                self._wrong(f"admitted by {via} with {auth!r} as its key")
            await self._guess(conn, chance)
        finally:
            conn.abort()
            await conn.close()

    async def _other_key(self, chance: random.Random) -> None:
        await self._connect(chance, "small", WRONG_KEY)

    async def _no_key(self, chance: random.Random) -> None:
        await self._connect(chance, "small", None)

    async def _half(self, chance: random.Random) -> None:
        """A handshake that is given up at some moment."""
        try:
            async with asyncio.timeout(chance.random() * 0.02):
                await self._connect(chance, chance.choice(("default", "small")), WRONG_KEY)
        except TimeoutError:
            pass

    async def _wild(self, chance: random.Random) -> None:
        """A connection where no key is asked for, and one-sided operations on guessed memory."""
        await self._connect(chance, "default", None)

    async def _guess(self, conn: aiordma.Connection, chance: random.Random) -> None:
        hello = {"seed": chance.getrandbits(48), "strict": False}
        await conn.send(json.dumps(hello).encode())
        address = secrets.randbits(46) & ~7
        token = RegionToken(
            1, address, 64, secrets.randbits(32), Rights.READ | Rights.WRITE | Rights.ATOMIC, 0
        )
        region = forged(conn, token)
        operation = chance.choice(
            (
                lambda: conn.read(region, bytearray(64)),
                lambda: conn.write(bytes(64), region),
                lambda: conn.fetch_and_add(region[:8], 0),
            )
        )
        await operation()
        self._wrong(f"reached {token!r}, which it has guessed")

    def heard(self, context: dict[str, Any]) -> None:
        """Its own loop's complaints are not of interest: it is cut off all the time."""


ATTACKS: tuple[Callable[[Stranger, random.Random], Coroutine[Any, Any, None]], ...] = (
    Stranger._silence,
    Stranger._nonsense,
    Stranger._other_key,
    Stranger._no_key,
    Stranger._half,
    Stranger._wild,
)
