"""Tests of the memory for long frames: reuse, limits, and how long unused memory is kept."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import dask
import numpy as np
import pytest
from dask_aiordma import memory
from dask_aiordma.framing import MIN_LONG_FRAME
from dask_aiordma.memory import FrameMemory, rounded
from dask_aiordma.settings import connection_arguments
from distributed.protocol.serialize import to_serialize

from conftest import Pair

SIZE = 1 << 20


def address(view: Any) -> int:
    return int(np.asarray(view).ctypes.data)


def new(most: int = 4 * SIZE) -> FrameMemory:
    return FrameMemory(asyncio.get_running_loop(), most)


async def test_returned_memory_is_reused() -> None:
    frames = new()
    first = frames.lend(SIZE)
    at = address(first)
    first[-1] = 1
    del first
    assert address(frames.lend(SIZE + 1)) != at
    again = frames.lend(SIZE)
    assert address(again) == at
    assert again.nbytes == SIZE
    assert not again.readonly


async def test_referenced_memory_is_not_reused() -> None:
    """Every kind of reference keeps the memory in use, and dropping it returns the memory."""
    ways: list[Any] = [
        lambda view: view,
        lambda view: view[5:7],
        lambda view: view.cast("d"),
        np.asarray,
        lambda view: np.frombuffer(view, "f8")[3:].reshape(-1, 1).T,
        lambda view: np.asarray(view.obj)[10:20].view("u2"),
        lambda view: view.obj,
        lambda view: np.asarray(view)[::2].data,
    ]
    for way in ways:
        frames = new()
        kept = way(frames.lend(SIZE))
        gc.collect()
        other = frames.lend(SIZE)
        assert frames.unused_bytes == 0
        assert not np.shares_memory(np.asarray(kept), np.asarray(other))
        del kept
        del other
        frames.lend(2 * SIZE)
        assert frames.unused_bytes == 2 * SIZE


async def test_unused_memory_does_not_exceed_its_limit() -> None:
    frames = new(most=3 * SIZE)
    lent = [frames.lend(SIZE) for _ in range(5)]
    last = address(lent[-1])
    while lent:
        lent.pop(0)
    await asyncio.sleep(0)
    assert frames.unused_bytes == 3 * SIZE
    assert address(frames.lend(SIZE)) == last


async def test_short_and_oversized_frames_are_not_pooled() -> None:
    frames = new(most=SIZE)
    for length in (0, MIN_LONG_FRAME - 1, SIZE + 1):
        assert frames.lend(length).nbytes == length
    assert not frames._lent


async def test_unused_memory_is_freed_after_its_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "UNUSED_LIFETIME", 0.0)
    frames = new()
    for length in (SIZE, MIN_LONG_FRAME):
        frames.lend(length)
    while frames.unused_bytes or frames._timer or frames._returned:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not frames._unused


async def test_memory_released_in_another_thread_is_reused() -> None:
    frames = new()
    lent = [frames.lend(SIZE)]
    at = address(lent[0])
    thread = threading.Thread(target=lent.clear)
    thread.start()
    thread.join()
    while not frames.unused_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert address(frames.lend(SIZE)) == at


@pytest.mark.parametrize("loop_state", ["closed", "deleted"])
def test_lent_memory_is_usable_and_freed_after_the_event_loop_closes(loop_state: str) -> None:
    frames: FrameMemory | None = None

    async def lend() -> memoryview:
        nonlocal frames
        frames = new()
        return frames.lend(SIZE)

    with asyncio.Runner() as runner:
        frame = runner.run(lend())
        loop = weakref.ref(runner.get_loop())
        kept = runner.get_loop() if loop_state == "closed" else None
    gc.collect()
    assert loop() is kept
    frame[:] = bytes(range(256)) * (SIZE // 256)
    assert frame == bytes(range(256)) * (SIZE // 256)
    assert frames is not None
    ((_, block),) = frames._lent.values()
    freed = weakref.ref(block.obj)
    del block, frame
    assert freed() is None
    assert not frames._lent


@pytest.mark.parametrize(
    "length", [MIN_LONG_FRAME, MIN_LONG_FRAME + 1, 200_000, SIZE - 1, 3 * SIZE + 5, 1 << 40]
)
def test_rounding_adds_at_most_one_32nd_to_a_length(length: int) -> None:
    assert length <= rounded(length) <= length * 33 / 32
    assert rounded(rounded(length)) == rounded(length)


@pytest.mark.parametrize("count", [1, 3])  # in the first message, and as their own ones
async def test_arrays_of_successive_messages_reuse_memory(pair: Pair, count: int) -> None:
    sender, receiver = pair
    seen = []
    for i in range(4):
        source: list[Any] = [to_serialize(np.full(SIZE, i, "u1")) for _ in range(count)]
        await sender.write({"x" * (i + 1): source})
        (received,) = (await receiver.read()).values()
        assert all((x == i).all() for x in received)
        seen.append({address(x) for x in received})
        del received
    assert seen[1] == seen[2] == seen[3]


def test_kept_memory_setting_must_be_a_size() -> None:
    with (
        dask.config.set({"distributed.comm.rdma.kept-memory": "much"}),
        pytest.raises(ValueError, match=r"kept-memory must be a size .*, not 'much'"),
    ):
        connection_arguments("rdma://127.0.0.1:1", {})
