"""One machine of a test: runs in a network namespace and executes commands.

Run it as `python -m tests.network.agent`. Each input line is a JSON object with a number, the name
of a method of `Agent` and its arguments. Each output line has the number and the result or error.
Several commands may run at the same time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, cast

import aiordma
from aiordma import verbs
from aiordma.transport import Via
from aiordma.verbs import (
    GID,
    GRH_SIZE,
    AccessFlags,
    Destination,
    Endpoint,
    QPCapabilities,
    QPType,
    ScatterGatherElement,
)
from tests.transport.connection_factory import ALL, KEY, UNTIMED, pattern

# Disable the connection's time limits and keep-alive. The tests then exercise only the device's
# path timeout and the kernel's keep-alive probes.
LIMITLESS = replace(UNTIMED, keep_alive=None)
PART = 2 << 20  # bytes in each memory part: send, receive and remote access
SECONDS = 100.0  # timeout for prompt events on the slowest machine


class QueuePair:
    """A queue pair for the agent's commands. Its memory has three parts of PART bytes each."""

    def __init__(self, stack: ExitStack, device: str, kind: str, ip: str) -> None:
        context = stack.enter_context(verbs.find_device(device).open())
        self.pd = stack.enter_context(context.alloc_pd())
        channel = stack.enter_context(context.create_comp_channel())
        self.mr = stack.enter_context(
            self.pd.reg_mr(
                3 * PART,
                AccessFlags.LOCAL_WRITE
                | AccessFlags.REMOTE_WRITE
                | AccessFlags.REMOTE_READ
                | AccessFlags.REMOTE_ATOMIC,
            )
        )
        # Separate queues let a test wait for sends and receives independently.
        self.sends = stack.enter_context(context.create_cq(128, channel))
        self.receives = stack.enter_context(context.create_cq(128, channel))
        self.qp = stack.enter_context(
            self.pd.create_qp(
                self.sends,
                self.receives,
                QPCapabilities(max_send_wr=64, max_recv_wr=64),
                qp_type=QPType[kind],
            )
        )
        entry = next(entry for entry in context.query_gid_table() if str(entry.gid.ip) == ip)
        self.header = GRH_SIZE if kind == "UD" else 0
        self.endpoint = self.qp.endpoint(entry)
        self._stack = stack
        self._to: Destination | None = None

    def bring_up(self, peer: str, ack_timeout: float) -> None:
        remote = Endpoint.unpack(bytes.fromhex(peer))
        if self.header:
            self.qp.start(self.endpoint)
            self._to = self.qp.destination(self.endpoint, remote)
            self._stack.push(self._to.ah)
        else:
            rights = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
            self.qp.connect(self.endpoint, remote, access=rights, timeout=ack_timeout)

    def join(self, group: str) -> None:
        self._stack.enter_context(self.qp.attach_mcast(GID.from_ip(group)))

    def longest_datagram(self) -> int:
        return self.qp.context.query_port().active_mtu.bytes

    def state(self) -> str:
        return self.qp.query().qp_state.name

    def wire(self) -> str | None:
        return self.qp.wire

    def piece(self, part: int, offset: int, size: int) -> ScatterGatherElement:
        return ScatterGatherElement(self.mr.addr + part * PART + offset, size, self.mr.lkey)

    def content(self, part: int, offset: int, size: int) -> bytes:
        return bytes(self.mr.buf[part * PART + offset : part * PART + offset + size])

    def put(self, offset: int, data: bytes) -> None:
        self.mr.buf[offset : offset + len(data)] = data

    def statuses(self, cq: verbs.CompletionQueue, count: int) -> list[str]:
        """Return the statuses of the next completions, or fewer if they do not arrive in time."""
        found: list[str] = []
        while len(found) < count:
            got = cq.wait(count - len(found), timeout=SECONDS)
            if not got:
                break
            found += [wc.status.name for wc in got]
        return found

    def post(self, count: int, size: int) -> None:
        """Post `count` receives for messages of `size` bytes."""
        room = size + self.header
        with self.qp.recv_batch() as batch:
            for n in range(count):
                batch.recv([self.piece(1, n * room, room)], wr_id=n)

    def received(self, n: int, size: int) -> bytes:
        return self.content(1, n * (size + self.header) + self.header, size)

    def begin_sending(self, count: int, size: int, seed: int = 0) -> None:
        with self.qp.batch() as batch:
            for n in range(count):
                self.put(n * size, pattern(size, seed + n))
                batch.send([self.piece(0, n * size, size)], wr_id=n, to=self._to)

    def sent(self, count: int) -> list[str]:
        """Return the statuses of the sends posted by `begin_sending`."""
        return self.statuses(self.sends, count)

    def send(self, count: int, size: int, seed: int = 0) -> list[str]:
        self.begin_sending(count, size, seed)
        return self.sent(count)

    def receive(self, count: int, size: int, seed: int = 0) -> list[str]:
        """Return the statuses of posted receives. Check the contents if all have succeeded."""
        told = self.statuses(self.receives, count)
        if told == ["SUCCESS"] * count:
            wrong = [n for n in range(count) if self.received(n, size) != pattern(size, seed + n)]
            assert not wrong, f"receives {wrong} have other bytes than were sent"
        return told

    def reach(self, address: int, rkey: int, size: int, seed: int = 0) -> list[str]:
        """Write to the peer's memory, read it back, and add to a word in it atomically."""
        data = pattern(size, seed)
        self.put(0, data)
        with self.qp.batch() as batch:
            batch.write([self.piece(0, 0, size)], address + 2 * PART + 8, rkey)
            batch.read([self.piece(1, 0, size)], address + 2 * PART + 8, rkey)
            batch.fetch_and_add(self.piece(1, size + -size % 8, 8), address + 2 * PART, rkey, 7)
        statuses = self.sent(3)
        assert self.content(1, 0, size) == data
        return statuses


class Agent:
    """The agent's commands for one device."""

    def __init__(self, device: str) -> None:
        self._device = device
        # Only an authenticated peer may use rails at addresses other than that of the link.
        self._auth = KEY if device == "all" else None
        self._stack = ExitStack()
        self.qp: QueuePair | None = None
        self._listener: aiordma.Listener | None = None
        self._conn: aiordma.Connection | None = None
        self._serving: asyncio.Task[None] | None = None
        self._events: aiordma.DeviceEvents | None = None

    # ---- connections ------------------------------------------------------------------------

    @property
    def conn(self) -> aiordma.Connection:
        assert self._conn is not None
        return self._conn

    async def listen(self, host: str, via: str) -> int:
        self._listener = await aiordma.listen(
            host, 0, device=self._device, via=cast(Via, via), config=LIMITLESS, auth=self._auth
        )
        return self._listener.port

    async def serve(self) -> list[Any]:
        """Accept a connection and echo its messages in a task. Return its peer's address."""
        assert self._listener is not None
        self._conn = await self._listener.accept()

        async def echo() -> None:
            with suppress(aiordma.RDMAError):
                async for message in self.conn:
                    with message:
                        await self.conn.send(message)

        self._serving = asyncio.create_task(echo())
        return list(self.conn.peer_address or ())

    async def connect(
        self, host: str, port: int, via: str, seconds: float = SECONDS, source: str | None = None
    ) -> list[Any]:
        config = replace(LIMITLESS, connect_timeout=seconds)
        self._conn = await aiordma.connect(
            host,
            port,
            device=self._device,
            via=cast(Via, via),
            source=None if source is None else (source, 0),
            config=config,
            auth=self._auth,
        )
        return list(self.conn.local_address or ())

    async def rails(self) -> list[list[str]]:
        """Return the device, state and address of each rail once none is connecting."""
        conn = self.conn
        states = {"connecting"}
        while "connecting" in states or len(conn.rails) < 2:
            await asyncio.sleep(0)
            states = {rail.state for rail in conn.rails}
        assert conn._rails is not None
        _, further = conn._rails.rails
        assert further.endpoint is not None
        assert conn.local_address is not None
        addresses = conn.local_address[0], str(GID(further.endpoint.endpoint.gid).ip)
        return [
            [rail.device, rail.state, address]
            for rail, address in zip(conn.rails, addresses, strict=True)
        ]

    async def echo(self, count: int, size: int) -> None:
        """Send messages while receiving and checking their echoes."""
        conn = self.conn

        async def send() -> None:
            for n in range(count):
                await conn.send(pattern(size, n))

        sending = asyncio.create_task(send())
        try:
            for n in range(count):
                with await conn.recv() as message:
                    assert message == pattern(size, n), f"message {n} is not what was sent"
            await sending
        finally:
            sending.cancel()

    async def one_sided(self, rounds: int, size: int) -> None:
        """Write, read back and atomically increment memory that is borrowed from the peer."""
        conn = self.conn
        remote = await conn.request_region(size + 8, access=ALL)
        back = bytearray(size)
        for n in range(rounds):
            data = pattern(size, n)
            await conn.write(data, remote[8:])
            await conn.read(remote[8:], back)
            assert back == data, f"round {n}: what is read is not what was written"
            assert await conn.fetch_and_add(remote[:8], 3) == 3 * n
        await remote.release()

    async def ended(self) -> list[str]:
        """Wait until the connection ends. Return the error, its text and its cause."""
        try:
            await self.conn.wait_closed()
            if self._serving is not None:
                await self._serving
            (await self.conn.recv()).release()
        except aiordma.RDMAError as error:
            return [type(error).__name__, str(error), str(error.__cause__)]
        raise AssertionError("the connection has not ended")

    async def close(self) -> None:
        for it in (self._conn, self._listener):
            if it is not None:
                await it.close()
        if self._serving is not None:
            await self._serving
        self._conn = self._listener = self._serving = None

    async def make(self, kind: str, ip: str) -> dict[str, Any]:
        """Create the queue pair that this agent's later commands use."""
        self.qp = QueuePair(self._stack, self._device, kind, ip)
        mr = self.qp.mr
        return {"peer": self.qp.endpoint.pack().hex(), "address": mr.addr, "rkey": mr.rkey}

    # ---- the device -------------------------------------------------------------------------

    async def gids(self) -> dict[str, int]:
        """Return the GID index of each address."""
        with verbs.find_device(self._device).open() as context:
            return {str(entry.gid.ip): entry.gid_index for entry in context.query_gid_table()}

    async def port(self) -> str:
        """Return the state of the device's port."""
        with verbs.find_device(self._device).open() as context:
            return context.query_port().state.name

    async def watch(self) -> None:
        """Start collecting the device's events."""
        self._events = aiordma.device_events(self._device)

    async def event(self) -> str:
        """Return the type of the next event."""
        assert self._events is not None
        return (await self._events.get()).type.name


async def main() -> None:
    loop = asyncio.get_running_loop()
    agents: dict[str, Agent] = {}
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def carry_out(number: int, device: str, name: str, arguments: dict[str, Any]) -> None:
        agent = agents.setdefault(device, Agent(device))
        answer: dict[str, object] = {"number": number}
        try:
            if hasattr(agent, name):
                answer["result"] = await getattr(agent, name)(**arguments)
            else:
                method = getattr(agent.qp, name)
                answer["result"] = await asyncio.to_thread(method, **arguments)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)

    tasks = set()
    while line := await reader.readline():
        order = json.loads(line)
        task = asyncio.create_task(carry_out(**order))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    asyncio.run(main())
