"""A contender that sends NumPy arrays over a blocking TCP socket, without asyncio."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Thread
from typing import Any

import numpy as np

from .ways import HOST, SYNC_MESSAGE, Place

LENGTH = struct.Struct("<Q")


def send(sock: socket.socket, arrays: dict[str, Any]) -> None:
    header = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    text = json.dumps(header).encode()
    sock.sendall(LENGTH.pack(len(text)) + text)
    for array in arrays.values():
        sock.sendall(array)


def receive_into(sock: socket.socket, memory: Any) -> None:
    view = memoryview(memory).cast("B")
    while view:
        if not (count := sock.recv_into(view)):
            raise ConnectionResetError
        view = view[count:]


def receive(sock: socket.socket) -> dict[str, Any]:
    receive_into(sock, length := bytearray(LENGTH.size))
    receive_into(sock, text := bytearray(LENGTH.unpack(length)[0]))
    arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in json.loads(text).items()}
    for array in arrays.values():
        receive_into(sock, array)
    return arrays


def answer(listener: socket.socket) -> None:
    try:
        while True:
            sock, _ = listener.accept()
            with sock:
                try:
                    while True:
                        receive(sock)
                        sock.sendall(SYNC_MESSAGE)
                except ConnectionError:
                    pass
    except OSError:
        return  # the listener was closed


class BlockingClient:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def arrays(self, arrays: dict[str, Any]) -> None:
        send(self.sock, arrays)
        receive_into(self.sock, bytearray(len(SYNC_MESSAGE)))


class OverBlocking:
    """A transport over a blocking TCP socket that supports only array transfers."""

    @asynccontextmanager
    async def serve(self, folder: str) -> AsyncIterator[dict[str, Place]]:
        with socket.create_server((HOST, 0)) as listener:
            thread = Thread(target=answer, args=(listener,))
            thread.start()
            try:
                yield {"arrays": listener.getsockname()[1]}
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                await asyncio.to_thread(thread.join)

    @asynccontextmanager
    async def connect(self, place: Place) -> AsyncIterator[BlockingClient]:
        assert isinstance(place, int)
        with socket.create_connection((HOST, place)) as sock:
            yield BlockingClient(sock)
