"""Tests of common mistakes in using the interface, each with the text that its user reads."""

from __future__ import annotations

import asyncio
import ctypes
import io
import json
import pickle
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgpack  # type: ignore[import-untyped]
import pytest
from click.testing import CliRunner

import aiordma
from aiordma import arrays, blocking, rpc, streams, testing, trace, verbs
from aiordma.cli import app
from aiordma.errors import AddressError


@pytest.mark.any_device
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["echo", "--device", "embedded0,embedded0"],
            "--device or AIORDMA_DEVICE: device contains a duplicate name: embedded0, embedded0",
        ),
        (["echo", "--sizes", "1,10G"], "the message size must be at most 1 GiB, not 10 GiB"),
        (
            ["perf", "--local", "write", "bw", "--sizes", "1,2G"],
            "the message size must be at most 1 GiB, not 2 GiB",
        ),
        (
            ["perf", "client", "server.example", "send", "lat", "--sizes", "1073741825"],
            "the message size must be at most 1 GiB, not 1,073,741,825 B",
        ),
        (
            ["perf", "client", "server.example:18515", "send", "lat"],
            "'server.example:18515' is not a plain host name or address; "
            "use 'server.example --port 18515' instead",
        ),
        (
            ["perf", "client", "[fe80::1%eth0]:7", "send", "lat"],
            "'[fe80::1%eth0]:7' is not a plain host name or address; "
            "use 'fe80::1%eth0 --port 7' instead",
        ),
        (
            ["perf", "client", "rdma://server.example:7/path", "send", "lat"],
            "'rdma://server.example:7/path' is not a plain host name or address; "
            "use 'server.example --port 7' instead",
        ),
        (
            ["perf", "server", "--host", "127.0.0.1:7"],
            "'127.0.0.1:7' is not a plain host name or address; "
            "use '--host 127.0.0.1 --port 7' instead",
        ),
        (
            ["echo", "--host", "[::1]"],
            "'[::1]' is not a plain host name or address; use '--host ::1' instead",
        ),
        (
            ["echo", "--host", "rdma://localhost:7"],
            "'rdma://localhost:7' is not a plain host name or address; "
            "use '--host localhost' instead",
        ),
        (
            ["run", "--failure-traces", "", "true"],
            "Invalid value for '--failure-traces': the path must not be empty",
        ),
        (["run", ""], "Invalid value for PROGRAM: the program name must not be empty"),
        (["trace", ""], "Invalid value for 'FILE...': the path must not be empty"),
        (
            ["perf", "--local", "send", "lat", "--plot", ""],
            "Invalid value for '--plot': the path must not be empty",
        ),
    ],
)
def test_command_line_reports_the_invalid_argument(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(app.app, arguments)
    assert done.exit_code == 2
    assert text in " ".join(done.output.split())


@pytest.mark.any_device
def test_duplicate_device_in_environment_is_a_usage_error() -> None:
    done = CliRunner().invoke(app.app, ["echo"], env={"AIORDMA_DEVICE": "embedded0,embedded0"})
    assert done.exit_code == 2
    assert "device contains a duplicate name: embedded0, embedded0" in done.output


@pytest.mark.any_device
def test_caller_raises_lookup_error_outside_an_rpc_call() -> None:
    text = (
        "rpc.caller() was called outside an RPC call; use it in a function that serves a call, "
        "or in a task created by that function"
    )
    with pytest.raises(LookupError, match=f"^{re.escape(text)}$"):
        rpc.caller()


@pytest.mark.any_device
def test_add_connection_hook_rejects_a_non_callable() -> None:
    with pytest.raises(
        TypeError, match=r"^hook must be a function of a ConnectionChange, not int 5$"
    ):
        aiordma.add_connection_hook(cast(Any, 5))


@pytest.mark.any_device
def test_add_connection_hook_rejects_function_with_two_parameters() -> None:
    def hook(kind: object, connection: object) -> None: ...

    with pytest.raises(
        TypeError,
        match=r"^hook must accept one argument, a ConnectionChange: missing a required argument",
    ):
        aiordma.add_connection_hook(cast(Any, hook))


@pytest.mark.parametrize("convert", [bytes, bytearray, list], ids=lambda kind: kind.__name__)
async def test_unawaited_recv_does_not_lose_the_message(
    convert: Callable[[Any], object], device_name: str
) -> None:
    async with testing.connected_pair(device=device_name) as (conn, peer):
        await peer.send(b"not lost")
        operation = conn.recv()
        with pytest.raises(TypeError, match=r"must be awaited before|cannot convert"):
            convert(operation)
        operation.close()
        assert bytes(await conn.recv()) == b"not lost"


async def test_converting_an_unawaited_send_raises_type_error(device_name: str) -> None:
    async with testing.connected_pair(device=device_name) as (conn, peer):
        sending = conn.send(b"sent once")
        with pytest.raises(TypeError, match=r"^Connection\.send must be awaited"):
            bytes(cast(Any, sending))
        await sending
        assert bytes(await peer.recv()) == b"sent once"


async def test_sync_for_and_with_errors_suggest_the_async_form(device_name: str) -> None:
    async with (
        await aiordma.listen("", device=device_name) as listener,
        testing.connected_pair(device=device_name) as (conn, _),
    ):
        for thing in (conn, listener):
            name = re.escape(repr(thing))
            with pytest.raises(TypeError, match=f"^{name} is .* iterable; use 'async for'$"):
                for _ in thing:
                    pass
            text = f"^{name} is an asynchronous context manager; use 'async with'$"
            with pytest.raises(TypeError, match=text), thing:
                pass


async def test_all_async_classes_suggest_async_with_or_async_for(device_name: str) -> None:
    with verbs.open_device(device_name) as context, context.alloc_pd() as pd:
        async with (
            testing.connected_pair(device=device_name) as (conn, _),
            rpc.Client(conn) as client,
            await aiordma.create_server(asyncio.Protocol, device=device_name) as server,
            aiordma.AsyncQueuePair(pd) as queue,
            aiordma.AsyncConnectionId(device_name) as connection_id,
            aiordma.device_events(device_name) as events,
            await aiordma.prepare_connection(device=device_name) as pending,
        ):
            batch = queue.batch(), conn.batch()
            for scope in (client, server, queue, connection_id, events, pending, *batch):
                text = f"{scope!r} is an asynchronous context manager; use 'async with'"
                with pytest.raises(TypeError, match=f"^{re.escape(text)}$"), cast(Any, scope):
                    pass
            queue.qp.to_init()
            for series in (queue.receives(1, 8), connection_id, events):
                text = f"{series!r} is an asynchronous iterable; use 'async for'"
                with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
                    for _ in cast(Any, series):
                        pass


async def test_invalid_array_kind_is_rejected_before_receiving(device_name: str) -> None:
    async with testing.connected_pair(device=device_name) as (conn, peer):
        await peer.send(b"not lost")
        text = '^kind must be "numpy" or "torch", not \'tensorflow\'$'
        with pytest.raises(ValueError, match=text):
            await arrays.recv(conn, cast(Any, "tensorflow"))
        assert bytes(await conn.recv()) == b"not lost"
        with pytest.raises(ValueError, match=text):
            arrays.unpack(b"", cast(Any, "tensorflow"))


async def test_arrays_recv_rejects_a_message_without_arrays(device_name: str) -> None:
    async with testing.connected_pair(device=device_name) as (conn, peer):
        await peer.send(b"plain message")
        with pytest.raises(ValueError, match=r"^the message does not contain arrays: .*") as caught:
            await arrays.recv(conn)
    assert str(caught.value).endswith(
        "; send arrays with aiordma.arrays.send, and receive other messages with Connection.recv"
    )


@pytest.mark.parametrize("name", ["mean", "T", "tolist", "astype", "reshape"])
async def test_remote_array_attribute_error_suggests_await(name: str, device_name: str) -> None:
    numpy = pytest.importorskip("numpy")
    async with testing.connected_pair(device=device_name) as (conn, peer):
        with arrays.share(peer, numpy.arange(4)) as shared:
            remote = arrays.open_array(conn, shared.token)
            text = (
                f"a RemoteArray has no attribute {name!r}: its elements are in the peer's memory; "
                f"write (await array).{name}"
            )
            with pytest.raises(AttributeError, match=f"^{re.escape(text)}$"):
                getattr(remote, name)
            assert (await remote).tolist() == [0, 1, 2, 3]


def to_json(value: object) -> bytes:
    return json.dumps(value).encode()


def from_json(data: memoryview) -> object:
    return json.loads(bytes(data))


CODERS: dict[str, Any] = {
    "msgpack": {},
    "json": {"dumps": to_json, "loads": from_json},
    "pickle": {"dumps": pickle.dumps, "loads": pickle.loads},
}
NO_MSGPACK = "bytes as msgpack: extra bytes after the end"
UNREADABLE = [
    ("json", "msgpack", "ValueError", f"cannot decode 8 {NO_MSGPACK}"),
    ("pickle", "msgpack", "ValueError", f"cannot decode 22 {NO_MSGPACK}"),
    (
        "msgpack",
        "json",
        "UnicodeDecodeError",
        "'utf-8' codec can't decode byte 0x92 in position 0: invalid start byte",
    ),
    (
        "pickle",
        "json",
        "UnicodeDecodeError",
        "'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte",
    ),
    ("msgpack", "pickle", "UnpicklingError", "unpickling stack underflow"),
    ("json", "pickle", "UnpicklingError", "invalid load key, '['."),
]


async def same(value: object) -> object:
    return value


@asynccontextmanager
async def rpc_client(
    device: str, of_client: dict[str, Any], of_server: dict[str, Any]
) -> AsyncIterator[rpc.Client]:
    async with testing.connected_pair(device=device) as (conn, peer):
        serving = asyncio.create_task(rpc.serve(peer, {"same": same}, **of_server))
        async with rpc.Client(conn, **of_client) as client:
            yield client
        await serving


@pytest.mark.parametrize(("client", "server", "kind", "why"), UNREADABLE)
async def test_undecodable_rpc_argument_error_suggests_matching_serializers(
    client: str, server: str, kind: str, why: str, device_name: str
) -> None:
    async with rpc_client(device_name, CODERS[client], CODERS[server]) as caller:
        with pytest.raises(rpc.CallError) as caught:
            await caller.call("same", [1, "a"])
    assert str(caught.value) == (
        f"same: {kind}: loads of the server cannot decode the argument; use the same dumps= and "
        f"loads= on both sides: {why}"
    )


@pytest.mark.parametrize(("server", "client", "kind", "why"), UNREADABLE)
async def test_undecodable_rpc_result_error_suggests_matching_serializers(
    client: str, server: str, kind: str, why: str, device_name: str
) -> None:
    of_client = {"dumps": CODERS[server].get("dumps", msgpack.packb)}
    if client != "msgpack":
        of_client["loads"] = CODERS[client]["loads"]
    async with rpc_client(device_name, of_client, CODERS[server]) as caller:
        with pytest.raises(rpc.CallError) as caught:
            await caller.call("same", [1, "a"])
    assert str(caught.value) == (
        f"same: {kind}: loads of the client cannot decode the result; use the same dumps= and "
        f"loads= on both sides: {why}"
    )
    assert type(caught.value.__cause__).__name__ == kind


STR = "dumps must return a bytes-like object: a str cannot be used as memory, because it "


async def test_rpc_call_rejects_dumps_that_returns_str(device_name: str) -> None:
    async with rpc_client(device_name, {"dumps": json.dumps}, {}) as caller:
        with pytest.raises(TypeError, match=f"^{re.escape(STR)}.*text.encode"):
            await caller.call("same", [1])
    async with rpc_client(device_name, {}, {"dumps": json.dumps}) as caller:
        with pytest.raises(rpc.CallError, match=f"^same: TypeError: {re.escape(STR)}.*text.encode"):
            await caller.call("same", [1])


async def test_rpc_function_returning_non_awaitable_is_reported_on_both_sides(
    device_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aiordma.rpc")
    wanted = "awaitable (define the function with async def)"
    text = f"the return value of five() must be {wanted}, not int 5"
    functions: dict[str, Any] = {"five": lambda _: 5, "six": lambda _: asyncio.sleep(0, 6)}
    async with testing.connected_pair(device=device_name) as (conn, peer):
        serving = asyncio.create_task(rpc.serve(peer, functions))
        async with rpc.Client(conn) as client:
            with pytest.raises(rpc.CallError, match=f"^five: TypeError: {re.escape(text)}$"):
                await client.call("five")
            assert await client.call("six") == 6
        await serving
    assert text in caplog.text


@pytest.mark.parametrize("name", ["\udc80", "a\0b"], ids=ascii)
async def test_rpc_call_rejects_invalid_function_names(name: str, device_name: str) -> None:
    async with rpc_client(device_name, {}, {}) as caller:
        with pytest.raises(ValueError, match=r"^the function name .*(Unicode|null character)"):
            await caller.call(name)


async def handler(conn: aiordma.Connection) -> None:
    """A handler that is never called."""


async def test_closed_server_cannot_serve_again(device_name: str) -> None:
    server = await aiordma.start_server(handler, device=device_name)
    await server.close()
    with pytest.raises(RuntimeError, match=r"^<Server of .*> is closed; start another server$"):
        await server.serve_forever()


async def test_sendfile_rejects_stream_writer_and_text_file(
    device_name: str, host: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    where: dict[str, Any] = {"device": device_name}
    async with await aiordma.create_server(asyncio.Protocol, host, **where) as server:
        _, writer = await aiordma.open_connection(host, server.address[1], **where)
        with path.open("rb") as file:
            wrong = r"must be a StreamTransport, not StreamWriter .*; pass writer\.transport$"
            with pytest.raises(TypeError, match=wrong):
                await streams.sendfile(cast(Any, writer), file)
        with path.open(encoding="utf-8") as text:
            for count in (None, 0):
                with pytest.raises(ValueError, match=r"^file must be opened in binary mode: "):
                    await streams.sendfile(writer.transport, cast(Any, text), 0, count)
        writer.transport.abort()


@pytest.mark.any_device
def test_trace_requests_rejects_argument_that_is_not_a_run() -> None:
    with pytest.raises(TypeError, match=r"^run must be a Run, .*trace\.read\(\), not list \[\]$"):
        trace.requests(cast(Any, []))


@pytest.mark.any_device
def test_blocking_call_rejects_a_coroutine() -> None:
    coroutine = same(1)
    with pytest.raises(
        TypeError, match=r"^function must be a function, not coroutine .*; pass its arguments"
    ):
        blocking.call(cast(Any, coroutine))
    coroutine.close()


async def test_pending_connection_rejects_endpoint_that_is_not_bytes(device_name: str) -> None:
    async with await aiordma.prepare_connection(device=device_name) as pending:
        for endpoint in ("x", 8):
            with pytest.raises(TypeError, match="cannot be used as memory"):
                pending.accept(cast(Any, endpoint))


@pytest.mark.any_device
@pytest.mark.parametrize("host", ["a\udc80b", "a" * 64, "a..b"], ids=["surrogate", "long", "empty"])
async def test_reconnect_rejects_invalid_host_names(host: str, device_name: str) -> None:
    with pytest.raises(AddressError, match=r"invalid host name .*: each part"):
        async for _ in aiordma.reconnect(host, 1, device=device_name):
            pass


@pytest.mark.any_device
@pytest.mark.parametrize("name", ["a\0b", "\udc80"], ids=ascii)
def test_world_host_rejects_unresolvable_names(name: str) -> None:
    async def main(world: testing.World) -> None:
        world.host(name)

    with pytest.raises(ValueError, match=r"null character|invalid host name"):
        testing.simulate(main, seed=1)


async def test_expect_rejects_an_invalid_event_type(device_name: str) -> None:
    async with aiordma.AsyncConnectionId(device_name) as connection_id:
        with pytest.raises(TypeError, match="wanted must be a member of EventType"):
            await connection_id.expect(cast(Any, "CONNECTED"))


async def test_hook_and_progress_reject_coroutine_functions(device_name: str) -> None:
    async def function(_: object) -> None: ...

    with pytest.raises(TypeError, match="hook must be a function of a ConnectionChange"):
        aiordma.add_connection_hook(cast(Any, function))
    async with testing.connected_pair(device=device_name) as (conn, peer):
        with conn.register(bytearray(8)) as region:
            await conn.send_region(region)
            remote = await peer.recv_region()
        with pytest.raises(TypeError, match="progress must be a function of the number"):
            await peer.read(remote, bytearray(8), progress=cast(Any, function))


async def test_starting_a_closed_pending_connection_raises_buffer_state_error(
    device_name: str,
) -> None:
    pending = await aiordma.prepare_connection(device=device_name)
    await pending.close()
    with pytest.raises(aiordma.BufferStateError, match=r"closed> is closed$"):
        await pending.start()


@pytest.mark.any_device
def test_history_rejects_an_unawaited_result() -> None:
    async def call() -> int:
        return 1

    history = testing.History()
    coroutine = call()
    with (
        pytest.raises(TypeError, match=r"^op\.result must be a value, not a coroutine; await it"),
        history.read("key") as op,
    ):
        op.result = cast(Any, coroutine)
    coroutine.close()


async def test_queue_pair_fail_rejects_cause_that_is_not_an_exception(device_name: str) -> None:
    with aiordma.verbs.open_device(device_name) as context, context.alloc_pd() as pd:
        async with aiordma.AsyncQueuePair(pd) as queue:
            with pytest.raises(TypeError, match=r"^cause must be an exception, not str 'gone'$"):
                queue.fail(cast(Any, "gone"))
            assert "closed" not in repr(queue)


@pytest.mark.any_device
@pytest.mark.parametrize(
    "host",
    [
        *("server:7471", "192.0.2.1:7471", "[::1]", "[::1]:7471", "[fe80::1%lo]:1"),
        *("rdma://server", "rdma://server:7471", "rdma://[::1]:7471", "server:", "server/path"),
    ],
)
async def test_host_with_scheme_port_or_brackets_is_rejected(host: str, device_name: str) -> None:
    text = re.escape(
        f"invalid host {host!r}: a host must not contain a scheme, brackets or a port; "
        "pass the port as a separate argument"
    )
    for call in (
        aiordma.connect(host, 1, device=device_name),
        aiordma.listen(host, device=device_name),
        aiordma.open_connection(host, 1, device=device_name),
    ):
        with pytest.raises(AddressError, match=text):
            await call


TARGETS: dict[str, tuple[Any, str]] = {
    "text": ("text", "receive into a bytearray and decode it with data.decode()"),
    "path": (
        Path("/nowhere"),
        "receive into a bytearray and write the file with path.write_bytes(data)",
    ),
    "number": (5, "receive into a bytearray and unpack it with int.from_bytes(data, 'little')"),
    "none": (None, "use writable memory such as a bytearray or a numpy array"),
    "list": ([0], "receive into a bytearray and deserialize it with json.loads(data)"),
    "object": (object(), "use writable memory such as a bytearray or a numpy array"),
    "stream": (io.BytesIO(), "pass the result of getbuffer()"),
    "objects": ((ctypes.py_object * 2)(), "or receive a serialized copy into a bytearray"),
    "part": (memoryview(bytearray(8))[::2], "use contiguous memory and copy the data from it"),
}


@pytest.mark.parametrize("kind", TARGETS)
async def test_invalid_receive_target_error_suggests_an_alternative(
    kind: str, device_name: str
) -> None:
    memory, advice = TARGETS[kind]
    async with testing.connected_pair(device=device_name) as (conn, peer):
        with conn.register(bytearray(8)) as region:
            await conn.send_region(region)
            remote = await peer.recv_region()
            await peer.send(b"12345678")
            for call in (
                lambda: conn.recv_into(memory),
                lambda: conn.recv_with(lambda _: memory),
                lambda: peer.read(remote, memory),
            ):
                with pytest.raises((TypeError, BufferError), match=re.escape(advice)):
                    await call()
