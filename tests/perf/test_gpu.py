"""Tests of GPU memory, with a fake of NVIDIA's driver whose GPU memory is memfds."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from aiordma.cli.app import app
from aiordma.perf import client, gpu
from aiordma.perf.gpu import GPU, GPUError

from .test_measuring import measured, one_loop, settings

INVALID = 1


class Driver:
    """A fake CUDA driver in which a device pointer is the file descriptor of a memfd."""

    def __init__(self) -> None:
        self.files: dict[int, tuple[int, mmap.mmap]] = {}
        self.retained = 0
        self.fails = ""
        self.most = 0

    def __getattribute__(self, name: str) -> Any:
        """Replace the CUDA function that `fails` names with one that always fails."""
        if name.startswith("cu") and name == self.fails:
            return lambda *_: INVALID
        return super().__getattribute__(name)

    def cuInit(self, flags: int) -> int:
        return flags

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 7
        return ordinal

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        assert device.value == 7
        self.retained += 1
        context._obj.value = 1
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        return INVALID if context.value != 1 else 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        self.retained -= 1
        return 0

    def cuMemAlloc_v2(self, pointer: Any, size: Any) -> int:
        fd = os.memfd_create("gpu")
        os.ftruncate(fd, size.value)
        pointer._obj.value = fd
        self.files[fd] = fd, mmap.mmap(fd, size.value)
        self.most = max(self.most, len(self.files))
        return 0

    def cuMemFree_v2(self, pointer: Any) -> int:
        fd, memory = self.files.pop(pointer.value)
        memory.close()
        os.close(fd)
        return 0

    def cuMemGetHandleForAddressRange(
        self, fd: Any, pointer: Any, size: Any, kind: int, flags: Any
    ) -> int:
        assert size.value % gpu.PAGE == 0
        assert (kind, flags.value) == (1, 0)
        fd._obj.value = os.dup(pointer.value)
        return 0

    def cuMemcpyHtoD_v2(self, pointer: Any, data: bytes, size: Any) -> int:
        self.files[pointer.value][1][: size.value] = data
        return 0

    def cuMemcpyDtoH_v2(self, data: Any, pointer: Any, size: Any) -> int:
        ctypes.memmove(data, self.files[pointer.value][1][: size.value], size.value)
        return 0

    def cuGetErrorName(self, code: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(client, "GPU", lambda: GPU(lambda name: made))
    return made


@one_loop
@pytest.mark.needs("dma-buf")
@pytest.mark.parametrize("metric", ["lat", "rate"])
@pytest.mark.parametrize("operation", ["write", "read"])
async def test_one_sided_operations_use_gpu_memory(
    device_name: str, host: str, driver: Driver, operation: str, metric: str
) -> None:
    asked = replace(settings(operation, metric), gpu=True, connections=2)
    try:
        (result,) = await measured(device_name, host, asked)
    finally:
        assert (driver.files, driver.retained) == ({}, 0)
    assert driver.most == 2
    assert result is not None
    assert result.mismatch == ""


@one_loop
@pytest.mark.parametrize(
    "call",
    [
        *("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"),
        *("cuMemAlloc_v2", "cuMemGetHandleForAddressRange"),
    ],
)
async def test_failing_gpu_call_raises_gpu_error(
    device_name: str, host: str, driver: Driver, call: str
) -> None:
    driver.fails = call
    with pytest.raises(GPUError, match=rf"{call} failed with CUDA_ERROR_INVALID_VALUE \(1\)"):
        await measured(device_name, host, replace(settings("write", "bw"), gpu=True))
    assert driver.files == {}
    assert driver.retained == (call == "cuCtxSetCurrent")


def test_perf_gpu_fails_without_the_cuda_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "LIBRARY", str(tmp_path / "libcuda.so.1"))
    done = CliRunner().invoke(app, ["perf", "--local", "read", "bw", "--gpu"])
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: no GPU can be used: ")
    assert "libcuda.so.1 cannot be loaded" in done.stderr
