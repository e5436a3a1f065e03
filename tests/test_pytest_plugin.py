"""The plug-in for pytest, in a project of a user's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from .processes import run_python

pytestmark = pytest.mark.any_device

PROJECT = """
import sys
import pytest
from aiordma import testing, verbs

DEVICE = '''
import ctypes
verbs = ctypes.CDLL(None)
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
verbs.ibv_open_device.restype = ctypes.c_void_p
verbs.ibv_open_device.argtypes = [ctypes.c_void_p]
print(bool(verbs.ibv_open_device(verbs.ibv_get_device_list(None)[0])), flush=True)
'''


@pytest.mark.rdma(register="@1", seed=7)
def test_faults():
    with verbs.open_device() as context, context.alloc_pd() as pd:
        with pytest.raises(verbs.VerbsError if hasattr(verbs, "VerbsError") else OSError):
            pd.reg_mr(4096)
        pd.reg_mr(4096)


@pytest.mark.rdma(register="@1", seed=7)
def test_that_fails():
    with verbs.open_device() as context, context.alloc_pd() as pd:
        pd.reg_mr(4096)


@pytest.mark.rdma
class TestNearest:
    @pytest.mark.rdma(lost=1)
    def test_unknown(self):
        pass

    def test_without_faults(self):
        assert verbs.find_device(None).name == "embedded0"


@pytest.mark.rdma(5)
def test_no_keyword():
    pass


@pytest.mark.rdma(loss="@1", seed=3)
def test_programs(rdma_programs):
    show = "import os; print(os.environ['AIORDMA_EMBEDDED_FAULTS'])"
    assert rdma_programs.run(sys.executable, "-c", show).stdout == "seed=3,loss=@1\\n"
    server = rdma_programs.start(sys.executable, "-c", DEVICE + "import time; time.sleep(1000)")
    assert server.stdout.readline() == "True\\n"


def test_program_that_fails(rdma_programs):
    rdma_programs.run(sys.executable, "-c", DEVICE + "print('out'); exit(7)")


def test_program_that_hangs(rdma_programs):
    rdma_programs.run(sys.executable, "-c", "import time; time.sleep(1000)", timeout=0.5)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_project.py").write_text(PROJECT)
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist", "--strict-markers", "-rA")
    return run_python("-m", "pytest", *plugins, folder, cwd=folder, PYTEST_ADDOPTS="")


def test_results(report: subprocess.CompletedProcess[str]) -> None:
    found = dict(
        re.findall(r"^(?:PASSED|FAILED|ERROR) .*::(\w+)(?: - (\w*))?", report.stdout, re.MULTILINE)
    )
    assert found == {
        "test_faults": "",
        "test_without_faults": "",
        "test_programs": "",
        "test_that_fails": "aiordma",
        "test_program_that_fails": "subprocess",
        "test_program_that_hangs": "subprocess",
        "test_unknown": "TypeError",
        "test_no_keyword": "TypeError",
    }, report.stdout


def test_what_a_failed_test_shows(report: subprocess.CompletedProcess[str]) -> None:
    """The faults with the seed that repeats them; the trace, and what the program printed."""
    assert re.search(r"RDMA faults -+\nseed=7,register=@1: .*registrations=1", report.stdout)
    assert "open_device" in report.stdout.partition("RDMA trace")[2], report.stdout
    assert re.search(r"True\nE +out", report.stdout)


def test_it_costs_nothing_until_it_is_used() -> None:
    code = "import sys, aiordma.pytest_plugin as _; print('aiordma.verbs' in sys.modules)"
    assert run_python("-c", code, cwd=Path.cwd()).stdout == "False\n"
