"""Hand-made peers built on `aiordma.verbs` and `aiordma.cm`: they use verbs correctly, and then
lie.

`RawPeer` is one end of a connection and sends whatever it is told to. `raw_request` and
`RawListener` are the two sides of the connection manager without a transport behind them.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from aiordma import Config, Connection, cm, verbs
from aiordma._core import protocol
from aiordma._core.frames import HEADER_SIZE, FrameKind
from aiordma._core.handshake_layout import CHALLENGE_SIZE, ENDPOINT_SIZE, Endpoint, Hello
from aiordma._transport.auth import new_ticket
from aiordma._transport.connect_tcp import MAGIC, MESSAGE_SIZE, READY, TICKET
from aiordma._transport.tcp_link import CONTROL
from aiordma.config import DEFAULT
from tests.model.frames import MESSAGES, pack_header, unpack_header
from tests.session.pair import PairFactory, provider

from .connection_factory import SMALL, ConnectionFactory, hello

REMOTE = (
    verbs.AccessFlags.REMOTE_READ | verbs.AccessFlags.REMOTE_WRITE | verbs.AccessFlags.REMOTE_ATOMIC
)
DEPTH = 512
CAPABILITIES = verbs.QPCapabilities(DEPTH, DEPTH)
SLOT = 2048  # bytes per send or receive
READ = int(verbs.WROpcode.RDMA_READ)
WRITE_WITH_IMM = int(verbs.WROpcode.RDMA_WRITE_WITH_IMM)
SIGNALED = int(verbs.SendFlags.SIGNALED)


def frame(kind: int, content: bytes = b"", *, control: int = 0, data: int = 0) -> bytes:
    """Return a frame as the transport encodes it. `kind` may be invalid."""
    header = bytearray(HEADER_SIZE)
    pack_header(header, 0, FrameKind.CREDIT, control, data)
    header[0] = kind
    return bytes(header) + content


def control(message: protocol.Message) -> bytes:
    return frame(FrameKind.CONTROL, protocol.encode(message))


def packed_control(message: protocol.Message) -> bytes:
    """Return a control message as encoded on the TCP bootstrap socket."""
    data = protocol.encode(message)
    return struct.pack("<4sI", CONTROL, len(data)) + data


class Piece(NamedTuple):
    """A range of remote memory that holds part of an offered message."""

    address: int
    length: int
    rkey: int
    flags: int = 0


PAIR = struct.Struct("<II")
PIECE = struct.Struct("<QQII")


def rendezvous_request(request_id: int, *pieces: Piece, count: int | None = None) -> bytes:
    """Return the content of an RNDV_RTS frame. `count` overrides the number of pieces."""
    head = PAIR.pack(request_id, len(pieces) if count is None else count)
    return head + b"".join(PIECE.pack(*piece) for piece in pieces)


def rendezvous(request_id: int, *pieces: Piece, count: int | None = None) -> bytes:
    return frame(FrameKind.RNDV_RTS, rendezvous_request(request_id, *pieces, count=count))


def read_request(content: bytes) -> tuple[int, list[Piece]]:
    """Return the request id and the pieces from the content of an RNDV_RTS frame."""
    request_id, count = PAIR.unpack_from(content)
    pieces = [Piece(*fields) for fields in PIECE.iter_unpack(content[PAIR.size :])]
    assert len(pieces) == count
    return request_id, pieces


def acknowledgement(request_id: int, status: int = 0) -> bytes:
    """Return an RNDV_ACK frame. A nonzero `status` means that the message will not be read."""
    return frame(FrameKind.RNDV_ACK, PAIR.pack(request_id, status))


class Memory:
    """The registered memory from which a queue pair sends and into which it receives."""

    def __init__(self, pd: verbs.ProtectionDomain) -> None:
        self.sends = pd.reg_mr(DEPTH * SLOT)
        self.receives = pd.reg_mr(DEPTH * SLOT)
        self._next = 0

    def post_receives(self, qp: verbs.QueuePair) -> None:
        for n in range(DEPTH):
            self.post_receive(qp, n)

    def post_receive(self, qp: verbs.QueuePair, n: int) -> None:
        qp.post_recv_one(n, self.receives.addr + n * SLOT, SLOT, self.receives.lkey)

    def post(self, qp: verbs.QueuePair, data: bytes, invalidates: int | None = None) -> None:
        start = self._next % DEPTH * SLOT
        self._next += 1
        self.sends.buf[start : start + len(data)] = data
        local = verbs.ScatterGatherElement(self.sends.addr + start, len(data), self.sends.lkey)
        opcode = verbs.WROpcode.SEND if invalidates is None else verbs.WROpcode.SEND_WITH_INV
        qp.post_send([
            verbs.SendWorkRequest(
                DEPTH + self._next, opcode, (local,), invalidate_rkey=invalidates or 0
            )
        ])  # fmt: skip


class RawPeer:
    """A raw peer of a transport connection, created by `RawPeer.connect`.

    `frames` holds the frames received as (kind, content), and `failures` the failed completions.
    """

    def __init__(self, made: RawQueuePair, theirs: Hello) -> None:
        self.qp = made.qp
        self.theirs = theirs
        self.frames: asyncio.Queue[tuple[FrameKind, bytes]] = asyncio.Queue()
        self.failures: list[verbs.WCStatus] = []
        self.socket: asyncio.StreamWriter | None = None
        """The socket of the TCP bootstrap."""
        self.connect_unproved: Callable[[], None] | None = None
        """Connects the queue pair before the key is proved on the socket."""
        self.credits = theirs.data_receives
        self.owed = 0  # control credits
        self._more_credits = asyncio.Event()
        self.opened: Callable[[bytes], bytes] = bytes
        """Opens a sealed frame. `received` holds the frames as they arrived."""
        self.received: list[bytes] = []
        self._reads: list[asyncio.Future[None]] = []
        self._memory = made.memory
        self._channel = made.channel
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fd, self._take)
        self._take()

    def close(self) -> None:
        self._loop.remove_reader(self._channel.fd)

    def send(self, *frames: bytes) -> None:
        """Post the frames in order, with or without credits."""
        for data in frames:
            self._memory.post(self.qp, data)

    async def read(self, piece: Piece) -> bytes:
        """Read memory offered by the other side with RDMA READ."""
        with self.qp.pd.reg_mr(piece.length) as memory:
            done: asyncio.Future[None] = self._loop.create_future()
            self._reads.append(done)
            self.qp.post_send_one(
                0, READ, SIGNALED, memory.addr, piece.length, memory.lkey, piece.address, piece.rkey
            )
            await done
            return bytes(memory.buf)

    def send_invalidating(self, data: bytes, rkey: int) -> None:
        """Post a frame that invalidates a memory window of the other side when it arrives."""
        self._memory.post(self.qp, data, rkey)

    def _take(self) -> None:
        if (cq := self._channel.get_event()) is not None:
            cq.req_notify()
        while found := self.qp.send_cq.poll():
            for wc in found:
                if not wc.ok:
                    self.failures.append(wc.status)
                elif wc.opcode is verbs.WCOpcode.RDMA_READ:
                    self._reads.pop(0).set_result(None)
                elif wc.opcode is verbs.WCOpcode.RECV:
                    start = wc.wr_id * SLOT
                    data = self._memory.receives.buf[start : start + wc.byte_len].tobytes()
                    self.received.append(data)
                    data = self.opened(data)
                    kind, _, credits, _ = unpack_header(data)
                    self.credits += credits
                    self.owed += kind not in MESSAGES
                    self._memory.post_receive(self.qp, wc.wr_id)
                    self._more_credits.set()
                    self.frames.put_nowait((kind, data[HEADER_SIZE:]))

    async def send_data(self, content: bytes) -> None:
        """Send a message as soon as there is a credit, and return the control credits owed."""
        while not self.credits:
            self._more_credits.clear()
            await self._more_credits.wait()
        self.credits -= 1
        back, self.owed = self.owed, 0
        self.send(frame(FrameKind.DATA, content, control=back))

    def send_control(self, message: protocol.Message) -> None:
        """Send a control message that also returns the credits owed."""
        back, self.owed = self.owed, 0
        self.send(frame(FrameKind.CONTROL, protocol.encode(message), control=back))

    async def control(self) -> protocol.Message:
        """Return the next control message from the other side, skipping other frames."""
        while True:
            kind, content = await self.frames.get()
            if kind is FrameKind.CONTROL:
                return protocol.decode(content)
            if self.owed >= 2:  # the other side may lack a credit for the awaited message
                self.give_back()

    def give_back(self) -> None:
        """Return the control credits owed, if any, in a CREDIT frame."""
        back, self.owed = self.owed, 0
        if back:
            self.send(frame(FrameKind.CREDIT, control=back))

    @staticmethod
    @asynccontextmanager
    async def connect(
        factory: ConnectionFactory,
        port: int,
        *,
        hello_data: bytes | None = None,
        key: bytes | None = None,
    ) -> AsyncIterator[RawPeer]:
        """Connect to a listener with the factory's connection method, and yield the raw peer.

        With `key`, the peer sends a valid ticket. The test has to send all further messages.
        """
        data = hello().pack() if hello_data is None else hello_data
        made = connect_by_cm if factory.via == "cm" else connect_by_tcp
        async with made(factory, port, data, key) as peer:
            try:
                yield peer
            finally:
                peer.close()


@asynccontextmanager
async def raw_pair(
    factory: ConnectionFactory, config: Config = SMALL
) -> AsyncIterator[tuple[Connection, RawPeer]]:
    """Yield a connection of the transport and the raw peer at its other end."""
    if isinstance(factory, PairFactory):
        async with raw_half(factory, config) as ends:
            yield ends
        return
    async with await factory.listen(config) as listener:
        accepting = asyncio.create_task(listener.accept())
        async with RawPeer.connect(factory, listener.port) as peer, await accepting as conn:
            yield conn, peer


@asynccontextmanager
async def raw_half(
    factory: PairFactory, config: Config
) -> AsyncIterator[tuple[Connection, RawPeer]]:
    """Implement `raw_pair` for a `PairFactory`."""
    pending = factory.half(config)
    with provider().device.open() as context:
        made = RawQueuePair(context, lambda pd, cq: pd.create_qp(cq, cq, CAPABILITIES))
        made.qp.to_init(access=REMOTE)
        made.memory.post_receives(made.qp)
        local = made.qp.endpoint()
        pending.accept(local.pack() + hello().pack())
        made.qp.connect(local, Endpoint.unpack(pending.endpoint[:ENDPOINT_SIZE]), access=REMOTE)
        peer = RawPeer(made, Hello.unpack(pending.endpoint[ENDPOINT_SIZE:]))
        try:
            async with await pending.start() as conn:
                yield conn, peer
        finally:
            peer.close()
            made.close()


class RawQueuePair:
    """A queue pair with its resources. The caller posts the receives while the state is INIT."""

    def __init__(
        self,
        context: verbs.Context,
        make: Callable[[verbs.ProtectionDomain, verbs.CompletionQueue], verbs.QueuePair],
    ) -> None:
        self.pd = context.alloc_pd()
        self.channel = context.create_comp_channel()
        self.cq = context.create_cq(2 * DEPTH, self.channel)
        self.cq.req_notify()
        self.qp = make(self.pd, self.cq)
        self.memory = Memory(self.pd)

    def close(self) -> None:
        self.qp.close()
        self.cq.close()
        self.channel.close()
        self.pd.close()


@asynccontextmanager
async def connect_by_tcp(
    factory: ConnectionFactory, port: int, data: bytes, key: bytes | None
) -> AsyncIterator[RawPeer]:
    reader, writer = await asyncio.open_connection(factory.host, port)
    try:
        with verbs.open_device(factory.device) as context:
            made = RawQueuePair(context, lambda pd, cq: pd.create_qp(cq, cq, CAPABILITIES))
            qp = made.qp
            qp.to_init(access=REMOTE)
            made.memory.post_receives(qp)
            local = qp.endpoint(context.find_gid(factory.host))
            answer = await offer(reader, writer, local.pack() + data, key)
            remote = Endpoint.unpack(answer[len(MAGIC) : -len(data)])
            peer = RawPeer(made, Hello.unpack(answer[-len(data) :]))
            connect = partial(qp.connect, local, remote, access=REMOTE)
            if Hello.unpack(data).authenticates:
                peer.connect_unproved = connect
            else:
                connect()
                writer.write(READY)
            peer.socket = writer
            yield peer
            made.close()
    finally:
        writer.close()


async def offer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes, key: bytes | None
) -> bytes:
    """Send an offer and return the server's response.

    With `key`, also send a ticket for the challenge, and return the response to the ticket.
    """
    writer.write(MAGIC + data)
    answer = await reader.readexactly(MESSAGE_SIZE)
    if key is not None:
        challenge = answer[len(MAGIC) :][:CHALLENGE_SIZE]
        writer.write(TICKET + new_ticket(key, challenge, data))
        answer = await reader.readexactly(MESSAGE_SIZE)
    return answer


FIRST_PORT = 14792
"""The first port selected by the upper 10 bits of a QP number. No device uses the last 24."""


def server_for_queue_pairs(host: str) -> socket.socket:
    """Listen on a free port among the data ports that no device uses."""
    for port in range(FIRST_PORT + 1023, FIRST_PORT + 999, -1):
        try:
            return socket.create_server((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise AssertionError("no port is free")


def endpoint_at(address: str, port: int = FIRST_PORT + 1023) -> bytes:
    """Return an endpoint whose high queue pair number makes the other side connect to it."""
    return Endpoint(
        gid=verbs.GID.from_ip(address).raw,
        qp_num=(port - FIRST_PORT) << 14 | 0x3FFE,
        psn=1,
        lid=0,
        mtu=3,
    ).pack()


class Stranger:
    """A TCP bootstrap client without a queue pair, created by `Stranger.connect`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.answer = b""

    @staticmethod
    @asynccontextmanager
    async def connect(
        factory: ConnectionFactory,
        port: int,
        *,
        hello_data: bytes,
        key: bytes | None = None,
        data_port: int = FIRST_PORT + 1023,
        address: str | None = None,
    ) -> AsyncIterator[Stranger]:
        """Yield a client that has sent its offer and received the response.

        Its queue pair number leaves opening the data link to the server. With `key`, the client has
        also sent a valid ticket.
        """
        reader, writer = await asyncio.open_connection(factory.host, port)
        try:
            data = endpoint_at(address or factory.host, data_port) + hello_data
            peer = Stranger(reader, writer)
            peer.answer = await offer(reader, writer, data, key)
            yield peer
        finally:
            writer.close()

    async def rest(self) -> list[protocol.Message]:
        """Return all control messages received until the server closes the connection."""
        data = b""
        try:
            while more := await self.reader.read(4096):
                data += more
        except ConnectionError:
            pass
        messages = []
        while data:
            magic, size = struct.unpack_from("<4sI", data)
            assert magic == CONTROL
            messages.append(protocol.decode(data[8 : 8 + size]))
            data = data[8 + size :]
        return messages


class Events:
    """A connection-manager channel whose events can be awaited."""

    def __init__(self, library: verbs.Library) -> None:
        self.channel = cm.EventChannel(library)
        self._arrived: asyncio.Queue[cm.ConnectionEvent] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(self.channel.fd, self._take)

    def _take(self) -> None:
        while (event := self.channel.get_event()) is not None:
            self._arrived.put_nowait(event)

    async def next(self, *wanted: cm.EventType) -> cm.ConnectionEvent:
        event = await self._arrived.get()
        assert event.type in wanted, f"{event.type.name} came"
        return event

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.channel.fd)
        self.channel.close()


class RawId:
    """A connection id with its queue pair, ready to connect or accept."""

    def __init__(self, id: cm.ConnectionId) -> None:
        context = id.context
        assert context is not None
        self.id = id
        self.made = RawQueuePair(context, lambda pd, cq: id.create_qp(pd, cq, None, CAPABILITIES))
        self.made.memory.post_receives(self.made.qp)

    def close(self) -> None:
        self.id.close()
        self.made.close()


def parameters(data: bytes) -> cm.ConnectionParameters:
    # Both sides use the requester's retry count. On rdma_rxe, 7 means unlimited retries.
    return cm.ConnectionParameters(
        data, responder_resources=4, initiator_depth=4, retry_count=DEFAULT.retry_count
    )


@asynccontextmanager
async def raw_request(
    factory: ConnectionFactory, port: int, data: bytes
) -> AsyncIterator[tuple[RawId, cm.ConnectionEvent]]:
    """Request a connection from a listener and yield the ESTABLISHED or REJECTED event."""
    events = Events(verbs.find_device(factory.device).library)
    try:
        id = events.channel.create_id()
        id.resolve_addr((factory.host, port))
        await events.next(cm.EventType.ADDR_RESOLVED)
        id.resolve_route()
        await events.next(cm.EventType.ROUTE_RESOLVED)
        raw = RawId(id)
        try:
            id.connect(parameters(data))
            event = await events.next(cm.EventType.ESTABLISHED, cm.EventType.REJECTED)
            yield raw, event
        finally:
            raw.close()
    finally:
        events.close()


@asynccontextmanager
async def connect_by_cm(
    factory: ConnectionFactory, port: int, data: bytes, key: bytes | None
) -> AsyncIterator[RawPeer]:
    if key is not None:
        async with raw_request(factory, port, data) as (_, event):
            data += new_ticket(key, event.private_data[:CHALLENGE_SIZE], data)
    async with raw_request(factory, port, data) as (raw, event):
        assert event.type is cm.EventType.ESTABLISHED
        yield RawPeer(raw.made, Hello.unpack(event.private_data))


class RawListener:
    """A listener that uses the connection manager directly."""

    def __init__(self, factory: ConnectionFactory) -> None:
        self.events = Events(verbs.find_device(factory.device).library)
        self.id = self.events.channel.create_id()
        self.id.bind_addr((factory.host, 0))
        self.id.listen()
        address = self.id.local_address
        assert address is not None
        self.port = address[1]

    async def request(self) -> cm.ConnectionEvent:
        return await self.events.next(cm.EventType.CONNECT_REQUEST)

    def close(self) -> None:
        self.events.close()
