"""Tests of aiordma.testing: faults, their counts and seeds, pairs, and leak checks."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest

import aiordma
from aiordma import testing, verbs
from aiordma.errors import BusyError, UnreachableError, VerbsError
from aiordma.verbs import EventType, SendFlags, WCStatus, WROpcode
from conftest import ConnectedPair, End
from tests.processes import run_python

Via = Literal["cm", "tcp"]

needs_faults = pytest.mark.needs("faults")


def send(end: End, number: int = 1) -> None:
    end.qp.post_send_one(number, WROpcode.SEND, SendFlags.SIGNALED, end.mr.addr, 8, end.mr.lkey)


def receive(end: End, number: int = 1) -> None:
    end.qp.post_recv_one(number, end.mr.addr, 8, end.mr.lkey)


# --- reliable connections ------------------------------------------------------------------------


@needs_faults
@pytest.mark.parametrize("via", ["cm", "tcp"])
@pytest.mark.parametrize("seed", range(3))
async def test_connection_survives_loss_and_duplicates(
    device_name: str, via: Via, seed: int
) -> None:
    with testing.faults(
        seed=seed, loss=0.03, duplicate=0.03, jitter=1e-4, device=device_name
    ) as faults:
        async with testing.connected_pair(device=device_name, via=via) as (a, b):
            for size in (1, 3000, 200_000):
                data = os.urandom(size)
                for _ in range(10):
                    await a.send(data)
                    with await b.recv() as message:
                        assert bytes(message) == data
                        await b.send(message)
                    with await a.recv() as message:
                        assert bytes(message) == data
    counts = faults.counts()
    assert counts.lost
    assert counts.duplicated
    assert counts.delayed
    assert counts.retried


@needs_faults
def test_rnr_fault_delays_or_fails_a_send(connected_pair: ConnectedPair, device_name: str) -> None:
    a, b = connected_pair(rnr_retry=3)
    for number in range(2):
        receive(b, number)
    with testing.faults(rnr="@1-3", device=device_name) as faults:
        send(a)
        assert a.completion().status is WCStatus.SUCCESS
        assert b.completion().status is WCStatus.SUCCESS
    assert faults.counts() == testing.FaultCounts(not_ready=3)
    with testing.faults(rnr=1, device=device_name):
        send(a)
        assert a.completion().status is WCStatus.RNR_RETRY_EXC_ERR


@needs_faults
async def test_handshake_fault_delays_connect_until_its_timeout(device_name: str) -> None:
    async def connected(seconds: float) -> None:
        config = aiordma.Config(connect_timeout=seconds)
        async with testing.connected_pair(device=device_name, config=config):
            pytest.fail("it has not been lost")

    with testing.faults(handshake="@1", device=device_name) as faults:
        connecting = asyncio.create_task(connected(1000))
        while not faults.counts().handshakes:  # noqa: ASYNC110 - nothing tells of that
            await asyncio.sleep(0)
        assert faults.counts() == testing.FaultCounts(handshakes=1)
        connecting.cancel()
        await asyncio.wait([connecting])
        assert connecting.cancelled()
    with testing.faults(handshake=1, device=device_name), pytest.raises(UnreachableError):
        await connected(0.3)


# --- other kinds ---------------------------------------------------------------------------------


@needs_faults
def test_overrun_fault_reports_cq_err(
    context: verbs.Context, connected_pair: ConnectedPair, device_name: str
) -> None:
    a, b = connected_pair()
    receive(b)
    with testing.faults(overrun=1, cq=b.cq, device=device_name) as faults:
        send(a)
        with pytest.raises(VerbsError):
            b.completions(1)
    assert faults.counts().overruns == 1
    assert EventType.CQ_ERR in [event.type for event in context.async_events()]


@needs_faults
def test_register_fault_fails_the_numbered_registration(
    pd: verbs.ProtectionDomain, device_name: str
) -> None:
    """Each plan starts counting registrations and faults from zero."""
    for _ in range(2):
        with testing.faults(register="@2", device=device_name) as faults:
            pd.reg_mr(64).close()
            with pytest.raises(VerbsError, match="memory"):
                pd.reg_mr(64)
            pd.reg_mr(64).close()
        pd.reg_mr(64).close()
        assert faults.counts() == testing.FaultCounts(registrations=1)


def which_fail(pd: verbs.ProtectionDomain, faults: testing.Faults) -> str:
    """Try thirty registrations. Return "x" for each failure and "." for each success."""
    found = ""
    for _ in range(30):
        try:
            pd.reg_mr(64).close()
            found += "."
        except VerbsError:
            found += "x"
    assert faults.counts().registrations == found.count("x")
    return found


@needs_faults
def test_failure_note_contains_a_seed_that_reproduces_the_faults(
    pd: verbs.ProtectionDomain, device_name: str
) -> None:
    def fail(faults: testing.Faults) -> None:
        raise LookupError(faults.seed, which_fail(pd, faults))

    with (
        pytest.raises(LookupError) as info,
        testing.faults(register=0.5, device=device_name) as faults,
    ):
        fail(faults)
    seed, found = info.value.args
    (note,) = info.value.__notes__
    assert note.startswith(f"injected faults (seed={seed},register=0.5,device={device_name}): ")
    assert f"registrations={found.count('x')}," in note
    with testing.faults(seed=seed, register=0.5, device=device_name) as faults:
        assert which_fail(pd, faults) == found


# --- plans ---------------------------------------------------------------------------------------


@needs_faults
def test_fault_plan_contains_every_option(device_name: str, cq: verbs.CompletionQueue) -> None:
    given: dict[str, Any] = {
        "seed": 3, "loss": 1e-9, "duplicate": "0.5@7-", "frames": "answers", "delay": 1e-6,
        "jitter": 2.5, "rate": 10, "cut": "@4", "cut_after": 5, "rnr": 0.25, "overrun": "@6-8",
        "register": 0, "handshake": "@9", "qp": 17, "cq": cq, "device": device_name,
    }  # fmt: skip
    with pytest.raises(AssertionError), testing.faults(**given) as faults:
        assert repr(faults) == f"<Faults {faults.plan}: {testing.FaultCounts()}>"
    assert faults.plan == (
        "seed=3,loss=0.000000001,duplicate=0.5@7-,frames=answers,delay=1000ns,"
        "jitter=2500000000ns,rate=10,cut=@4,cut_after=5,rnr=0.25,overrun=@6-8,handshake=@9,"
        f"qp=17,cq={cq.handle},device={device_name}"
    )


@needs_faults
def test_injected_fault_that_never_occurs_raises_assertion_error(
    pd: verbs.ProtectionDomain, device_name: str
) -> None:
    """A fault with a probability must have had an opportunity to happen."""

    def register(times: int, **given: Any) -> None:
        with testing.faults(seed=1, device=device_name, **given):
            for _ in range(times):
                with suppress(VerbsError):
                    pd.reg_mr(64).close()

    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("register=@3", 2, {"register": "@3"}),
        ("register=1", 0, {"register": 1}),
        ("register=0.5", 0, {"register": 0.5}),
        ("loss=@1", 1, {"loss": "@1", "register": "@1"}),
        ("delay=1000000000ns", 1, {"delay": 1, "register": "@1"}),
        ("overrun=@1, handshake=1", 1, {"overrun": "@1", "handshake": 1}),
    ]
    for never, times, given in cases:
        with pytest.raises(
            AssertionError, match=f"^injected faults that never happened: {never};"
        ) as caught:
            register(times, **given)
        assert "injected faults (seed=1," in caught.value.__notes__[0]
    register(1, register=1e-9)
    register(2, register="@2-5")
    register(0)


@needs_faults
def test_second_fault_plan_raises_busy_error(device_name: str) -> None:
    with (
        testing.faults(seed=1, device=device_name),
        pytest.raises(BusyError, match=rf"already injects faults \(seed=1,device={device_name}\)"),
        testing.faults(device=device_name),
    ):
        pass


@needs_faults
def test_invalid_fault_plan_error_identifies_the_option(
    device: verbs.Device, device_name: str
) -> None:
    wrong: dict[str, dict[str, object]] = {
        "'loss=2': expected a probability from 0 to 1": {"loss": 2},
        "'qp=0': expected a number from 1": {"qp": 0},
        "'cq=0': expected a number from 1": {"cq": 0},
        "delay must be a finite non-negative number of seconds": {"delay": float("inf")},
        "jitter must be a finite non-negative number of seconds": {"jitter": float("nan")},
        "loss must be a probability or text such as '@3', not None": {"loss": None},
        "frames must be a str such as 'requests', not None": {"frames": None},
        "frames must be a str such as 'requests', not str ''": {"frames": ""},
        "loss must be a probability or text such as '@3', not str ''": {"loss": ""},
        "cq must be a CompletionQueue or a number, not str 'x'": {"cq": "x"},
    }
    for part, given in wrong.items():
        faults = testing.faults(device=device_name, **given)  # type: ignore[arg-type]
        with pytest.raises((ValueError, TypeError), match=part), faults:
            pass
    for text, says in {
        "los=1": "'los=1': unknown part; expected seed",
        "loss=@1,device=embedded31": "'device=embedded31': device not found",
        "cut_after=5": "cut_after requires cut",
        "overrun=0,cq=3": "cq requires overrun",
        "rnr=1,frames=answers": "frames requires loss or duplicate",
    }.items():
        with pytest.raises(ValueError, match=f"fault plan: {says}"):
            device.set_faults(text)
    with testing.faults(device=device_name):  # no invalid plan is set
        pass
    assert device.fault_counts() - device.fault_counts() == testing.FaultCounts()


@pytest.mark.parametrize("block", [testing.faults, testing.check_leaks])
def test_unentered_context_manager_warns(block: Callable[[], object]) -> None:
    name = getattr(block, "__name__", "")
    says = (
        f"^testing.{name}\\(\\) was never entered, so it had no effect: write `with "
        f"testing.{name}\\(...\\):` around the code under test$"
    )
    with pytest.warns(RuntimeWarning, match=says):
        block()


def test_check_leaks_can_be_used_as_a_decorator() -> None:
    @testing.check_leaks()
    def work(number: int) -> int:
        return number

    assert work(5) == 5
    assert work(6) == 6


def test_check_leaks_rejects_invalid_timeout_before_the_block() -> None:
    wrong: Any = "5"
    with (
        pytest.raises(TypeError, match="timeout must be a number of seconds, not str '5'"),
        testing.check_leaks(timeout=wrong),
    ):
        pytest.fail("the block has run")


@pytest.mark.parametrize(
    ("types", "plan", "never"),
    [
        ([], "loss=0.5,register=0.5,handshake=0.5", "loss=0.5, register=0.5, handshake=0.5"),
        (["trace"], "loss=0.5,register=0.5,handshake=0.5", "loss=0.5, register=0.5"),
        (["trace", "reg_mr"], "loss=0.5,register=0.5", "loss=0.5"),
        (["trace", "create_qp"], "loss=0.5,register=0.5,delay=0.5s", "register=0.5"),
        (["trace", "create_qp"], "loss=@1,loss=0,seed=7,qp=3", "loss=@1"),
        (["trace"], "delay=0.5s,rate=5", "delay=0.5s, rate=5"),
    ],
)
def test_traces_identify_faults_that_could_not_occur(
    types: list[str], plan: str, never: str, tmp_path: Path
) -> None:
    (tmp_path / "1.jsonl").write_text("".join(f'{{"t":1,"type":"{it}"}}\n' for it in types))
    assert testing._never_happened(plan, tmp_path) == never


def child(program: str, plan: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", program, AIORDMA_EMBEDDED_FAULTS=plan, AIORDMA_DEVICE="embedded0")


def test_faults_environment_variable_injects_faults() -> None:
    program = (
        "from aiordma import verbs\n"
        "with verbs.find_device('embedded0').open() as context, context.alloc_pd() as pd:\n"
        "    for n in range(3):\n"
        "        try: pd.reg_mr(64).close(); print('fine')\n"
        "        except verbs.VerbsError as error: print(error.errno)\n"
    ).replace("verbs.VerbsError", "Exception")
    assert child(program, "register=@2").stdout == "fine\n12\nfine\n"
    done = child(program, "register=@2,device=embedded7")
    assert done.returncode == 1
    assert "'device=embedded7': device not found" in done.stderr


# --- pairs and leaks -----------------------------------------------------------------------------


async def test_connected_pair_applies_config_and_closes_both_connections(device_name: str) -> None:
    config = aiordma.Config(max_message=100_000)
    async with testing.connected_pair(device=device_name, config=config) as pair:
        assert [connection.max_message for connection in pair] == [100_000] * 2
    assert all("closed" in repr(connection) for connection in pair)


@pytest.fixture
def left() -> Iterator[list[object]]:
    things: list[object] = []
    yield things
    for it in things:
        it.close()  # type: ignore[attr-defined]


@contextmanager
def leak(match: str) -> Iterator[None]:
    """Check that the block leaks and that the error message matches `match`."""
    with pytest.raises(AssertionError, match=match), testing.check_leaks(timeout=0):
        yield


def test_leak_check_does_not_wait_without_leaks(
    context: verbs.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it has waited"))
    with testing.check_leaks(), open(os.devnull), context.alloc_pd():
        pass


def test_leaked_file_is_reported(left: list[object]) -> None:
    """The file may have the number of another file that was closed."""
    with leak(r"file \d+: /dev/null"):
        left.append(open(os.devnull))  # noqa: SIM115
    reader, writer = os.pipe()
    os.close(writer)
    with leak(f"file {reader}: /dev/null"):
        os.close(reader)
        left.append(open(os.devnull))  # noqa: SIM115


def test_renamed_open_file_is_not_a_leak(tmp_path: Path) -> None:
    with open(tmp_path / "before", "w"), testing.check_leaks(timeout=0):
        (tmp_path / "before").rename(tmp_path / "after")
        (tmp_path / "after").unlink()


def test_leaked_thread_is_reported() -> None:
    """The number of threads does not change, because another one ends."""
    ends = {name: threading.Event() for name in ("first", "second")}
    first, second = (threading.Thread(target=end.wait, name=name) for name, end in ends.items())
    first.start()
    try:
        with leak(r"^the block leaked:\nthread \d+: second$"):
            second.start()
            ends["first"].set()
            first.join()
    finally:
        ends["second"].set()
        second.join()


def test_io_uring_thread_is_not_a_leak() -> None:
    """The kernel creates and ends this thread. One of uvloop's appeared in an unrelated test."""
    libc, sqpoll = ctypes.CDLL(None, use_errno=True), 2
    parameters = (ctypes.c_uint32 * 30)(0, 0, sqpoll)
    before, threads = testing.Held.now(), {*os.listdir("/proc/self/task")}
    ring = libc.syscall(425, 8, parameters)  # io_uring_setup
    if ring < 0:
        pytest.skip(f"io_uring: {os.strerror(ctypes.get_errno())}")
    with os.fdopen(ring, "rb"):
        assert {*os.listdir("/proc/self/task")} - threads
        assert before.growth(testing.Held.now()) == f"file {ring}: anon_inode:[io_uring]"


def test_thread_omitted_from_the_first_task_list_is_not_a_leak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel's list may lack threads while another one ends; the check lists them again."""
    lists = 0

    def listed(path: str) -> list[str]:
        nonlocal lists
        names = os_listdir(path)
        if path == "/proc/self/task":
            lists += 1
            if lists == 1:
                names.remove(str(thread.native_id))
        return names

    os_listdir = os.listdir
    monkeypatch.setattr(os, "listdir", listed)
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        with testing.check_leaks(timeout=0):
            pass
        assert lists > 1
    finally:
        end.set()
        thread.join()


def test_leak_check_waits_for_objects_to_be_released(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, a queue pair and a thread end in turn while the check waits."""
    end = threading.Event()
    endings: list[Callable[[], object]] = []

    def wait(seconds: float) -> None:
        if endings:
            endings.pop()()
        else:
            os.sched_yield()

    pd.create_qp(cq).close()  # the first queue pair opens the process's port
    with testing.check_leaks(timeout=60):
        threading.Thread(target=end.wait).start()
        endings += [end.set, open(os.devnull).close, pd.create_qp(cq).close]  # noqa: SIM115
        monkeypatch.setattr(time, "sleep", wait)
    assert not endings


@pytest.mark.any_device
def test_joined_thread_is_not_a_leak(device: verbs.Device) -> None:
    """The kernel still lists a thread, such as the device's, for some time after the join."""
    for _ in range(200):
        with testing.check_leaks(timeout=60), device.open():
            pass
        with testing.check_leaks(timeout=60):
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()


def test_block_exception_takes_precedence_over_leak_report(left: list[object]) -> None:
    def leak_and_fail() -> None:
        left.append(open(os.devnull))  # noqa: SIM115
        raise LookupError

    with pytest.raises(LookupError), testing.check_leaks():
        leak_and_fail()
