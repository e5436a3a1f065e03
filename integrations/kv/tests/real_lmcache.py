"""Runs of LMCache's own check, benchmark and storage manager. They need LMCache 0.5.6."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from conftest import Process

with warnings.catch_warnings():
    # LMCache uses a deprecated class of OpenTelemetry.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch
    from lmcache.v1.distributed import config
    from lmcache.v1.distributed.api import (
        GroupedObjectKeys,
        MemoryLayoutDesc,
        ObjectKey,
        PrefetchTaskSpec,
    )
    from lmcache.v1.distributed.internal_api import L2AdapterListener
    from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
    from lmcache.v1.distributed.storage_manager import StorageManager

StartProcess = Callable[..., Process]


def adapter_config(server: Process) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "aiordma_kv.lmcache",
        "class_name": "L2Adapter",
        "adapter_params": {"servers": [server.name]},
    }


def run_lmcache(server: Process, *arguments: str) -> str:
    """Run a module of LMCache with the adapter, and return and print its output."""
    command = [sys.executable, "-m", *arguments, "--l2-adapter", json.dumps(adapter_config(server))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def lmcache_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setenv("LMCACHE_DISABLE_BANNER", "1")
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")


@pytest.fixture(autouse=True)
def leak_check() -> None:
    """Check nothing: LMCache keeps threads and files until the process ends."""


def test_basic_check_passes(start_process: StartProcess) -> None:
    server = start_process("--size", "64M")
    output = run_lmcache(server, "lmcache.v1.basic_check", "--mode", "test_l2_adapter")
    assert "Validation: 5/5 correctly absent" in output
    assert "Batch store OK" in output
    assert "Validation: 5/5 found" in output
    assert "Validation (loaded): 5/5" in output
    assert "Validation (content): 5/5" in output


@pytest.mark.parametrize("options", [[], ["--lookup-max-hit-rate", "1", "--in-flight", "4"]])
def test_benchmark_verifies_the_data(start_process: StartProcess, options: list[str]) -> None:
    server = start_process("--size", "512M")
    output = run_lmcache(
        server, "lmcache.cli.main", "bench", "l2", "--no-skip-verify", "--rounds", "3", *options
    )
    keys = 128 if options else 32
    assert output.count(f"success_keys={keys}/{keys}") == 4
    assert output.count(f"found={keys if options else 0}/{keys}") == 4
    assert output.count(f"loaded={keys}/{keys}") == 4
    assert f"All {keys} keys data verified OK" in output


class Stored(L2AdapterListener):
    def __init__(self) -> None:
        self.keys: list[ObjectKey] = []
        self.event = threading.Event()

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.keys += keys
        self.event.set()

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None: ...

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None: ...


@pytest.mark.parametrize("shared_memory", [False, True])
def test_storage_manager_loads_objects_that_l1_has_dropped(
    start_process: StartProcess, shared_memory: bool
) -> None:
    server = start_process("--size", "64M")
    options = {} if shared_memory else {"shm_name": ""}
    manager = StorageManager(
        config.StorageManagerConfig(
            config.L1ManagerConfig(config.L1MemoryManagerConfig(64 << 20, False, **options)),
            config.EvictionConfig("LRU"),
            L2AdaptersConfig([PluginL2AdapterConfig.from_dict(adapter_config(server))]),
        )
    )
    try:
        stored = Stored()
        manager.register_l2_listener(stored)
        keys = [ObjectKey(bytes([number]) * 16, "model", 0) for number in range(8)]
        layout = MemoryLayoutDesc([torch.Size([1 << 18])], [torch.float32])
        for number, block in enumerate(manager.reserve_write(keys, layout).values()):
            block.tensor.fill_(number)
        manager.finish_write(keys)
        assert stored.event.wait(60)
        assert stored.keys == keys
        assert manager.delete_l1_keys(keys, force=True)[0] == len(keys)

        handle = manager.submit_prefetch_task(
            PrefetchTaskSpec([GroupedObjectKeys(keys, 0, layout)])
        )
        assert manager.wait_prefetch_status(handle, 60)
        result = manager.query_prefetch_status(handle)
        assert result is not None
        assert result.l2_hit_count == len(keys)
        with manager.read_prefetched_results(keys) as blocks:
            assert blocks is not None
            for number, block in enumerate(blocks):
                assert torch.all(block.tensor == number)
        manager.finish_read_prefetched(keys)
    finally:
        manager.close()
