"""Test the result of `recv`, a view of leased memory that cannot be used after its release."""

from __future__ import annotations

import asyncio
import json
import pickle

import numpy as np
import pytest

from aiordma import BufferStateError, Connection, Message

from .connection_factory import ConnectionFactory, ends, exchange, pattern
from .marks import on_pair

pytestmark = on_pair

SIZES = pytest.mark.parametrize("size", [100, 20_000], ids=["eager", "offered"])


async def transfer(sender: Connection, receiver: Connection, data: bytes) -> Message:
    receiving = asyncio.create_task(receiver.recv())
    await sender.send(data, imm=5)
    return await receiving


@SIZES
async def test_message_supports_comparison_and_buffer_access(
    factory: ConnectionFactory, size: int
) -> None:
    async with factory.pair() as (client, server):
        data = pattern(size)
        message = await transfer(client, server, data)
        assert len(message) == size
        assert bytes(message) == data
        assert message == data
        assert message == bytearray(data)
        assert message == message  # noqa: PLR0124 - __eq__ is ours
        assert message != data[:-1]
        assert message != "text"
        assert message.imm == 5
        assert message.data.nbytes == size
        assert message.data[10:20].tobytes() == data[10:20]
        assert np.frombuffer(message.data, dtype=np.uint8).sum() == sum(data)
        assert f"{size} bytes" in repr(message)
        with pytest.raises(TypeError):
            hash(message)
        message.release()


async def test_message_type_errors_suggest_converting_to_bytes(factory: ConnectionFactory) -> None:
    """New users may take a message for bytes, so the error says what to write."""
    async with factory.pair() as (client, server):
        message = await transfer(client, server, b"[1]")
        with pytest.raises(TypeError, match=r"not Message; write bytes\(message\)$"):
            json.loads(message)  # type: ignore[arg-type]
        with pytest.raises(AttributeError, match=r"write bytes\(message\).decode\(\)"):
            message.decode()  # type: ignore[attr-defined]
        assert json.loads(bytes(message)) == [1]
        assert type(message) is Message
        assert issubclass(message.__class__, Message)
        assert not isinstance(message, bytes | str)
        with pytest.raises(TypeError, match="Message' object"):
            pickle.dumps(message)
        message.release()


@SIZES
async def test_released_message_raises_buffer_state_error(
    factory: ConnectionFactory, size: int
) -> None:
    async with factory.pair() as (client, server):
        message = await transfer(client, server, pattern(size))
        with message:
            assert bytes(message) == pattern(size)
        message.release()  # again: nothing
        assert "released" in repr(message)
        with pytest.raises(BufferStateError):
            bytes(message)
        with pytest.raises(BufferStateError):
            _ = message.data
        with pytest.raises(BufferStateError):
            _ = message == b""
        await ends(server.send(message), BufferStateError)
        await exchange(server, client, b"the connection goes on")
