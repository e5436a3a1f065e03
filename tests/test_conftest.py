"""Tests of conftest.py: missing devices, leaks, coroutines and combinations."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import pytest

from aiordma.testing import Held
from tests.combinations import COMBINATIONS, Chooser
from tests.conftest import LACKS, every_combination

ROOT = Path(__file__).parents[1]


def pytest_run(*arguments: str, below: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run pytest; a conftest.py that lies above ``below`` is another's and is not loaded."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "pyproject.toml",
        "-p",
        "no:cacheprovider",
        "-q",
        f"--confcutdir={below}",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_missing_device_is_a_failure() -> None:
    done = pytest_run("--device", "nobody0", "tests/verbs/test_ports.py", "-k", "gid_table")
    assert done.returncode == 1
    assert "--device nobody0: " in done.stdout
    assert "no device 'nobody0'; there are: " in done.stdout
    assert "skipped" not in done.stdout


def test_only_native_selects_what_runs_compiled_code() -> None:
    done = pytest_run("--only-native", "--collect-only", "tests/loop", "tests/perf/test_wire.py")
    assert "tests/loop/test_direct_wake.py::" in done.stdout
    assert "tests/perf/" not in done.stdout


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A test file with errors that must be detected."""
    path = tmp_path / "test_broken.py"
    path.write_text(
        "import os, pytest, threading\n"
        "from aiordma import verbs\n"
        "from tests import conftest\n"
        "from tests.conftest import *\n"
        "conftest.PATIENCE = 0.1\n"
        "def test_leak(device_name):\n"
        "    globals()['kept'] = open(os.devnull)\n"
        "def test_object(device):\n"
        "    globals()['context'] = device.open()\n"
        "def test_thread(device_name):\n"
        "    wait = threading.Event().wait\n"
        "    threading.Thread(target=wait, name='kept', daemon=True).start()\n"
        "def test_queue_pair(device):\n"
        "    context = device.open()\n"
        "    globals()['qp'] = context.alloc_pd().create_qp(context.create_cq(1))\n"
        "@pytest.mark.needs('UD')\n"
        "def test_it_works_after_all(device_name):\n"
        "    pass\n"
    )
    return path


@pytest.mark.any_device
def test_leaks_and_wrong_expectations_fail(broken: Path, device_name: str) -> None:
    arguments = "-p", "tests.conftest", "--device", device_name, str(broken)
    done = pytest_run(*arguments, below=broken.parent)
    assert "/dev/null" in done.stdout
    assert "Context: 0 before, 1 after" in done.stdout
    assert re.search(r"^E +thread \d+: kept$", done.stdout, re.MULTILINE)
    assert "QueuePair: 0 before, 1 after" in done.stdout
    listed = "the device is listed as lacking UD" in done.stdout
    assert listed == ("UD" in LACKS.get(device_name.rstrip("0123456789"), ()))
    assert done.returncode == 1


def test_what_asks_for_no_device_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "test_pure.py"
    path.write_text("def test_fails():\n    raise LookupError\n")
    arguments = "-v", "-p", "tests.conftest", str(path), "--device"
    elsewhere = pytest_run(*arguments, "nobody0", below=tmp_path)
    assert elsewhere.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "1 tests to which this run makes no difference are not repeated" in elsewhere.stdout
    here = pytest_run(*arguments, "embedded0", below=tmp_path)
    assert here.returncode == pytest.ExitCode.TESTS_FAILED


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


# ---- coroutines ---------------------------------------------------------------------------------


async def test_a_coroutine_runs_in_debug_mode() -> None:
    assert asyncio.get_running_loop().get_debug()


@pytest.fixture(scope="module")
def coroutines(tmp_path_factory: pytest.TempPathFactory) -> str:
    """pytest's report of two coroutines that pass, and of those with errors."""
    path = tmp_path_factory.mktemp("coroutines") / "test_coroutines.py"
    path.write_text(
        "import asyncio, os, pytest\n"
        "from tests import conftest\n"
        "from tests.conftest import *\n"
        "conftest.PATIENCE = 0.1\n"
        "async def test_first():\n"
        "    print('on', type(asyncio.get_running_loop()).__module__)\n"
        "async def test_second():\n"
        "    print('on', type(asyncio.get_running_loop()).__module__)\n"
        "async def test_callback():\n"
        "    def fail(): raise RuntimeError('in a callback')\n"
        "    asyncio.get_running_loop().call_soon(fail)\n"
        "    await asyncio.sleep(0)\n"
        "async def test_forgotten():\n"
        "    async def fail(): raise RuntimeError('in a task')\n"
        "    asyncio.create_task(fail())\n"
        "    await asyncio.sleep(0)\n"
        "async def test_leak():\n"
        "    globals()['kept'] = open(os.devnull)\n"
        "@pytest.mark.time_limit(0.01)\n"
        "async def test_too_long():\n"
        "    await asyncio.get_running_loop().create_future()\n"
    )
    return pytest_run("-p", "tests.conftest", "-rA", str(path), below=path.parent).stdout


def test_coroutines_that_must_fail(coroutines: str) -> None:
    for outcome, name, error in (
        ("PASSED", "first", "$"),  # with nothing of its combination
        ("PASSED", "second", "$"),
        ("ERROR", "callback", " - AssertionError: reported to the event loop"),
        ("ERROR", "forgotten", " - AssertionError: reported to the event loop"),
        ("ERROR", "leak", " - AssertionError: the block leaked"),
        ("FAILED", "too_long", " - TimeoutError"),
    ):
        assert re.search(rf"(?m)^{outcome} \S*::test_{name}{error}", coroutines), coroutines
    assert "RuntimeError('in a callback')" in coroutines
    assert "RuntimeError('in a task')" in coroutines
    assert "file " in coroutines
    assert "/dev/null" in coroutines
    assert {"on asyncio.unix_events", "on uvloop"} <= set(coroutines.splitlines())


# ---- combinations -------------------------------------------------------------------------------

THREE: Mapping[str, Sequence[str]] = {
    "loop": ("asyncio", "uvloop"),
    "via": ("cm", "tcp"),
    "polling": ("sleeping", "adaptive"),
}


def test_a_file_uses_all_combinations_equally_often() -> None:
    chooser = Chooser()
    for file in ("one.py", "other.py"):
        chosen = [tuple(chooser.choose(f"{file}::test_{n}", THREE).values()) for n in range(16)]
        assert set(chosen[:8]) == set(chosen[8:]) == set(product(*THREE.values()))
        assert all(len(set(each)) == 2 for each in zip(*chosen[:2], strict=True))
        assert tuple(chooser.choose(f"{file}::test_3", THREE).values()) == chosen[3]
    assert not list(chooser.missing())


def test_limited_tests_leave_the_rest_to_the_others() -> None:
    chooser = Chooser()
    for n in range(8):
        limits = {"via": ("cm",)} if n % 2 else {}
        chooser.choose(f"file.py::test_{n}", {**THREE, **limits})
    assert not list(chooser.missing())
    assert Counter(each["loop"] for each in chooser.chosen.values()) == {"asyncio": 4, "uvloop": 4}


def test_a_value_that_no_test_has_is_missing() -> None:
    chooser = Chooser()
    for n in range(2):
        chooser.choose(f"file.py::test_{n}", {"loop": ("uvloop",)})
        chooser.possible[f"file.py::test_{n}"] = {"loop": ("asyncio", "uvloop")}
    assert list(chooser.missing()) == ["file.py: no test has the loop 'asyncio'"]


def test_every_value_of_every_parameter_occurs(request: pytest.FixtureRequest) -> None:
    """Every file of this run has every value."""
    chooser = request.config.stash.get(COMBINATIONS, None)
    assert (chooser is None) == every_combination(request.config)
    if chooser is not None:
        assert chooser.chosen
        assert list(chooser.missing()) == []


def test_every_combination() -> None:
    path = "tests/transport/test_cancel.py"
    done = pytest_run("--collect-only", "--every-combination", path)
    for loop, via, polling in product(*THREE.values()):
        assert f"[{via}-{polling}-{loop}" in done.stdout


def test_a_failure_tells_its_combination(coroutines: str) -> None:
    assert re.search(r"- Captured combination setup -+\n(asyncio|uvloop)\n", coroutines)
