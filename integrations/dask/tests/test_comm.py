"""Tests of comms between two ends in one process: the data, its memory, and how comms end."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import dask
import numpy as np
import pytest
from dask_aiordma import backend
from dask_aiordma.backend import RDMA, WRITE_BUFFER, RDMAListener
from dask_aiordma.framing import MIN_LONG_FRAME, pack
from distributed.comm.addressing import get_address_host_port
from distributed.comm.core import CommClosedError, connect
from distributed.protocol.serialize import Serialized, to_serialize
from distributed.protocol.utils_test import get_host_array

import aiordma
from conftest import Pair, connected, echo

Serve = Callable[..., Awaitable[RDMAListener]]


async def transfer(pair: Pair, message: Any) -> Any:
    sender, receiver = pair
    _, received = await asyncio.gather(sender.write(message), receiver.read())
    return received


async def test_comm_reports_addresses(pair: Pair) -> None:
    ours, theirs = pair
    assert ours.local_address == theirs.peer_address
    assert ours.local_address.startswith("rdma://127.0.0.1:")
    assert ours.remote_info["address"] == theirs.local_info["address"]
    assert ours.same_host
    assert ours.handshake_options["compression"] is None
    assert ours.local_address in repr(theirs)


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        1000,
        MIN_LONG_FRAME - 1,
        MIN_LONG_FRAME,
        MIN_LONG_FRAME + 1,
        1 << 20,
        64 << 20,
        (64 << 20) + 1,
    ],
)
async def test_received_array_is_equal_and_writable(pair: Pair, size: int) -> None:
    source = np.arange(size, dtype="u1")
    received = (await transfer(pair, {"x": to_serialize(source)}))["x"]
    assert np.array_equal(received, source)
    received += 1  # the receiver owns the array and can modify it


async def test_each_array_has_its_own_memory(pair: Pair) -> None:
    source = [np.ones(MIN_LONG_FRAME), np.ones((300, 300)).T, np.arange(5)]
    received = (await transfer(pair, {"x": [to_serialize(x) for x in source]}))["x"]
    memories = [get_host_array(x) for x in received]
    assert len({id(memory) for memory in memories}) == 3
    for memory, array in zip(memories, received, strict=True):
        assert np.asarray(memory).nbytes <= 1.05 * array.nbytes + 2048


async def test_message_with_3000_frames_is_received_intact(pair: Pair) -> None:
    source = [np.full(i % 50, i) for i in range(3000)]
    received = (await transfer(pair, {"x": [to_serialize(x) for x in source]}))["x"]
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(source, received, strict=True))


async def test_message_with_200_long_frames_is_received_intact(pair: Pair) -> None:
    source = [
        np.full(MIN_LONG_FRAME // 8 + i, i) for i in range(200)
    ]  # more than the pieces per rendezvous
    received = (await transfer(pair, {"x": [to_serialize(x) for x in source]}))["x"]
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(source, received, strict=True))


async def test_read_only_memory_is_sent(pair: Pair) -> None:
    source = np.frombuffer(bytes(range(256)) * 4096, dtype="u1")
    received = (await transfer(pair, {"x": to_serialize(source)}))["x"]
    assert np.array_equal(received, source)


async def test_comm_forwards_serialized_objects_without_deserializing() -> None:
    ours, theirs = await connected({}, {}, deserialize=False)
    source = np.arange(MIN_LONG_FRAME)
    first = await transfer((ours, theirs), {"x": to_serialize(source)})
    assert isinstance(first["x"], Serialized)
    again = await transfer((theirs, ours), first)
    assert isinstance(again["x"], Serialized)
    assert sum(memoryview(frame).nbytes for frame in again["x"].frames) == source.nbytes
    ours.abort()
    theirs.abort()


async def test_messages_are_received_in_order(pair: Pair) -> None:
    ours, theirs = pair
    sizes = [MIN_LONG_FRAME * (i % 3) + i for i in range(60)]

    async def write() -> None:
        for size in sizes:
            await ours.write(to_serialize(bytes(size)))

    writing = asyncio.create_task(write())
    assert [len(await theirs.read()) for _ in sizes] == sizes
    await writing


async def test_write_waits_when_the_write_buffer_is_full(pair: Pair) -> None:
    ours, theirs = pair
    source = np.ones(WRITE_BUFFER // 4)
    await ours.write({"x": to_serialize(source)})  # returns before the peer reads
    second = asyncio.create_task(ours.write("the next"))
    await asyncio.sleep(0)
    assert not second.done()
    assert np.array_equal((await theirs.read())["x"], source)
    await second
    assert await theirs.read() == "the next"


async def test_cancelled_waiting_write_sends_nothing(pair: Pair) -> None:
    ours, theirs = pair
    await ours.write(to_serialize(np.ones(WRITE_BUFFER)))
    second = asyncio.create_task(ours.write("never"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    await theirs.read()
    await ours.write("the next")
    assert await theirs.read() == "the next"


async def test_close_delivers_written_messages(pair: Pair) -> None:
    ours, theirs = pair
    source = np.ones(1 << 20)
    await ours.write({"x": to_serialize(source)})
    closing = asyncio.create_task(ours.close())
    assert np.array_equal((await theirs.read())["x"], source)
    await closing
    assert ours.closed()
    with pytest.raises(CommClosedError):
        await theirs.read()
    assert theirs.closed()


async def turns() -> None:
    """Run enough event loop iterations for a timeout of zero seconds to cancel a task."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_close_waits_while_the_peer_reads_a_long_frame(pair: Pair) -> None:
    """The timeout for a silent peer does not apply while the peer is reading a long frame."""
    ours, theirs = pair
    source = np.ones(16 << 20)  # two minutes at the rate MIN_BYTES_PER_SECOND
    await ours.write({"x": to_serialize(source)})
    with dask.config.set({"distributed.comm.timeouts.tcp": "0s"}):
        closing = asyncio.create_task(ours.close())
        await turns()
        assert np.array_equal((await theirs.read())["x"], source)
        await closing


async def test_close_times_out_when_the_peer_does_not_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "MIN_BYTES_PER_SECOND", 1 << 62)
    ours, theirs = pair
    await ours.write({"x": to_serialize(np.ones(MIN_LONG_FRAME))})
    with dask.config.set({"distributed.comm.timeouts.tcp": "0s"}):
        await ours.close()
    assert "the peer received no message for 0 s while 10" in caplog.text
    with pytest.raises(CommClosedError, match="ConnectionBroken"):
        await theirs.read()


async def test_cancelling_close_aborts_the_connection(pair: Pair) -> None:
    ours, theirs = pair
    await ours.write({"x": to_serialize(np.ones(MIN_LONG_FRAME))})  # in flight until the peer reads
    closing = asyncio.create_task(ours.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    with pytest.raises(CommClosedError, match="ConnectionBroken"):
        await theirs.read()


async def test_pending_read_fails_when_the_peer_aborts(pair: Pair) -> None:
    ours, theirs = pair
    reading = asyncio.create_task(ours.read())
    await asyncio.sleep(0)
    theirs.abort()
    with pytest.raises(CommClosedError, match="Connection"):
        await reading
    with pytest.raises(CommClosedError, match="closed"):
        await ours.write("x")
    with pytest.raises(CommClosedError, match="closed"):
        await ours.read()
    await ours.close()  # does nothing


async def test_write_to_a_closed_peer_raises_comm_closed_error(pair: Pair) -> None:
    ours, theirs = pair
    await theirs.close()

    async def write_for_ever() -> None:
        while True:
            await ours.write("x")
            await asyncio.sleep(0)

    with pytest.raises(CommClosedError):
        await write_for_ever()


async def test_cancelled_read_closes_the_comm(pair: Pair) -> None:
    ours, theirs = pair
    reading = asyncio.create_task(ours.read())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    assert ours.closed()
    with pytest.raises(CommClosedError):
        await theirs.read()


async def test_comm_stays_open_when_a_message_cannot_be_serialized(pair: Pair) -> None:
    ours, _ = pair
    with pytest.raises(TypeError):
        await ours.write({"x": to_serialize(threading.Lock())}, on_error="raise")
    assert await transfer(pair, "still here") == "still here"


async def test_comm_can_be_aborted_from_another_thread(pair: Pair) -> None:
    ours, theirs = pair
    thread = threading.Thread(target=ours.abort)
    thread.start()
    thread.join()
    assert ours.closed()
    with pytest.raises(CommClosedError):
        await theirs.read()


async def test_comm_keeps_no_reference_to_a_received_array() -> None:
    with dask.config.set({"distributed.comm.rdma.kept-memory": 0}):
        pair = await connected({}, {})
    received = (await transfer(pair, {"x": to_serialize(np.ones(MIN_LONG_FRAME))}))["x"]
    memory = weakref.ref(get_host_array(received))
    assert memory() is not None
    del received
    await asyncio.sleep(0)  # the loop drops the callback that delivered the result of `gather`
    gc.collect()
    assert memory() is None
    for comm in pair:
        await comm.close()


# ---- listeners ---------------------------------------------------------------------------------


async def test_connect_without_a_listener_times_out() -> None:
    async with await aiordma.listen("127.0.0.1", via="tcp") as listener:
        port = listener.port
    with pytest.raises(OSError, match="Timed out"):
        await connect(f"rdma://127.0.0.1:{port}", timeout=0.2)


async def test_listener_raises_eaddrinuse_when_the_address_is_in_use(serve: Serve) -> None:
    listener = await serve(echo)
    with pytest.raises(OSError, match="in use") as caught:
        await serve(echo, address=listener.contact_address)
    assert caught.value.errno == errno.EADDRINUSE


async def test_stopped_listener_frees_its_port_immediately(serve: Serve) -> None:
    listener = await serve(echo)
    address = listener.contact_address
    comm = await connect(address)
    listener.stop()
    second = await serve(echo, address=address)
    assert second.contact_address == address
    await comm.write("goes on")
    assert await comm.read() == "goes on"
    await comm.close()
    with pytest.raises(ValueError, match="not running"):
        _ = listener.contact_address


async def test_listener_without_host_accepts_on_every_address(serve: Serve) -> None:
    listener = await serve(echo, address="rdma://")
    host, port = get_address_host_port(listener.listen_address)
    assert host == "0.0.0.0"
    comm = await connect(f"rdma://127.0.0.1:{port}")
    await comm.write("hello")
    assert await comm.read() == "hello"
    await comm.close()


async def test_peer_that_does_not_speak_dask_is_disconnected(serve: Serve) -> None:
    listener = await serve(echo)
    host, port = get_address_host_port(listener.contact_address)
    # All connections of an event loop share its polling, which Dask's connections turn off.
    config = aiordma.Config(polling=0)
    async with await aiordma.connect(host, port, via="tcp", config=config) as conn:
        await conn.recv()  # the listener's Dask handshake message
        await conn.send(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(aiordma.ConnectionBrokenError):
            await conn.recv()
    comm = await connect(listener.contact_address)  # other clients are still served
    await comm.close()


async def test_read_fails_when_a_long_frame_has_the_wrong_length(serve: Serve) -> None:
    """A long frame of the wrong length ends only its own connection."""
    seen: asyncio.Queue[BaseException] = asyncio.Queue()

    async def handler(comm: RDMA) -> None:
        try:
            await comm.read()
        except OSError as error:
            await seen.put(error)

    listener = await serve(handler)
    comm = await connect(listener.contact_address)
    assert comm._conn is not None
    messages, _ = pack([b"head" * 9000, bytes(MIN_LONG_FRAME)])
    await comm._conn.send(messages[0])
    await comm._conn.send(bytes(MIN_LONG_FRAME + 1))
    assert "instead of a frame of" in str(await seen.get())
    comm.abort()
