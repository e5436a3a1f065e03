"""One process of the soak, which executes commands.

python -m tests.soak.peer OPTIONS          OPTIONS and all that follows as JSON, a line each

It listens and connects; prints an answer to each command, and between them what it has done.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvloop

import aiordma
from aiordma import Connection, Server, streams
from aiordma._datapath.controls import SPARE_BLOCKS
from aiordma._loop import per_loop_resource
from aiordma.streams import StreamServer
from aiordma.transport import Via
from aiordma.verbs import live
from bench.end import pool_of
from bench.footprint import footprint, peak

from .cutting import cut_short
from .kept import Kept
from .pattern import Patterns
from .plan import CLIENT, CONFIGS, SECURITY, SERVER, Plan, patient
from .session import ENDS, as_planned, stream, talk
from .stranger import Stranger
from .tally import Member
from .tls import NAME, serving, trusting

T = TypeVar("T")

STREAMS = ("stream", "tls")
VIAS: tuple[Via, Via] = ("cm", "tcp")
# Seconds without progress after which a connection counts as hung, on the embedded device.
STUCK = 60.0
# Seconds in which resources end after their connections.
SETTLED = 20.0
SHOWN = 1.0  # seconds between two reports


class Peer(Member):
    """The settings of the process."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options, say)
        self._survives: bool = options["survives"]
        self._slow: float = options["slow"]
        folder = Path(options["folder"])
        self._patterns = Patterns(folder / "patterns")
        self._serving, self._trusting = serving(folder), trusting(folder)
        self._servers: list[Server] = []
        self._stream_servers: list[StreamServer] = []
        self._stream_handlers: set[asyncio.Task[None]] = set()
        self._targets: dict[str, dict[str, Any]] = {}
        self._anchors: list[asyncio.Task[None]] = []
        self._anchored: set[Connection] = set()
        self._pausing = False
        self._exchanging: list[asyncio.Lock] = []
        self._first: Kept | None = None  # with the permanent connections only
        self._closed: Kept | None = None  # with everything closed

    def _how(self, via: Via, config: str) -> dict[str, Any]:
        """The options of a listener, or of a connection."""
        return {
            "device": self._device,
            "via": via,
            "config": patient(CONFIGS[config]),
            **SECURITY[config],
        }

    # ---- commands ------------------------------------------------------------------------

    async def open(self) -> dict[str, int]:
        """Listen by every connection method; return the ports."""
        ports = {}
        for via in VIAS:
            for name in CONFIGS:
                server = await aiordma.start_server(
                    partial(self._serve, name), self._host, **self._how(via, name)
                )
                self._servers.append(server)
                ports[f"{via} {name}"] = server.port
            for kind, tls in (("stream", None), ("tls", self._serving)):
                listening = await aiordma.start_stream_server(
                    self._serve_stream, self._host, ssl=tls, **self._how(via, "default")
                )
                self._stream_servers.append(listening)
                ports[f"{via} {kind}"] = listening.address[1]
        return ports

    async def meet(self, targets: dict[str, dict[str, Any]]) -> None:
        """Set the addresses to connect to."""
        self._targets = targets

    async def run(self, workers: int) -> None:
        """Keep so many connections active."""
        self._pausing = False
        for worker in range(workers):
            chance = random.Random(self._chance.getrandbits(64))
            self._workers.append(self._watched(self._work(chance), f"worker {worker}"))
        if workers and not self._anchors:
            for via in VIAS:
                self._anchors.append(self._watched(self._anchor(via), f"anchor by {via}"))

    async def pause(self) -> None:
        """Stop connecting; return when the connections of this process have ended."""
        self._pausing = True
        await asyncio.gather(*self._workers)
        self._workers.clear()

    async def settle(self) -> str:
        """The growth of resources since the first time, when all connections have ended."""
        grown = "something"
        try:
            async with self._idle_anchors(), asyncio.timeout(SETTLED * self._slow):
                while grown:
                    await asyncio.sleep(0.1)
                    grown = self._grown()
        except TimeoutError:
            places = "\n".join(sorted(map(where, asyncio.all_tasks())))
            grown += f"; tasks:\n{places}"
        return grown

    def _grown(self) -> str:
        """The resources beyond the permanent connections, compared with the first time."""
        more = []
        anchors = 0 if self._anchors else len(self._anchored)
        handlers = sum(server.connections for server in self._servers) - anchors
        if handlers or self._stream_handlers:
            return f"{handlers} connections, {len(self._stream_handlers)} streams"
        gc.collect()
        pools = {pool_of(conn) for conn in self._anchored}
        statistics = [pool.statistics() for pool in pools]
        # Used receives are posted again a few at a time, so a few may be missing.
        receives = sum(receives_of(conn) for conn in self._anchored)
        held = Kept.now(max(0, sum(one.leases for one in statistics) - receives))
        leased = sum(one.leased_bytes for one in statistics)
        if leased > sum(memory_of(conn) for conn in self._anchored):
            more.append(f"{leased} bytes of the pool leased")
        known = sum(one.regions for one in statistics) + sum(
            pool.local_dma_lkey != 0 for pool in pools
        )
        regions = held.objects.pop("MemoryRegion", 0) - known
        if regions:
            more.append(f"{regions} registrations beside the pool's")
        if self._first is None and not more:
            self._first = held
        if self._first is not None:
            more += self._first.growth(held)
        return "; ".join(more)

    @asynccontextmanager
    async def _idle_anchors(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for lock in self._exchanging:
                await stack.enter_async_context(lock)
            yield

    async def close(self) -> dict[str, Any]:
        """Close everything; return the growth since the first time, and the memory."""
        for task in self._anchors:
            task.cancel()
        if self._anchors:
            await asyncio.wait(self._anchors)
        self._anchors.clear()
        self._exchanging.clear()
        for server in self._servers:
            await server.close()
        for listening in self._stream_servers:
            listening.close()
            await listening.wait_closed()
        self._servers.clear()
        self._stream_servers.clear()
        self._anchored.clear()
        await self._nothing_lingers()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._patterns.forget_copies()
        held = Kept.now(0)
        self._closed = self._closed or held
        return {
            "left": [f"{n} {kind}" for kind, n in held.objects.items() if n]
            + self._closed.growth(held),
            "memory": footprint(None)["private"],
            "peak": peak(),
        }

    @staticmethod
    async def _nothing_lingers() -> None:
        """Wait for resources that connections shared, which are kept for a moment after use.

        Anything that is left after that is a leak.
        """
        for _ in range(5 + round(20 * per_loop_resource.IDLE_TIMEOUT)):
            await asyncio.sleep(0.1)
            if not (live().get("Context") or live().get("EventChannel")):
                return

    # ---- listening -----------------------------------------------------------------------

    async def _serve(self, config: str, conn: Connection) -> None:
        try:
            with await conn.recv() as message:
                hello = json.loads(bytes(message))
        except ENDS:
            return  # it ended meanwhile
        if hello == "anchor":
            self._anchored.add(conn)
            try:
                async for message in conn:
                    with message:
                        await conn.send(message)
            finally:
                self._anchored.discard(conn)
            return
        plan = Plan.of(hello["seed"], config, strict=hello["strict"] and self._survives)
        await self._watch(talk(conn, plan, SERVER, self._patterns, self._tally), plan, SERVER)

    async def _serve_stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._stream_handlers.add(task)
        try:
            if not (line := await reader.readline()):
                return
            hello = json.loads(line)
            strict = hello["strict"] and self._survives
            plan = Plan.of(hello["seed"], "default", kind="stream", strict=strict)
            talking = stream((reader, writer), plan, SERVER, self._patterns, self._tally)
            await self._watch(talking, plan, SERVER)
        except ConnectionError:
            return  # before its first line
        finally:
            writer.transport.abort()
            self._stream_handlers.discard(task)

    # ---- connecting ----------------------------------------------------------------------

    async def _work(self, chance: random.Random) -> None:
        while not self._pausing:
            target = self._targets[chance.choice(sorted(self._targets))]
            via, kind = chance.choice(VIAS), chance.choice((*CONFIGS, *CONFIGS, *STREAMS))
            strict = self._survives and target["survives"]
            seed = chance.getrandbits(48)
            is_stream = kind in STREAMS
            config = "default" if is_stream else kind
            plan = Plan.of(seed, config, kind="stream" if is_stream else None, strict=strict)
            port = target["ports"][f"{via} {kind}"]
            hello = json.dumps({"seed": seed, "strict": strict}).encode()
            try:
                if is_stream:
                    await self._stream(chance, via, port, plan, hello, tls=kind == "tls")
                else:
                    await self._connection(chance, via, port, plan, hello)
            except (aiordma.ConnectionManagerError, aiordma.ProtocolError, *ENDS) as error:
                if strict or (isinstance(error, aiordma.ProtocolError) and not broken_off(error)):
                    self._wrong(f"no connection with {target}", error)
                self._tally.count("not reached")
                await asyncio.sleep(0.02)  # the process is being restarted

    async def _connection(
        self, chance: random.Random, via: Via, port: int, plan: Plan, hello: bytes
    ) -> None:
        async def connect() -> Connection:
            return await aiordma.connect(self._host, port, **self._how(via, plan.config))

        conn = await self._begun(chance, connect)
        if conn is None:
            return
        try:
            await conn.send(hello)
            await self._leave_or_not(
                chance, talk(conn, plan, CLIENT, self._patterns, self._tally), plan
            )
        finally:
            if plan.leaves and chance.random() < 0.5:
                conn.abort()
            await conn.close()

    async def _stream(
        self, chance: random.Random, via: Via, port: int, plan: Plan, hello: bytes, *, tls: bool
    ) -> None:
        async def open_connection() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await streams.open_connection(
                self._host,
                port,
                ssl=self._trusting if tls else None,
                server_hostname=NAME if tls else None,
                **self._how(via, "default"),
            )

        begun = await self._begun(chance, open_connection)
        if begun is None:
            return
        _, writer = begun
        try:
            writer.write(hello + b"\n")
            await self._leave_or_not(
                chance, stream(begun, plan, CLIENT, self._patterns, self._tally), plan
            )
        finally:
            writer.transport.abort()

    async def _begun(
        self, chance: random.Random, connect: Callable[[], Coroutine[Any, Any, T]]
    ) -> T | None:
        """Connect; None if cancelled before."""
        if chance.random() < 0.05:
            got = await cut_short(chance, connect)
            if not got:
                self._tally.count("cancelled connects")
                return None
        else:
            got = [await connect()]
        self._tally.count("connections")
        return got[0]

    async def _leave_or_not(
        self, chance: random.Random, talking: Coroutine[Any, Any, None], plan: Plan
    ) -> None:
        task = asyncio.create_task(self._watch(talking, plan, CLIENT))
        if plan.leaves:
            await asyncio.wait([task], timeout=chance.random() ** 2 * self._slow)
            task.cancel()
            self._tally.count("left")
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    async def _anchor(self, via: Via) -> None:
        """A permanent connection, for the whole soak."""
        server = self._targets["server"]
        async with await aiordma.connect(
            self._host, server["ports"][f"{via} default"], **self._how(via, "default")
        ) as conn:
            self._anchored.add(conn)
            await conn.send(b'"anchor"')
            number = 0
            lock = asyncio.Lock()
            self._exchanging.append(lock)
            while True:
                size = self._chance.randint(0, 100_000)
                async with lock:
                    await conn.send(self._patterns.of(number, size))
                    with await conn.recv() as message:
                        self._patterns.check("echo", number, message.data)
                self._tally.count("echo", size)
                number += 1
                await asyncio.sleep(0.05)

    # ---- what is wrong -------------------------------------------------------------------

    async def _watch(self, talking: Coroutine[Any, Any, None], plan: Plan, side: str) -> None:
        try:
            async with asyncio.timeout(STUCK * self._slow):
                await talking
        except TimeoutError as error:
            places = "\n".join(sorted(map(where, asyncio.all_tasks())))
            self._wrong(f"{side} of {plan} is stuck; where tasks are:\n{places}", error)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not as_planned(error, plan, side):
                self._wrong(f"{side} of {plan}", error)
            else:
                self._tally.count("broken")

    def _watched(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task whose failure is reported."""

        async def run() -> None:
            try:
                await coroutine
            except Exception as error:
                self._wrong(name, error)

        return asyncio.create_task(run())

    def heard(self, context: dict[str, Any]) -> None:
        """Report exceptions that reach only the loop's exception handler."""
        self._wrong(f"told to the loop: {context['message']}", context.get("exception"))


def receives_of(conn: Connection) -> int:
    """The blocks of posted receives, before and after a change of their size."""
    config = conn._config
    larger = conn._messages.figures()["larger_blocks"]
    return config.data_receives + config.control_receives + SPARE_BLOCKS + larger


def memory_of(conn: Connection) -> int:
    """The most blocks of the pool in use while nothing is outstanding."""
    return receives_of(conn) * conn._config.max_eager_size


def broken_off(error: aiordma.ProtocolError) -> bool:
    """The other process was killed while it sent its endpoint."""
    return "bootstrap" in str(error)


def where(task: asyncio.Task[Any]) -> str:
    """The stack of a waiting task, outermost first."""
    found = []
    awaited: Any = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        found.append(f"{Path(frame.f_code.co_filename).stem}:{frame.f_lineno}")
        awaited = awaited.cr_await
    return " > ".join(found)


def say(what: object) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


async def main(options: dict[str, Any]) -> None:
    logging.getLogger("aiordma").setLevel(logging.ERROR)  # broken connections are expected here
    loop = asyncio.get_running_loop()
    peer = Stranger(options, say) if options["hostile"] else Peer(options)
    loop.set_exception_handler(lambda _, context: peer.heard(context))
    sys.unraisablehook = lambda it: peer._wrong(
        f"unraisable: {it.err_msg} {it.object!r}", it.exc_value
    )
    reader = asyncio.StreamReader(limit=1 << 20)
    commands, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )

    async def show() -> None:
        while True:
            await asyncio.sleep(SHOWN)
            peer.report()

    showing = asyncio.create_task(show())
    try:
        while line := await reader.readline():
            name, arguments = json.loads(line)
            try:
                answer = await getattr(peer, name)(*arguments)
            except Exception as error:
                peer._wrong(f"could not {name}", error)
                answer = None
            peer.report()
            say({"answer": answer})
    finally:
        showing.cancel()
        commands.close()


if __name__ == "__main__":
    OPTIONS = json.loads(sys.argv[1])
    FACTORY = uvloop.new_event_loop if OPTIONS["loop"] == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=FACTORY) as RUNNER:
        RUNNER.run(main(OPTIONS))
