"""The tests' own tools: a missing device fails, leaks are seen, both loops run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from aiordma.testing import Held
from tests.conftest import LACKS, Run

ROOT = Path(__file__).parents[1]


def pytest_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_missing_device_is_a_failure() -> None:
    done = pytest_run("--device", "nobody0", "tests/verbs/test_ports.py", "-k", "gid_table")
    assert done.returncode == 1
    assert "--device nobody0: " in done.stdout
    assert "no device 'nobody0'; there are: " in done.stdout
    assert "skipped" not in done.stdout


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A test file that does what must not go unnoticed."""
    path = tmp_path / "test_broken.py"
    path.write_text(
        "import os, pytest\n"
        "from aiordma import verbs\n"
        "from tests import conftest\n"
        "from tests.conftest import *\n"
        "conftest.PATIENCE = 0.1\n"
        "def test_leak(device_name):\n"
        "    globals()['kept'] = open(os.devnull)\n"
        "def test_object(device):\n"
        "    globals()['context'] = device.open()\n"
        "@pytest.mark.needs('UD')\n"
        "def test_it_works_after_all(device_name):\n"
        "    pass\n"
    )
    return path


def test_leaks_and_wrong_expectations_fail(broken: Path, device_name: str) -> None:
    done = pytest_run("-p", "tests.conftest", "--device", device_name, str(broken))
    assert "/dev/null" in done.stdout
    assert "Context: 0 before, 1 after" in done.stdout
    listed = "the device is listed as lacking UD" in done.stdout
    assert listed == ("UD" in LACKS.get(device_name.rstrip("0123456789"), ()))
    assert done.returncode == 1


def test_what_asks_for_no_device_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "test_pure.py"
    path.write_text("def test_fails():\n    raise LookupError\n")
    arguments = "-v", "-p", "tests.conftest", str(path), "--device"
    elsewhere = pytest_run(*arguments, "nobody0")
    assert elsewhere.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "1 tests ask for no device and are not repeated" in elsewhere.stdout
    assert pytest_run(*arguments, "embedded0").returncode == pytest.ExitCode.TESTS_FAILED


def test_growth() -> None:
    tty, thread = {(1, 0, 0, ""): "tty"}, {(17, 100): "main"}
    before = Held(tty, thread, {"Context": 1})
    after = Held(
        {**tty, (7, 0, 5, ""): "socket"},
        {**thread, (18, 200): "late"},
        {"Context": 1, "QueuePair": 2},
    )
    assert before.growth(before) == after.growth(before) == ""
    assert before.growth(after).splitlines() == [
        "file 7: socket",
        "thread 18: late",
        "QueuePair: 0 before, 2 after",
    ]
    others = Held({(1, 0, 9, ""): "pipe"}, {(17, 300): "again"}, {})  # of the same numbers
    assert before.growth(others).splitlines() == ["file 1: pipe", "thread 17: again"]


kinds: set[type] = set()


def test_run(run: Run) -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert loop.get_debug()
        kinds.add(uvloop.Loop if isinstance(loop, uvloop.Loop) else asyncio.BaseEventLoop)
        return 7

    assert run(main()) == 7


def test_run_reports_what_only_the_loop_hears_of(run: Run) -> None:
    async def main() -> None:
        def fail() -> None:
            raise RuntimeError("in a callback")

        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with pytest.raises(AssertionError, match="in a callback"):
        run(main())


def test_both_loops_ran() -> None:
    assert kinds == {uvloop.Loop, asyncio.BaseEventLoop}
