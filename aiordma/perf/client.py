"""The measurement client, which opens the connections and measures the time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter, process_time
from typing import Any, TypeVar

import aiordma
from aiordma import Config
from aiordma.config import DEFAULT
from aiordma.errors import ProtocolError
from aiordma.transport import Via

from . import memory, wire
from .ends import UNLIMITED, End, Load, Run, device_names, run_concurrently
from .gpu import GPU, GPUMemory
from .machine import garbage_collection_disabled
from .messages import STREAM_LIMIT, Sends, Streams, close, send_over
from .queue_pairs import QueuePair
from .settings import Settings
from .statistics import Summary, Throughput, slices, tail

# The interval between progress samples, in seconds. Each sample also calls the progress callback,
# which may draw to the terminal during the timed part.
SAMPLE_INTERVAL = 0.25

# A message or its response counts as lost after this many seconds without progress.
LOST_AFTER = 2.0

ENDS: dict[str, Callable[[aiordma.Connection], End]] = {
    "send": Sends,
    "write": memory.Writes,
    "read": memory.Reads,
    "atomic": memory.Atomics,
}
ON_GPU: dict[str, type[memory.OneSided]] = {"write": memory.Writes, "read": memory.Reads}

Progress = Callable[[float], None]
Kind = TypeVar("Kind")


class RefusedError(Exception):
    """The server refused the measurement. The message contains the reason."""


@dataclass(slots=True)
class Result:
    """The result of measuring one message size. Times are in seconds."""

    size: int
    operations: int
    seconds: float
    latency: Summary | None = None
    completion: Summary | None = None
    distribution: list[tuple[float, float]] | None = None
    slices: list[Throughput] | None = None
    mismatch: str = ""
    interrupted: bool = False
    cpu: tuple[float, float] = (0.0, 0.0)
    """The CPU time used by the client process and by the server process."""
    lost: int = 0

    @property
    def throughput(self) -> Throughput:
        return Throughput(self.operations, self.size, self.seconds)


@dataclass(slots=True)
class Part:
    """The results of one part of a measurement. Each part runs on all connections."""

    result: Result
    times: list[float]
    marks: list[tuple[float, int]]
    """Progress samples: a time in seconds, and the number of operations completed by then."""


class PerfClient:
    """A client, created by `connect`, that runs a series of measurements against one server."""

    def __init__(
        self,
        settings: Settings,
        control: aiordma.Connection,
        opened: wire.Open,
        ends: list[End],
        server: wire.Opened,
    ) -> None:
        self._settings = settings
        self._control = control
        self._opened = opened
        self._ends = ends
        self._runs: list[Run] = []
        self.stopped: bool = False
        self.server = server
        self.device: str = ""
        """The control connection's device, or the devices of all its rails."""

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        settings: Settings,
        host: str,
        port: int,
        *,
        device: str | None = None,
        via: Via = "cm",
        config: Config = DEFAULT,
        **security: Any,
    ) -> AsyncIterator[PerfClient]:
        """Connect to a server, waiting while it serves other clients.

        Args:
            settings: The measurement settings.
            host: The server's host.
            port: The server's port.
            device: The device, as for `aiordma.connect`.
            via: The connection method, as for `aiordma.connect`.
            config: The connection settings, as for `aiordma.connect`. `send_queue` is increased if
                it is too small for the measurement. `max_message` is derived from `settings`.
            **security: Additional arguments for `aiordma.connect`, such as `auth`.

        Raises:
            RefusedError: If the server refuses the measurement.
            GPUError: If `gpu` is set and no GPU can be used.

        This method can also raise any exception that `aiordma.connect` raises.
        """
        config = replace(
            config,
            send_queue=max(config.send_queue, min(2 * settings.depth, 0xFFFF)),
            max_message=max(*settings.sizes, 1 << 20),
        )
        connect_options: dict[str, Any] = {
            "device": device,
            "via": via,
            "config": config,
            **security,
        }

        async def connection() -> aiordma.Connection:
            conn = await stack.enter_async_context(
                await aiordma.connect(host, port, **connect_options)
            )
            await device_names(conn)  # wait until all rails have connected
            return conn

        async with AsyncExitStack() as stack:
            make_end = ENDS.get(settings.operation)
            if settings.gpu:
                gpu = GPU()
                stack.callback(gpu.close)
                on_gpu = ON_GPU[settings.operation]
                make_end = lambda conn: on_gpu(conn, partial(GPUMemory, gpu))  # noqa: E731
            control = await connection()
            asked = wire.Open(
                wire.VERSION,
                settings.operation,
                settings.connections,
                settings.imm,
                settings.qp,
                settings.depth,
                settings.inline,
                settings.moderation,
            )
            await control.send(wire.pack(asked))
            opened = await receive_response(control, wire.Opened)
            ends: list[End] = []
            for index in range(settings.connections):
                first = wire.Attach(opened.key, index)
                if make_end is None:
                    reader, writer = await aiordma.open_connection(
                        host, opened.port, limit=STREAM_LIMIT, **connect_options
                    )
                    stack.push_async_callback(close, writer)
                    send_over(writer, first)
                    ends.append(Streams(reader, writer))
                else:
                    conn = await connection()
                    await conn.send(wire.pack(first))
                    qp = settings.qp
                    ends.append(QueuePair(conn.device, asked) if qp else make_end(conn))
            client = cls(settings, control, asked, ends, opened)
            client.device = await device_names(control)
            with garbage_collection_disabled():
                yield client

    def stop(self) -> None:
        """End the measurement once the outstanding operations have completed.

        The results so far are kept.
        """
        self.stopped = True
        for run in self._runs:
            run.limit = 0

    async def measure(self, size: int, progress: Progress = lambda part: None) -> Result | None:
        """Run the measurement for one message size.

        Returns None if `stop` was called before the first operation.
        """
        settings = self._settings
        if settings.metric != "lat":
            kind, directions = ("both", 2) if settings.bidirectional else ("flood", 1)
            part = await self._run_warm_up_and_part(kind, size, progress)
            if part is None:
                return None
            result = part.result
            result.operations *= directions
            marks = [(at, directions * done) for at, done in part.marks]
            result.slices = slices(result.throughput, marks, SAMPLE_INTERVAL / 2)
            return result
        # The peer's program takes no part in reads and atomics, so their latency is the time until
        # they complete.
        first = "ping" if settings.halved else "alone"
        # Sends and writes have a second part, which measures the time until they complete.
        parts = 1 if settings.operation in ("read", "atomic", "stream") else 2
        part = await self._run_warm_up_and_part(first, size, lambda done: progress(done / parts))
        if part is None:
            return None
        result = part.result
        factor = 0.5 if settings.halved else 1.0
        result.latency = Summary.of(part.times).scaled(factor)
        result.distribution = [(time * factor, above) for time, above in tail(part.times)]
        if settings.operation in ("read", "atomic"):
            result.completion = result.latency
        elif parts == 2 and not self.stopped:
            more = await self._run_warm_up_and_part(
                "alone", size, lambda done: progress(0.5 + done / 2)
            )
            if more is not None:
                result.completion = Summary.of(more.times)
                result.mismatch = result.mismatch or more.result.mismatch
        result.interrupted = self.stopped
        return result

    async def _run_warm_up_and_part(self, kind: str, size: int, progress: Progress) -> Part | None:
        """Run the warm-up and then the timed part. `kind` is one of the ways described in `ends`.

        Returns None if no operation ran. If the warm-up finds a mismatch, its part is returned.
        """
        settings = self._settings
        warm_up, limit = settings.warm_up_for(size), settings.iterations_per_connection()
        if warm_up:
            warm = await self._run_part(kind, size, warm_up, None, lambda done: None)
            if warm.result.mismatch:
                return warm
        duration = settings.duration if limit is None else None
        part = await self._run_part(kind, size, limit or UNLIMITED, duration, progress)
        return part if part.result.operations else None

    async def _run_part(
        self, kind: str, size: int, limit: int, duration: float | None, progress: Progress
    ) -> Part:
        settings, seed = self._settings, int.from_bytes(os.urandom(7))
        # For the server, `alone` is like `flood`: it does not respond to the operations.
        server_way = kind if kind in wire.WAYS else "flood"
        load = Load.of(self._opened, server_way, seed, size, serving=False)
        with ExitStack() as stack:
            for end in self._ends:
                stack.callback(end.release)
            tokens = [end.prepare(load) for end in self._ends]
            begin = wire.Begin(server_way, size, seed, settings.verify_all, tokens)
            begun = await self._request(begin, wire.Begun)
            for end, token in zip(self._ends, begun.tokens, strict=True):
                end.use(token)
            limit = 0 if self.stopped else limit
            self._runs = [
                Run(limit, settings.depth, settings.batch, settings.verify_all) for _ in self._ends
            ]
            start, cpu = perf_counter(), process_time()
            marks = await self._run_on_all_connections(kind, duration, progress, start)
            # With UC and UD, stop the clock here, because the server may wait for lost messages
            # before it sends `Reached`.
            seconds, used = perf_counter() - start, process_time() - cpu
            done = [run.done for run in self._runs]
            reached = await self._request(wire.Finish(done), wire.Reached)
            if settings.qp not in ("uc", "ud"):
                seconds, used = perf_counter() - start, process_time() - cpu
            finished = await receive_response(self._control, wire.Finished)
            mismatches = [finished.mismatch] + [
                run.mismatch or end.verify(run.done, 0 if server_way == "flood" else run.done)
                for end, run in zip(self._ends, self._runs, strict=True)
            ]
        result = Result(
            size,
            sum(done),
            seconds,
            mismatch=next(filter(None, mismatches), ""),
            interrupted=self.stopped,
            cpu=(used, reached.cpu_us / 1e6),
            lost=reached.lost,
        )
        return Part(result, [time for run in self._runs for time in run.times], marks)

    async def _run_on_all_connections(
        self, kind: str, duration: float | None, progress: Progress, start: float
    ) -> list[tuple[float, int]]:
        """Run the operations on all connections. Returns the samples, as in `Part.marks`."""
        loop = asyncio.get_running_loop()
        timer: asyncio.Handle | None = None
        marks: list[tuple[float, int]] = []

        def sample() -> None:
            """Record the progress, and stop starting operations when the duration is over."""
            nonlocal timer
            passed = perf_counter() - start
            done = sum(run.done for run in self._runs)
            marks.append((passed, done))
            if duration is not None and passed >= duration:
                for run in self._runs:
                    # A limit of 1 instead of 0 ensures that at least one operation runs.
                    run.limit = min(run.limit, 1)
                return
            whole = sum(run.limit for run in self._runs)
            progress(passed / duration if duration is not None else done / max(whole, 1))
            pause = SAMPLE_INTERVAL
            if duration is not None:
                pause = min(pause, duration - passed)
            timer = loop.call_later(pause, sample)

        timer = loop.call_soon(sample)
        try:
            ends = zip(self._ends, self._runs, strict=True)
            coroutines = [getattr(end, kind)(run) for end, run in ends]
            if self._settings.qp and kind in ("ping", "both"):
                coroutines = list(map(raise_if_stalled, self._runs, coroutines))
            await run_concurrently(coroutines)
        finally:
            timer.cancel()
        return marks

    async def _request(self, message: wire.Wire, kind: type[Kind]) -> Kind:
        await self._control.send(wire.pack(message))
        return await receive_response(self._control, kind)


async def raise_if_stalled(run: Run, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, and raise TimeoutError if `run` makes no progress for LOST_AFTER seconds."""
    working = asyncio.ensure_future(work)
    before = -1
    try:
        while not (await asyncio.wait({working}, timeout=LOST_AFTER))[0]:
            if run.done == before:
                raise TimeoutError(f"message {run.done} or its response was lost")
            before = run.done
        await working
    finally:
        working.cancel()


async def receive_response(control: aiordma.Connection, kind: type[Kind]) -> Kind:
    """Receive the server's next response. Raises RefusedError if the server refuses."""
    with await control.recv() as message:
        response = wire.unpack(bytes(message))
    if isinstance(response, wire.Refused):
        raise RefusedError(f"the perf server refused the measurement: {response.text}")
    if not isinstance(response, kind):
        raise ProtocolError(
            f"the perf server sent {type(response).__name__} instead of {kind.__name__}"
        )
    return response
