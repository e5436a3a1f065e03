"""Tests of the pytest plug-in in a user's project."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from .processes import run_python

pytestmark = pytest.mark.any_device

PROJECT = """
import os
import subprocess
import sys
import pytest
from aiordma import VerbsError, testing, verbs

RAN = []

DEVICE = '''
import ctypes
verbs = ctypes.CDLL(None)
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
verbs.ibv_open_device.restype = ctypes.c_void_p
verbs.ibv_open_device.argtypes = [ctypes.c_void_p]
print(bool(verbs.ibv_open_device(verbs.ibv_get_device_list(None)[0])), flush=True)
'''


@pytest.mark.rdma(register="@1", seed=7)
def test_first_registration_fails():
    with verbs.open_device() as context, context.alloc_pd() as pd:
        with pytest.raises(VerbsError):
            pd.reg_mr(4096)
        pd.reg_mr(4096)


@pytest.mark.rdma(register="@1", seed=7)
def test_injected_fault_fails_the_test():
    with verbs.open_device() as context, context.alloc_pd() as pd:
        pd.reg_mr(4096)


@pytest.fixture(scope="class")
def device():
    return os.environ.get("AIORDMA_DEVICE")


@pytest.mark.rdma_seeds(count=1)
def test_simulate_uses_the_option_seeds():
    async def main(world):
        RAN.append(world.seed)

    testing.simulate(main)
    testing.simulate(main, seed=9)
    assert {*RAN} == {5, 9}


@pytest.mark.rdma_seeds(seeds=1)
def test_seeds_keyword_is_rejected():
    pass


@pytest.mark.rdma_seeds(3, 4)
def test_two_seed_counts_are_rejected():
    pass


@pytest.mark.rdma_seeds(0)
def test_zero_seeds_are_rejected():
    pass


@pytest.mark.rdma_seeds("many")
def test_text_seed_count_is_rejected():
    pass


@pytest.mark.rdma_seeds(3)
def test_unused_seeds_fail_the_test():
    pass


@pytest.mark.rdma_seeds
def test_explicit_seed_leaves_marker_seeds_unused():
    async def main(world):
        assert world.seed == 9

    testing.simulate(main, seed=9)


@pytest.mark.rdma_seeds(3)
def test_skip_before_simulate_is_not_a_failure():
    pytest.skip("it needs something")


def test_program_never_opens_the_device(rdma_programs):
    assert rdma_programs.run("echo", "fine").stdout == "fine\\n"


@pytest.mark.rdma
class TestNearest:
    @pytest.mark.rdma(lost=1)
    def test_unknown_fault_is_rejected(self):
        pass

    def test_marker_without_faults_selects_the_device(self, device):
        assert device == os.environ["AIORDMA_DEVICE"] == "embedded0"

    @pytest.mark.rdma(loss=2)
    def test_invalid_probability_is_rejected(self):
        pass


@pytest.mark.rdma(register="@1", seed=5)
class TestKeywords:
    @pytest.mark.rdma(seed=6)
    def test_class_and_test_markers_are_merged(self, rdma_faults):
        assert rdma_faults.plan == "seed=6,register=@1"
        test_first_registration_fails()


@pytest.mark.rdma(loss="@1", seed=1)
def test_device_is_never_opened():
    pass


@pytest.mark.rdma(register=0.5, seed=1)
def test_fault_has_no_opportunity():
    pass


@pytest.mark.rdma(register="@1", loss="@1", seed=1)
def test_second_of_two_faults_never_happens():
    test_first_registration_fails()


@pytest.mark.rdma(register="@1", seed=1)
def test_program_never_registers_memory(rdma_programs):
    rdma_programs.run(sys.executable, "-c", DEVICE)


@pytest.mark.rdma(register=1e-9)
def test_improbable_fault_may_not_happen():
    with verbs.open_device() as context, context.alloc_pd() as pd:
        pd.reg_mr(4096)


@pytest.mark.rdma(seed=5)
def test_seed_without_faults_is_rejected():
    pass


@pytest.mark.rdma(5)
def test_positional_argument_is_rejected():
    pass


def test_faults_fixture_requires_the_marker(rdma_faults):
    pass


def test_environment_has_no_faults_without_the_marker():
    variables = ("AIORDMA_DEVICE", "AIORDMA_EMBEDDED_FAULTS")
    assert [os.environ.get(it) for it in variables] == ["", None]


async def first_loss(faults):
    async with testing.connected_pair() as (client, server):
        for number in range(1000):
            await client.send(bytes([number % 256]) * 5000)
            with await server.recv() as message:
                assert bytes(message) == bytes([number % 256]) * 5000
            if faults.counts().lost:
                return number


class TestSeed:
    found = []

    @pytest.mark.parametrize("again", range(2))
    @pytest.mark.rdma(loss=0.02, seed=7, frames="requests")
    async def test_seed_7_loses_a_frame(self, rdma_faults, again):
        self.found.append(await first_loss(rdma_faults))

    @pytest.mark.rdma(loss=0.02, seed=8, frames="requests")
    async def test_seed_8_loses_a_frame(self, rdma_faults):
        self.found.append(await first_loss(rdma_faults))

    def test_same_seed_loses_the_same_frame(self):
        one, again, other = self.found
        assert one == again != other


@pytest.mark.rdma(handshake=0.5, seed=3)
def test_programs_inherit_the_fault_plan(rdma_programs):
    show = "import os; print(os.environ['AIORDMA_EMBEDDED_FAULTS'])"
    for environment in (None, {"PATH": os.environ["PATH"]}):
        run = rdma_programs.run(sys.executable, "-c", show, env=environment)
        assert run.stdout == "seed=3,handshake=0.5\\n"
    server = rdma_programs.start(sys.executable, "-c", DEVICE + "import time; time.sleep(1000)")
    assert server.stdout.readline() == "True\\n"


def test_failing_program_raises_called_process_error(rdma_programs):
    rdma_programs.run(sys.executable, "-c", DEVICE + "print('out'); exit(7)")


def test_hanging_program_raises_timeout_expired(rdma_programs):
    rdma_programs.run(sys.executable, "-c", "import time; time.sleep(1000)", timeout=0.5)


def test_program_with_surviving_child_times_out(rdma_programs):
    seconds = 0.5
    while True:
        try:
            begins = "sleep 600 & echo $! > new; mv new child; wait"
            rdma_programs.run("sh", "-c", begins, timeout=seconds)
        except subprocess.TimeoutExpired:
            if os.path.exists("child"):  # else the shell had no time to begin it
                raise
        seconds *= 2


def test_surviving_child_is_still_running():
    with open("child") as child:
        os.kill(int(child.read()), 9)  # ProcessLookupError if the test before has waited for it
"""


@pytest.fixture(scope="module", params=["no:xdist", "xdist"])
def report(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> subprocess.CompletedProcess[str]:
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_project.py").write_text(PROJECT)
    options = ["-p", "no:cacheprovider", "-p", request.param, "--strict-markers", "-rA"]
    options += ["-n2", "--dist=loadscope"] if request.param == "xdist" else []
    options += ["-o", "asyncio_mode=auto", "--rdma-seeds=5:6"]
    environment = {"PYTEST_ADDOPTS": "", "AIORDMA_DEVICE": "", "COLUMNS": "200"}
    return run_python("-m", "pytest", *options, folder, cwd=folder, **environment)


def test_sample_project_tests_have_expected_outcomes(
    report: subprocess.CompletedProcess[str],
) -> None:
    found = re.findall(
        r"^(PASSED|FAILED|ERROR) .*::(test_\w+)(?:\[\d\])?(?: - ([\w.]*))?",
        report.stdout,
        re.MULTILINE,
    )
    assert {name: (verdict, error) for verdict, name, error in found} == {
        "test_first_registration_fails": ("PASSED", ""),
        "test_simulate_uses_the_option_seeds": ("PASSED", ""),
        "test_seeds_keyword_is_rejected": ("ERROR", "Failed"),
        "test_two_seed_counts_are_rejected": ("ERROR", "Failed"),
        "test_zero_seeds_are_rejected": ("ERROR", "Failed"),
        "test_text_seed_count_is_rejected": ("ERROR", "Failed"),
        "test_unused_seeds_fail_the_test": ("FAILED", "Failed"),
        "test_explicit_seed_leaves_marker_seeds_unused": ("FAILED", "Failed"),
        "test_program_never_opens_the_device": ("FAILED", "Failed"),
        "test_marker_without_faults_selects_the_device": ("PASSED", ""),
        "test_class_and_test_markers_are_merged": ("PASSED", ""),
        "test_device_is_never_opened": ("FAILED", "Failed"),
        "test_fault_has_no_opportunity": ("FAILED", "Failed"),
        "test_second_of_two_faults_never_happens": ("FAILED", "Failed"),
        "test_program_never_registers_memory": ("FAILED", "Failed"),
        "test_improbable_fault_may_not_happen": ("PASSED", ""),
        "test_environment_has_no_faults_without_the_marker": ("PASSED", ""),
        "test_seed_7_loses_a_frame": ("PASSED", ""),
        "test_seed_8_loses_a_frame": ("PASSED", ""),
        "test_same_seed_loses_the_same_frame": ("PASSED", ""),
        "test_programs_inherit_the_fault_plan": ("PASSED", ""),
        "test_injected_fault_fails_the_test": ("FAILED", "aiordma.errors.VerbsError"),
        "test_failing_program_raises_called_process_error": (
            "FAILED",
            "subprocess.CalledProcessError",
        ),
        "test_hanging_program_raises_timeout_expired": ("FAILED", "subprocess.TimeoutExpired"),
        "test_program_with_surviving_child_times_out": ("FAILED", "subprocess.TimeoutExpired"),
        "test_surviving_child_is_still_running": ("PASSED", ""),
        "test_unknown_fault_is_rejected": ("ERROR", "Failed"),
        "test_invalid_probability_is_rejected": ("ERROR", "Failed"),
        "test_seed_without_faults_is_rejected": ("ERROR", "Failed"),
        "test_positional_argument_is_rejected": ("ERROR", "Failed"),
        "test_faults_fixture_requires_the_marker": ("ERROR", "Failed"),
    }, report.stdout


@pytest.mark.parametrize(
    "says",
    [
        "@pytest.mark.rdma_seeds(seeds=1): expected one number, such as rdma_seeds(20)",
        "@pytest.mark.rdma_seeds(3, 4): expected one number, such as rdma_seeds(20)",
        "@pytest.mark.rdma_seeds(0): count must be an int of at least 1, not 0",
        "@pytest.mark.rdma_seeds('many'): count must be an int of at least 1, not 'many'",
        "@pytest.mark.rdma(lost=1): faults() got an unexpected keyword argument 'lost'",
        "@pytest.mark.rdma(loss=2): invalid fault plan: 'loss=2': expected a probability from",
        "@pytest.mark.rdma(seed=5) has no fault: add one, such as loss=0.01",
        "the marker rdma must have keyword arguments only, such as rdma(loss=0.01), not (5,)",
        "the test has no marker with faults: add @pytest.mark.rdma(loss=0.01)",
    ],
)
def test_plugin_misuse_is_reported_in_one_line(
    report: subprocess.CompletedProcess[str], says: str
) -> None:
    """The report does not show the source code of the plug-in."""
    before = r"^_+ ERROR at setup of \S+ _+\n(?:\[gw.*\n)?"
    assert re.search(before + re.escape(says), report.stdout, re.MULTILINE), report.stdout


@pytest.mark.parametrize(
    ("test", "says"),
    [
        (
            "test_unused_seeds_fail_the_test",
            "@pytest.mark.rdma_seeds(3): the test did not call aiordma.testing.simulate without "
            "a seed, so it used none of these seeds",
        ),
        (
            "test_explicit_seed_leaves_marker_seeds_unused",
            "@pytest.mark.rdma_seeds(): the test did not call aiordma.testing.simulate without "
            "a seed, so it used none of these seeds",
        ),
        (
            "test_program_never_opens_the_device",
            "no program that the test started with rdma_programs opened embedded0, so the test "
            "did not use the device",
        ),
    ],
)
def test_report_explains_why_seeds_or_device_were_unused(
    report: subprocess.CompletedProcess[str], test: str, says: str
) -> None:
    before = rf"^_+ {test} _+\n(?:\[gw.*\n)?"
    assert re.search(before + re.escape(says), report.stdout, re.MULTILINE), report.stdout


EXPECTED = "expected a number of seeds such as 1000, or a range such as 500:1000, not"


@pytest.mark.parametrize("seeds", ["many", "0", "-3", "5:5", "7:3", "-1:3", "3:", "1.5"])
def test_invalid_rdma_seeds_option_is_rejected(seeds: str, tmp_path: Path) -> None:
    done = run_python("-m", "pytest", f"--rdma-seeds={seeds}", tmp_path, PYTEST_ADDOPTS="")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"argument --rdma-seeds: {EXPECTED} '{seeds}'" in done.stderr


@pytest.mark.parametrize("options", [["-p", "no:xdist"], ["-n1"]])
@pytest.mark.parametrize("is_used", [False, True])
def test_rdma_seeds_option_fails_without_a_marked_test(
    options: list[str], is_used: bool, tmp_path: Path
) -> None:
    marker = "@pytest.mark.rdma_seeds" if is_used else ""
    program = f"""
import asyncio
import pytest
from aiordma import testing

{marker}
def test_simulate_runs_to_completion():
    testing.simulate(lambda world: asyncio.sleep(1))
"""
    (tmp_path / "test_it.py").write_text(program)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rdma-seeds=2", *options]
    done = run_python(*words, tmp_path, cwd=tmp_path, PYTEST_ADDOPTS="")
    says = "ERROR: --rdma-seeds has no effect: no test that ran has the marker rdma_seeds\n"
    assert (says in done.stdout) is not is_used, done.stdout
    assert done.returncode == (0 if is_used else 1)
    listed = run_python(*words, "--collect-only", tmp_path, cwd=tmp_path, PYTEST_ADDOPTS="")
    assert listed.returncode == 0


def test_failure_report_shows_rdma_faults_and_trace(
    report: subprocess.CompletedProcess[str],
) -> None:
    """The report also has the seed that repeats the faults, and the program's output."""
    assert re.search(
        r"RDMA faults -+\nseed=7,register=@1; in this process: .*registrations=1", report.stdout
    )
    assert "open_device" in report.stdout.partition("RDMA trace")[2], report.stdout
    assert re.search(r"True\nE +out", report.stdout)


def test_plugin_loads_nothing_until_it_is_used() -> None:
    """pytest loads the plug-in in every run where aiordma is installed."""
    code = (
        "import sys, pytest; before = {*sys.modules}; import aiordma.pytest_plugin;"
        "print(*sorted(it for it in {*sys.modules} - before if 'editable' not in it))"
    )
    loaded = "aiordma aiordma._core aiordma._core.lazy_exports aiordma.pytest_plugin"
    assert run_python("-c", code, cwd=Path.cwd()).stdout == f"{loaded}\n"
