"""The tier for vLLM. A stand-in replaces vLLM if it is not installed."""

from __future__ import annotations

import abc
import dataclasses
import enum
import importlib.util
import inspect
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiordma_kv import ThreadClient
from vllm_engine import (
    DEADLINE,
    HIT,
    MISS,
    RETRY,
    ROWS,
    SIZE,
    STAND_INS,
    Engine,
    base,
    blocked_engine,
    config,
    key,
    keys,
    offloading_spec,
    tiering,
)

import aiordma
from aiordma import rpc
from conftest import DEVICE, HOST, Process

StartProcess = Callable[..., Process]
StartEngine = Callable[..., Engine]


@pytest.fixture
def start_engine(request: pytest.FixtureRequest) -> Iterator[StartEngine]:
    with ExitStack() as stack:

        def start(*servers: str, **options: Any) -> Engine:
            engine = Engine(*servers, **({"namespace": request.node.name} | options))
            stack.callback(engine.close)
            return engine

        yield start


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    """Share a server between the tests, each of which has a namespace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIORDMA_DEVICE", DEVICE)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        process = Process("--size", "1M")
    yield process
    process.end()


@pytest.fixture
def engine(start_engine: StartEngine, server: Process) -> Engine:
    return start_engine(server.name)


@pytest.fixture
def observer(server: Process) -> Iterator[ThreadClient]:
    with ThreadClient([server.name]) as client:
        yield client


def stat(observer: ThreadClient, name: str) -> int:
    [stats] = observer.stats().result().values()
    assert stats is not None
    return int(stats[name])


def wait_unlocked(engine: Engine, observer: ThreadClient) -> None:
    end = time.monotonic() + DEADLINE
    while stat(observer, "locked_bytes"):
        assert time.monotonic() < end, "a lock is left"
        if engine.tier.has_pending_work():
            engine.step()


def test_load_returns_stored_blocks(engine: Engine) -> None:
    for row in range(3):
        engine.fill(row, row + 1)
    assert engine.store(keys(1, 2, 3), range(3))
    assert engine.lookup(keys(1, 2, 3, 4)) == [HIT, HIT, HIT, MISS]
    assert engine.load(keys(3, 1, 2), [5, 9, 7]) == (True, set(keys(1, 2, 3)))
    assert [engine.row(row)[:1] for row in (9, 7, 5)] == [b"\1", b"\2", b"\3"]
    assert all(len(set(engine.row(row))) == 1 for row in (9, 7, 5))
    assert not any(map(any, map(engine.row, (4, 6, 8, 10))))


def test_lookup_returns_retry_until_the_servers_have_replied(engine: Engine) -> None:
    engine.store(keys(1), [0])
    assert engine.ask(keys(1)) == [RETRY]
    assert engine.ask(keys(1)) == [RETRY]
    assert not engine.tier.has_pending_work()
    engine.step()
    assert engine.tier.has_pending_work()
    assert engine.lookup(keys(1)) == [HIT]
    assert not engine.tier.has_pending_work()


def test_lookups_of_one_step_need_one_call(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[bytes]] = []
    call = rpc.Client.call

    def count(self: rpc.Client, name: str, value: Any = None, **options: Any) -> Any:
        if name == "locate":
            calls.append(value)
        return call(self, name, value, **options)

    monkeypatch.setattr(rpc.Client, "call", count)
    engine.store(keys(1, 2, 3), range(3))
    for request, wanted in (("a", keys(1, 2)), ("b", keys(2, 3)), ("c", keys(4))):
        assert engine.ask(wanted, request) == [RETRY] * len(wanted)
    engine.step()
    assert engine.lookup(keys(1, 2), "a") == [HIT, HIT]
    assert engine.lookup(keys(2, 3), "b") == [HIT, HIT]
    assert engine.lookup(keys(4), "c") == [MISS]
    engine.ask(keys(4), "c")
    assert [len(each) for each in calls] == [5]


def test_load_reports_which_blocks_it_loaded_when_others_are_unknown(engine: Engine) -> None:
    engine.fill(1, 7)
    engine.store(keys(1, 2, 3), [0, 1, 2])
    assert engine.load(keys(1, 2, 9, 3), [4, 5, 6, 7]) == (False, set(keys(1, 2, 3)))
    assert engine.row(5) == engine.row(1)


def test_lookup_misses_blocks_that_failed_to_load_until_the_request_finishes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    result: Future[list[bool]] = Future()
    result.set_result([True, False])
    engine.store(keys(1, 2), [0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(engine.tier._client, "get", lambda *_: result)
        assert engine.load(keys(1, 2), [2, 3]) == (False, {key(1)})
    assert engine.lookup(keys(1, 2)) == [HIT, MISS]
    assert engine.lookup(keys(1, 2), "other") == [HIT, HIT]
    engine.finish()
    assert engine.lookup(keys(1, 2)) == [HIT, HIT]


def test_load_misses_unknown_blocks(engine: Engine) -> None:
    assert engine.load(keys(1, 2), [0, 1]) == (False, set())
    assert engine.lookup(keys(1, 2)) == [MISS, MISS]


def test_locks_are_released_after_the_load(engine: Engine, observer: ThreadClient) -> None:
    engine.store(keys(1, 2), [0, 1])
    engine.lookup(keys(1, 2))
    assert stat(observer, "locked_bytes")
    engine.start_load(keys(1, 2), [2, 3])
    engine.step()
    engine.drain()
    wait_unlocked(engine, observer)
    assert engine.lookup(keys(1, 2)) == [HIT, HIT]


def test_locks_are_released_at_the_end_of_the_step_when_nothing_is_loaded(
    engine: Engine, observer: ThreadClient
) -> None:
    engine.store(keys(1), [0])
    engine.lookup(keys(1))
    assert stat(observer, "locked_bytes")
    engine.step()
    wait_unlocked(engine, observer)
    assert engine.load(keys(1), [1]) == (True, set(keys(1)))


def test_locks_are_released_when_the_request_finishes_before_the_reply(
    engine: Engine, observer: ThreadClient
) -> None:
    engine.store(keys(1), [0])
    engine.ask(keys(1))
    engine.step()
    engine.finish()
    wait_unlocked(engine, observer)


def test_locks_are_released_when_the_request_finishes_after_the_reply(
    engine: Engine, observer: ThreadClient
) -> None:
    engine.store(keys(1, 2), [0, 1])
    engine.ask(keys(1, 2))
    engine.step()
    engine.lookup(keys(2))
    assert stat(observer, "locked_bytes")
    engine.finish()
    wait_unlocked(engine, observer)


def test_lookups_of_a_finished_request_are_not_sent(engine: Engine, observer: ThreadClient) -> None:
    misses = stat(observer, "misses")
    engine.ask(keys(1))
    engine.finish()
    assert not engine.tier.has_pending_work()
    assert stat(observer, "misses") == misses


def test_load_in_the_step_in_which_the_request_finishes_succeeds(engine: Engine) -> None:
    engine.store(keys(1), [0])
    assert engine.lookup(keys(1)) == [HIT]
    engine.tier.on_request_finished(base.ReqContext("r"))
    engine.start_load(keys(1), [1])
    engine.step()
    [result] = engine.drain()
    assert result.success


def test_each_request_has_its_own_lock(engine: Engine, observer: ThreadClient) -> None:
    engine.store(keys(1), [0])
    assert engine.lookup(keys(1), "a") == [HIT]
    engine.ask(keys(1), "b")
    assert engine.load(keys(1), [1], "a") == (True, set(keys(1)))
    assert engine.load(keys(1), [1], "b") == (True, set(keys(1)))
    wait_unlocked(engine, observer)


def test_lost_server_is_a_miss_and_a_failed_store(
    start_engine: StartEngine, start_process: StartProcess
) -> None:
    server = start_process("--size", "1M")
    engine = start_engine(server.name)
    engine.store(keys(1), [0])
    assert engine.lookup(keys(1)) == [HIT]
    server.end()
    engine.start_load(keys(1), [1])
    engine.start_store(keys(2), [2])
    assert [result.success for result in engine.drain()] == [False, False]
    assert engine.lookup(keys(1), "other") == [MISS]
    engine.finish("other")
    engine.finish()


def test_scheduler_does_not_wait_for_a_paused_server(
    start_engine: StartEngine, start_process: StartProcess
) -> None:
    server = start_process("--size", "1M")
    engine = start_engine(server.name, timeout=DEADLINE)
    server.popen.send_signal(signal.SIGSTOP)
    try:
        engine.ask(keys(1))
        store = engine.start_store(keys(2), [2])
        engine.step()
        assert engine.ask(keys(1)) == [RETRY]
        assert list(engine.tier.get_finished_jobs()) == []
    finally:
        server.popen.send_signal(signal.SIGCONT)
    assert [(result.job_id, result.success) for result in engine.drain()] == [(store, True)]
    assert engine.lookup(keys(1, 2)) == [MISS, HIT]


def test_paused_server_is_a_miss_after_the_timeout(
    start_engine: StartEngine, start_process: StartProcess
) -> None:
    server = start_process("--size", "1M")
    engine = start_engine(server.name, timeout=0.2)
    server.popen.send_signal(signal.SIGSTOP)
    assert engine.lookup(keys(1)) == [MISS]


def test_errors_of_calls_are_misses_and_release_locks(
    engine: Engine,
    observer: ThreadClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed: Future[list[bool]] = Future()
    failed.set_exception(ValueError("planned"))
    engine.store(keys(1, 2), [0, 1])
    assert engine.lookup(keys(1, 2)) == [HIT, HIT]
    with monkeypatch.context() as patch:
        for name in ("put", "get", "locate"):
            patch.setattr(engine.tier._client, name, lambda *_: failed)
        assert engine.load(keys(1, 2), [2, 3]) == (False, set())
        assert not engine.store(keys(3), [4])
        assert engine.lookup(keys(1), "other") == [MISS]
    wait_unlocked(engine, observer)
    assert caplog.text.count("planned") == 3


def test_memory_is_registered_once(
    start_engine: StartEngine, server: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    register = aiordma.Connection.register

    def record(self: aiordma.Connection, memory: Any, **options: Any) -> aiordma.Region:
        sizes.append(memoryview(memory).nbytes)
        return register(self, memory, **options)

    monkeypatch.setattr(aiordma.Connection, "register", record)
    engine = start_engine(server.name)
    engine.store(keys(1, 2), [0, 1])
    assert engine.load(keys(1, 2), [2, 3]) == (True, set(keys(1, 2)))
    assert sizes == [ROWS * SIZE]


def test_tier_starts_without_a_server(start_engine: StartEngine) -> None:
    engine = start_engine(f"{HOST}:1", timeout=0.2)
    assert engine.lookup(keys(1)) == [MISS]
    assert not engine.store(keys(1), [0])


def test_jobs_are_reported_once_by_their_ids(engine: Engine) -> None:
    started = [engine.start_store(keys(number), [number]) for number in range(4)]
    assert sorted(result.job_id for result in engine.drain()) == started
    assert engine.drain() == []


def test_shutdown_waits_for_jobs_and_releases_the_memory(
    start_engine: StartEngine, server: Process, observer: ThreadClient
) -> None:
    engine = Engine(server.name)
    engine.start_store(keys(*range(ROWS)), range(ROWS))
    engine.ask(keys(0))
    engine.step()
    engine.close()  # mmap.close() fails if anything still uses the memory
    names = engine.tier._names(keys(*range(ROWS)))
    assert observer.contains(names).result() == [True] * ROWS
    assert stat(observer, "locked_bytes") == 0


def test_engines_in_two_processes_share_blocks_while_one_is_blocked_in_a_step(
    start_engine: StartEngine, server: Process
) -> None:
    engine = start_engine(server.name, namespace="shared")
    with blocked_engine(server.name, "shared"):
        assert engine.load(keys(4, 2), [3, 8]) == (True, set(keys(4, 2)))
    assert engine.row(3) == bytes([5]) * SIZE
    assert engine.row(8) == bytes([3]) * SIZE


@pytest.mark.parametrize(
    "changes",
    [
        {"model": config.OffloadingModelConfig("other", "float16")},
        {"model": config.OffloadingModelConfig("model", "float32")},
        {"cache": config.OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1)},
        {"groups": ()},
        {"parallel": {"tp_size": 1}},
        {"canonical_layout": True},
        {"kv_cache_layout": "HND"},
        {"replicated_layout": True},
    ],
    ids=str,
)
def test_engines_with_other_blocks_do_not_share_them(
    start_engine: StartEngine, server: Process, engine: Engine, changes: dict[str, Any]
) -> None:
    engine.store(keys(1), [0])
    other = start_engine(server.name, spec=offloading_spec(**changes))
    assert other.lookup(keys(1)) == [MISS]


def test_engines_share_blocks_that_do_not_depend_on_parallelism(
    start_engine: StartEngine, server: Process
) -> None:
    specs = [
        offloading_spec(parallel={"is_parallelism_agnostic": True, "tp_size": size}, engine_id=name)
        for size, name in ((1, "one"), (2, "two"))
    ]
    one, two = (start_engine(server.name, spec=spec) for spec in specs)
    one.store(keys(1), [0])
    assert two.lookup(keys(1)) == [HIT]


def test_namespace_separates_blocks(start_engine: StartEngine, server: Process) -> None:
    one, two = (start_engine(server.name, namespace=name) for name in ("one", "two"))
    one.store(keys(1), [0])
    assert one.lookup(keys(1)) == [HIT]
    assert two.lookup(keys(1)) == [MISS]


def test_tier_accepts_the_options_of_vllm_and_of_the_server(
    start_engine: StartEngine, start_process: StartProcess, tmp_path: Path
) -> None:
    auth = tmp_path / "key"
    auth.write_bytes(b"k" * 32)
    server = start_process("--size", "1M", "--auth-file", str(auth), "--encrypt")
    detector = object()
    engine = start_engine(
        server.name,
        auth_file=str(auth),
        encrypt=True,
        device=DEVICE,
        locality="REMOTE",
        backpressure_detector=detector,
    )
    assert engine.tier.locality is base.Locality.REMOTE
    assert engine.tier.bp_detector is detector
    assert engine.store(keys(1), [0])
    assert engine.load(keys(1), [1]) == (True, set(keys(1)))


def test_tier_names_a_key_file_that_is_too_short(server: Process, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(ValueError, match=f"invalid key file {tmp_path}"):
        Engine(server.name, auth_file=str(tmp_path / "key"))


def test_unknown_options_raise_type_error(server: Process) -> None:
    with pytest.raises(TypeError, match="severs"):
        Engine(server.name, severs=[])


def load_stand_in(name: str) -> ModuleType:
    """Load a module of the stand-in under another name, even if vLLM is installed."""
    path = STAND_INS.joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"stand_in_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


IS_INSTALLED = not str(base.__file__).startswith(str(STAND_INS))


def describe(cls: Any) -> list[Any]:
    """Return the fields of a dataclass, the members of an enumeration, or else the methods."""
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    if issubclass(cls, enum.Enum):
        return list(cls.__members__)
    if issubclass(cls, tuple):
        return list(cls._fields)
    return [
        (name, [(each.name, each.kind, each.default) for each in parameters])
        for name, function in inspect.getmembers(cls, inspect.isfunction)
        for parameters in [inspect.signature(function).parameters.values()]
    ]


@pytest.mark.skipif(not IS_INSTALLED, reason="vLLM is not installed")
@pytest.mark.parametrize("real", [base, config, tiering], ids=lambda module: module.__name__)
def test_stand_in_matches_vllm(real: ModuleType) -> None:
    stand_in = load_stand_in(real.__name__)
    own = [
        cls
        for cls in vars(stand_in).values()
        if inspect.isclass(cls) and cls.__module__ == stand_in.__name__
    ]
    assert own
    for cls in own:
        other = getattr(real, cls.__name__)
        assert [each for each in describe(cls) if each not in describe(other)] == []
        assert getattr(cls, "__abstractmethods__", 0) == getattr(other, "__abstractmethods__", 0)


class OlderJob:
    block_ids: list[int]


class NewerManager(tiering.SecondaryTierManager):
    @abc.abstractmethod
    def prefetch(self) -> None: ...


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda patch: patch.setitem(sys.modules, "vllm", None), "import of vllm halted"),
        (lambda patch: patch.delattr(base, "ScheduleEndContext"), "ScheduleEndContext"),
        (
            lambda patch: patch.setattr(tiering, "TransferJob", OlderJob),
            "OlderJob has no chunk_ids",
        ),
        (
            lambda patch: patch.setattr(tiering, "SecondaryTierManager", NewerManager),
            "SecondaryTierManager requires prefetch",
        ),
    ],
    ids=["missing", "older", "older job", "newer"],
)
def test_import_error_names_the_tested_version(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], problem: str
) -> None:
    spec = importlib.util.find_spec("aiordma_kv.vllm")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    change(monkeypatch)
    with pytest.raises(ImportError, match=rf"tested with vLLM 0\.32\.0 .*{problem}.*pip install"):
        spec.loader.exec_module(module)
