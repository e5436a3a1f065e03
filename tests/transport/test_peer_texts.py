"""Test that control characters in a peer's texts are escaped in errors and logs.

test_connect_inband.py tests the text of a refused in-band request.
"""

from __future__ import annotations

import asyncio
import logging

import msgpack  # type: ignore[import-untyped]
import pytest

from aiordma._core import protocol
from aiordma._core.frames import FrameKind
from aiordma._core.refusal import pack_refusal
from aiordma._transport.connect_tcp import MESSAGE_SIZE
from aiordma._transport.tcp_link import REFUSED
from aiordma.errors import ConnectionBrokenError, RDMAError, RejectedError, RequestRefusedError

from .connection_factory import ConnectionFactory, ends
from .marks import by_cm, by_tcp, one_loop
from .raw_peer import RawListener, control, frame, raw_pair

pytestmark = one_loop

HOSTILE = "\r\nINFO all is well\n\x1b[2J\x1b]0;title\x07\0\x7f\u202e\u2028 gone"
SHOWN = r"\r\nINFO all is well\n\x1b[2J\x1b]0;title\x07\x00\x7f\u202e\u2028 gone"


def check_texts(error: BaseException, caplog: pytest.LogCaptureFixture, shown: str = SHOWN) -> None:
    """Check that the error contains `shown`, and that no text has unprintable characters."""
    assert shown in str(error)
    causes: list[BaseException | None] = [error, error.__cause__, error.__context__]
    texts = [str(cause) for cause in causes if cause is not None]
    texts += [record.getMessage() for record in caplog.records]
    for text in texts:
        assert text.isprintable(), text
        assert len(text) < 1000


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="aiordma")


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (protocol.GoodbyeCode.SHUTDOWN, SHOWN),
        (
            protocol.GoodbyeCode.FAILED,
            "ended the connection with an exception",
        ),  # not the name of a type
    ],
)
async def test_goodbye_text_is_escaped(
    factory: ConnectionFactory,
    caplog: pytest.LogCaptureFixture,
    code: protocol.GoodbyeCode,
    shown: str,
) -> None:
    async with raw_pair(factory) as (conn, peer):
        peer.send(control(protocol.Goodbye(0, code, HOSTILE)))
        check_texts(await ends(conn.recv(), ConnectionBrokenError), caplog, shown)


async def test_region_request_refusal_text_is_escaped(
    factory: ConnectionFactory, caplog: pytest.LogCaptureFixture
) -> None:
    async with raw_pair(factory) as (conn, peer):
        asking = asyncio.create_task(conn.request_region(100))
        request = await peer.control()
        refusal = protocol.Error(request.request_id, protocol.ErrorCode.QUOTA, HOSTILE)
        peer.send(control(refusal))
        error = await ends(asking, RequestRefusedError)
        check_texts(error, caplog)
        assert error.text == SHOWN


@pytest.mark.parametrize("size", [512, 64 << 10])
async def test_overlong_goodbye_text_is_omitted_from_errors(
    factory: ConnectionFactory, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    """Such a text violates the protocol."""
    text = HOSTILE * (size // len(HOSTILE))
    content: bytes = msgpack.packb([protocol.MAGIC, protocol.VERSION, 9, 0, [1, text]])
    async with raw_pair(factory) as (conn, peer):
        peer.send(frame(FrameKind.CONTROL, content[:2000]))  # longer than its receives
        check_texts(await ends(conn.recv(), RDMAError), caplog, "")


@by_tcp
async def test_tcp_bootstrap_refusal_text_is_escaped(
    factory: ConnectionFactory, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(MESSAGE_SIZE)
        writer.write(REFUSED + pack_refusal(HOSTILE))
        writer.close()

    async with await asyncio.start_server(refuse, factory.host) as server:
        port = server.sockets[0].getsockname()[1]
        check_texts(await ends(factory.connect(port), RejectedError), caplog)


@by_cm
async def test_connection_manager_rejection_text_is_escaped(
    factory: ConnectionFactory, caplog: pytest.LogCaptureFixture
) -> None:
    listener = RawListener(factory)
    connecting = asyncio.create_task(factory.connect(listener.port))
    event = await listener.request()
    event.id.reject(pack_refusal(HOSTILE))
    check_texts(await ends(connecting, RejectedError), caplog)
    event.id.close()
    listener.id.close()
    listener.close()
