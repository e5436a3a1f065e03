"""A contender that uses NIXL: one-sided operations between two agents, with the UCX backend.

The operations access ordinary memory. The target's program sleeps, but its progress thread runs,
which is NIXL's default. The initiator polls a transfer's state until it has completed, like NIXL's
examples.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from .ways import Place

os.environ.setdefault("UCX_LOG_LEVEL", "error")  # warnings go to stdout
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")

nixl: Any = import_module("nixl._api")  # reads the environment; has no type hints

logging.disable(logging.INFO)
MEMORY = 1 << 20


class Agent:
    def __init__(self, name: str) -> None:
        self.agent = nixl.nixl_agent(name)
        self.memory = np.ones(MEMORY, np.uint8)
        self.registered = self.agent.register_memory([self.part(0, MEMORY, "")], mem_type="DRAM")

    def part(self, offset: int, size: int, *more: object) -> tuple[object, ...]:
        return self.memory.ctypes.data + offset, size, 0, *more


class NIXLClient(Agent):
    def __init__(self, place: str) -> None:
        super().__init__("client")
        metadata, there = map(bytes.fromhex, json.loads(place))
        self._peer = self.agent.add_remote_agent(metadata)
        self._there = self.agent.deserialize_descs(there)[0][0]

    def _transfer(self, operation: str, size: int, parts: int) -> Any:
        """Prepare a transfer in which all parts have the same address, as in aiordma's batch."""
        here = self.agent.get_xfer_descs([self.part(0, size)] * parts, mem_type="DRAM")
        there = self.agent.get_xfer_descs([(self._there, size, 0)] * parts, mem_type="DRAM")
        return self.agent.initialize_xfer(operation, here, there, self._peer)

    def _run(self, transfer: Any) -> None:
        state = self.agent.transfer(transfer)
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("nixl: the transfer failed")
            state = self.agent.check_xfer_state(transfer)

    async def one(self, operation: str, size: int, count: int) -> float:
        """Run operations one after another and return their median duration."""
        transfer, times = self._transfer(operation, size, 1), []
        for _ in range(count):
            start = perf_counter()
            self._run(transfer)
            times.append(perf_counter() - start)
        self.agent.release_xfer_handle(transfer)
        return median(times)

    async def batch(self, operation: str, size: int, count: int, window: int) -> float:
        """Run transfers of `window` operations each, and return the time per operation."""
        transfer = self._transfer(operation, size, window)
        start = perf_counter()
        for _ in range(count // window):
            self._run(transfer)
        taken = perf_counter() - start
        self.agent.release_xfer_handle(transfer)
        return taken / (count // window * window)


class OverNIXL:
    def prepare(self, data: bytes) -> bytes:
        return data

    @asynccontextmanager
    async def serve(self, folder: str) -> AsyncIterator[dict[str, Place]]:
        served = Agent("server")
        agent, there = served.agent, served.registered.trim()
        texts = agent.get_agent_metadata().hex(), agent.get_serialized_descs(there).hex()
        yield {"memory": json.dumps(texts)}

    @asynccontextmanager
    async def connect(self, place: Place) -> AsyncIterator[NIXLClient]:
        yield NIXLClient(str(place))
