"""Tests that text with a null character, or that cannot be encoded, never reaches C.

C would cut the text at the null character.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner

import aiordma
from aiordma import blocking, cm, monitoring_socket, streams, testing, trace, verbs
from aiordma._native import ffi, to_c
from aiordma.cli import app
from aiordma.errors import AddressError, DeviceNotFoundError

HOST = "127.0.0.1\0.example.com"
TEXT = r"host '127.0.0.1\\x00.example.com' contains a null character"
SOURCE = TEXT.replace("host", "the host of source", 1)


async def handle(*_: object) -> None:
    pass


async def next_of(reconnecting: Any) -> object:
    return await anext(reconnecting)


HOSTS: dict[str, tuple[Callable[[], Awaitable[object]], str]] = {
    "connect": (lambda: aiordma.connect(HOST, 1), TEXT),
    "connect(source=)": (lambda: aiordma.connect("127.0.0.1", 1, source=(HOST, 0)), SOURCE),
    "listen": (lambda: aiordma.listen(HOST), TEXT),
    "start_server": (lambda: aiordma.start_server(handle, HOST), TEXT),
    "prepare_connection": (
        lambda: aiordma.prepare_connection(address=HOST),
        TEXT.replace("host", "address"),
    ),
    "reconnect": (lambda: next_of(aiordma.reconnect(HOST, 1)), TEXT),
    "open_connection": (lambda: aiordma.open_connection(HOST, 1), TEXT),
    "create_connection": (lambda: aiordma.create_connection(asyncio.Protocol, HOST, 1), TEXT),
    "create_server": (lambda: aiordma.create_server(asyncio.Protocol, ["::1", HOST]), TEXT),
    "start_stream_server": (lambda: aiordma.start_stream_server(lambda r, w: None, HOST), TEXT),
    "blocking.connect": (lambda: asyncio.to_thread(blocking.connect, HOST, 1), TEXT),
    "blocking.listen": (lambda: asyncio.to_thread(blocking.listen, HOST), TEXT),
    "blocking.open_stream": (lambda: asyncio.to_thread(blocking.open_stream, HOST, 1), TEXT),
    "open_connection(port)": (
        lambda: aiordma.open_connection("127.0.0.1", "7\0"),
        r"invalid port '7\\x00': expected a number or a service name",
    ),
}


@pytest.mark.any_device
@pytest.mark.parametrize("name", HOSTS)
async def test_host_with_null_character_is_rejected_before_lookup(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the resolver was asked")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    call, text = HOSTS[name]
    try:
        with pytest.raises(AddressError, match=text):
            await call()
    finally:
        blocking.stop()


@pytest.mark.any_device
async def test_event_loop_rejects_host_with_null_character() -> None:
    with socket.socket() as sock, pytest.raises(AddressError, match=TEXT):
        await streams.OverRDMA().sock_connect(sock, (HOST, 1))


@pytest.mark.parametrize(("host", "service"), [(HOST, None), ("127.0.0.1", "7\0")])
def test_cm_getaddrinfo_rejects_null_characters(
    host: str, service: str | None, context: verbs.Context
) -> None:
    with pytest.raises(AddressError, match=r"(host|service) .* contains a null character"):
        cm.getaddrinfo(context.library, host, service)


@pytest.mark.parametrize("host", [HOST, "fe80::1%lo\0x"])
def test_bind_addr_rejects_null_characters(host: str, context: verbs.Context) -> None:
    with (
        cm.EventChannel(context.library) as channel,
        channel.create_id() as id,
        pytest.raises(ValueError, match=r"is not a numeric IP address|network interface not found"),
    ):
        id.bind_addr((host, 0))


def test_device_lookup_rejects_name_with_null_character(device_name: str) -> None:
    with pytest.raises(DeviceNotFoundError):
        verbs.find_device(f"{device_name}\0")
    refused = r"device 'embedded0\x00' contains a null character"
    assert monitoring_socket.set_port("down", "embedded0\0") == refused


@pytest.mark.any_device
@pytest.mark.parametrize("encode", [str, Path, str.encode])
def test_trace_file_name_with_a_null_character_creates_no_file(
    encode: Callable[[str], Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"name of the trace file .* contains a null character"):
        trace.start(encode(f"{tmp_path}/trace\0.json"))
    assert not list(tmp_path.iterdir())


@pytest.mark.any_device
def test_fault_plan_with_null_character_is_rejected() -> None:
    device = verbs.find_device("embedded0")
    with pytest.raises(ValueError, match=r"fault plan 'loss=1\\x00' contains a null character"):
        device.set_faults("loss=1\0")
    with (
        pytest.raises(ValueError, match="contains a null character"),
        testing.faults(loss="@1\0", device="embedded0"),
    ):
        pass


@pytest.mark.any_device
def test_command_line_rejects_argument_with_null_character() -> None:
    done = CliRunner().invoke(app.app, ["echo", "--device", "embedded0\0"])
    assert done.exit_code == 2
    assert r"argument 'embedded0\x00' contains a null character" in done.output


@pytest.mark.any_device
@pytest.mark.parametrize(
    ("text", "encoded"),
    [("mlx5_0", b"mlx5_0"), (b"/tmp/\xff", b"/tmp/\xff"), (Path("/tmp/\udcff"), b"/tmp/\xff")],
)
def test_to_c_encodes_str_bytes_and_path(text: Any, encoded: bytes) -> None:
    assert ffi.string(to_c("it", text)) == encoded


@pytest.mark.any_device
@pytest.mark.parametrize("text", ["\ud800", "a\udfff", Path("/tmp/\ud800")], ids=ascii)
def test_to_c_rejects_unencodable_text(text: Any) -> None:
    shown = re.escape(repr(str(text)))
    with pytest.raises(ValueError, match=f"^it {shown} cannot be encoded as utf-8: surrogates not"):
        to_c("it", text)


@pytest.mark.any_device
def test_trace_file_name_may_contain_undecodable_bytes(tmp_path: Path) -> None:
    path = tmp_path / "\udcff.json"
    try:
        assert trace.start(path) == path
    finally:
        trace.stop()
    assert path.exists()
