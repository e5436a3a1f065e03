"""Tests of conftest.py: missing devices, leaks, coroutines and combinations."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import LACKS

ROOT = Path(__file__).parents[1]

BROKEN = """
import asyncio, contextlib, os, pytest, subprocess, sys, threading
from aiordma import verbs
import conftest
from conftest import *
conftest.PATIENCE = 0.1
conftest.TIME_LIMIT = 3.0

def test_open_file_is_leaked(device_name):
    globals()['kept'] = open(os.devnull)
def test_running_thread_is_leaked(device_name):
    wait = threading.Event().wait
    threading.Thread(target=wait, name='kept', daemon=True).start()
def test_open_queue_pair_is_leaked(device):
    globals()['context'] = context = device.open()
    globals()['qp'] = context.alloc_pd().create_qp(context.create_cq(1))
@pytest.mark.needs('UD')
def test_ud_queue_pairs_are_supported(device_name):
    pass

async def test_event_loop_runs_in_debug_mode(device_name):
    assert asyncio.get_running_loop().get_debug()
    print('on', type(asyncio.get_running_loop()).__module__)
async def test_event_loop_type_is_printed(device_name):
    print('on', type(asyncio.get_running_loop()).__module__)
async def test_callback_fails(device_name):
    def fail(): raise RuntimeError('in a callback')
    asyncio.get_running_loop().call_soon(fail)
    await asyncio.sleep(0)
async def test_task_fails(device_name):
    async def fail(): raise RuntimeError('in a task')
    asyncio.create_task(fail())
    await asyncio.sleep(0)
async def test_async_test_exceeds_time_limit(device_name):
    with child(1001):
        await asyncio.get_running_loop().create_future()
@pytest.mark.timeout(1)
def test_sync_test_exceeds_time_limit(device_name):
    with child(1002) as process:
        process.wait()
@contextlib.contextmanager
def child(seconds):
    process = subprocess.Popen([sys.executable, '-c', f'import time; time.sleep({seconds})'])
    try:
        yield process
    finally:
        process.kill()
        process.wait()

def test_without_device_fails():
    raise LookupError
"""


def pytest_run(*arguments: str, below: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run pytest. It loads conftest.py files only from `below` and its subfolders."""
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "no:cacheprovider"]
    command += ["-q", f"--confcutdir={below}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("option", ["--device", "--peer"])
def test_missing_device_fails_the_run(option: str) -> None:
    done = pytest_run(
        option, "nobody0", "tests/verbs/test_raw.py::test_raw_calls_transfer_a_message"
    )
    assert done.returncode == 1
    assert f"{option} nobody0: " in done.stdout
    assert "device 'nobody0' not found; available devices: " in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.any_device
def test_conftest_fails_tests_with_leaks_and_reported_errors(
    tmp_path: Path, device_name: str
) -> None:
    """Errors that reach only the event loop count, too.

    Tests that need no device are not repeated for another device.
    """
    path = tmp_path / "test_broken.py"
    path.write_text(BROKEN)
    arguments = "-p", "conftest", "--device", device_name, "-rA", str(path)
    printed = pytest_run(*arguments, below=tmp_path).stdout
    there = "UD" not in LACKS.get(device_name.rstrip("0123456789"), ())
    leaked = " - AssertionError: the block leaked"
    reported = " - AssertionError: reported to the event loop"
    for outcome, name, error in (
        ("ERROR", "open_file_is_leaked", leaked),
        ("ERROR", "running_thread_is_leaked", leaked),
        ("ERROR", "open_queue_pair_is_leaked", leaked),
        (
            "PASSED" if there else "FAILED",
            "ud_queue_pairs_are_supported",
            "$" if there else " - Failed: the",
        ),
        ("PASSED", "event_loop_runs_in_debug_mode", "$"),  # without a combination in its name
        ("PASSED", "event_loop_type_is_printed", "$"),
        ("ERROR", "callback_fails", reported),
        ("ERROR", "task_fails", reported),
        ("FAILED", "async_test_exceeds_time_limit", " - TimeoutError"),
        ("FAILED", "sync_test_exceeds_time_limit", " - Failed: Timeout"),
    ):
        assert re.search(rf"(?m)^{outcome} \S*::test_{name}{error}", printed), printed
    for told in (
        r"file \d+: /dev/null",
        r"thread \d+: kept",
        "Context: 0 before, 1 after",
        "QueuePair: 0 before, 1 after",
        r"RuntimeError\('in a callback'\)",
        r"RuntimeError\('in a task'\)",
        r"- Captured combination setup -+\n(asyncio|uvloop)\n",
        r"process \d+: .* import time; time\.sleep\(1001\)",
        r"process \d+: .* import time; time\.sleep\(1002\)",
    ):
        assert re.search(told, printed), told
    # The timeout is printed immediately, not only at the end of the run.
    assert re.search(
        r"(?m)^failed in call: \S*::test_async_test_exceeds_time_limit: \S+: TimeoutError$", printed
    ), printed
    assert {"on asyncio.unix_events", "on uvloop"} <= set(printed.splitlines())
    not_repeated = "1 tests to which this run makes no difference are not repeated"
    assert (not_repeated in printed) == ("::test_without_device_fails" not in printed)
    assert (not_repeated in printed) == (device_name != "embedded0")
