"""Test an unchanged gRPC service (grpclib) on a loop with RDMA."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from grpclib.client import Channel, StreamStreamMethod, UnaryUnaryMethod
from grpclib.const import Cardinality, Handler, Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError
from grpclib.server import Server, Stream

from aiordma.streams import StreamServer


class Bytes(CodecBase):
    """A codec for raw bytes, so that the tests need no generated code."""

    __content_subtype__ = "bytes"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> bytes:
        return data


class Service:
    async def reverse(self, stream: Stream[bytes, bytes]) -> None:
        request = await stream.recv_message()
        assert request is not None
        if request == b"no":
            raise GRPCError(Status.INVALID_ARGUMENT, "not that")
        await stream.send_message(request[::-1])

    async def each(self, stream: Stream[bytes, bytes]) -> None:
        async for request in stream:
            await stream.send_message(request[::-1])

    def __mapping__(self) -> dict[str, Handler]:
        return {
            "/test.Service/Reverse": Handler(self.reverse, Cardinality.UNARY_UNARY, bytes, bytes),
            "/test.Service/Each": Handler(self.each, Cardinality.STREAM_STREAM, bytes, bytes),
        }


async def test_grpclib_calls_and_streams_over_rdma(host: str) -> None:
    server = Server([Service()], codec=Bytes())
    await server.start(host, 0)
    listening = server._server
    assert isinstance(listening, StreamServer)
    port = listening.address[1]
    channel = Channel(host, port, codec=Bytes())
    try:
        reverse = UnaryUnaryMethod(channel, "/test.Service/Reverse", bytes, bytes)
        data = random.Random(1)
        requests = [data.randbytes(size) for size in (0, 1, 1000, 70_000, 1_000_000)]
        answers = await asyncio.gather(*(reverse(request) for request in requests))
        assert answers == [request[::-1] for request in requests]
        with pytest.raises(GRPCError) as refused:
            await reverse(b"no")
        assert refused.value.status is Status.INVALID_ARGUMENT
        each = StreamStreamMethod(channel, "/test.Service/Each", bytes, bytes)
        async with each.open() as stream:
            for request in requests:
                await stream.send_message(request)
                assert await stream.recv_message() == request[::-1]
            await stream.end()
    finally:
        channel.close()
        server.close()
        await server.wait_closed()
