r"""A pytest plug-in for testing RDMA software, with a marker for faults and a fixture for programs.

pytest loads the plug-in wherever aiordma is installed. The plug-in imports the rest of aiordma only
when a test needs it. For example::

    @pytest.mark.rdma(loss=0.01, seed=7)
    async def test_transfer_succeeds(): ...  # aiordma or pyverbs in this process, with 1 % loss

    @pytest.mark.rdma(loss="@1", frames="requests")
    async def test_lost_request_is_retransmitted(rdma_faults):
        ...
        assert rdma_faults.counts().lost

    def test_client_passes_against_server(rdma_programs):
        server = rdma_programs.start("./server", "7471")  # ended with the test
        assert server.stdout.readline() == "ready\\n"
        assert "PASS" in rdma_programs.run("./client", "7471").stdout

    @pytest.mark.rdma_seeds(20)  # pytest --rdma-seeds=10000 for more
    def test_program_succeeds_on_simulated_hosts():
        aiordma.testing.simulate(main, faults=PLAN)

softdev/docs/ci-without-hardware.md describes the plug-in, and docs/testing.md describes
simulations.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import aiordma

if TYPE_CHECKING:
    import aiordma.testing  # imported at run time only when a test needs it

_STACK: pytest.StashKey[ExitStack] = pytest.StashKey()
_FAULTS: pytest.StashKey[aiordma.testing.Faults] = pytest.StashKey()
_PROGRAMS: pytest.StashKey[Programs] = pytest.StashKey()
_VARIABLE = "AIORDMA_EMBEDDED_FAULTS"
_SEEDS = "AIORDMA_SIMULATION_SEEDS"
_SEED_USES_BEFORE: pytest.StashKey[int] = pytest.StashKey()
_MAX_TRACE_LINES = 200
"""The number of trace lines in the report of a failed test."""


def _parse_seeds(seeds: str) -> str:
    """Convert the value of --rdma-seeds to the format of AIORDMA_SIMULATION_SEEDS.

    An empty value has the same effect as no option.
    """
    if not seeds:
        return seeds
    first, colon, end = seeds.partition(":")
    with suppress(ValueError):
        if colon and 0 <= int(first) < int(end):
            return seeds
        if not colon and int(seeds) > 0:
            return f"0:{seeds}"
    raise argparse.ArgumentTypeError(
        f"expected a number of seeds such as 1000, or a range such as 500:1000, not {seeds!r}"
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("aiordma").addoption(
        "--rdma-seeds",
        metavar="SEEDS",
        type=_parse_seeds,
        help="run tests with the marker rdma_seeds with these simulation seeds: a number (1000) or "
        "a range (500:1000); the seeds run in one process per core",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "rdma(**faults): run the test on aiordma's embedded device, with faults as in "
        "aiordma.testing.faults, such as rdma(loss=0.01, seed=7)",
    )
    config.addinivalue_line(
        "markers",
        "rdma_seeds(count=20): run each call of aiordma.testing.simulate that has no seed with "
        "`count` seeds, or with the seeds of --rdma-seeds; the first failing seed ends the test",
    )
    is_worker = hasattr(config, "workerinput")  # a pytest-xdist worker reports to its parent
    if config.getoption("--rdma-seeds") and not (config.option.collectonly or is_worker):
        config.pluginmanager.register(_Usage())


def _seeds_of(item: pytest.Item, marker: pytest.Mark) -> str:
    """Return the seeds to run a test with. Fail the test if its marker is invalid."""
    counts = [*marker.args, *marker.kwargs.values()] or [20]
    wrong = ""
    if len(counts) > 1 or marker.kwargs.keys() - {"count"}:
        wrong = "expected one number, such as rdma_seeds(20)"
    elif type(counts[0]) is not int or counts[0] < 1:
        wrong = f"count must be an int of at least 1, not {counts[0]!r}"
    if wrong:
        pytest.fail(f"{_text_of(marker)}: {wrong}", pytrace=False)
    return os.environ.get(_SEEDS) or item.config.getoption("--rdma-seeds") or f"0:{counts[0]}"


def _text_of(marker: pytest.Mark) -> str:
    keywords = (f"{name}={value!r}" for name, value in marker.kwargs.items())
    return f"@pytest.mark.{marker.name}({', '.join([*map(repr, marker.args), *keywords])})"


def _seed_uses() -> int:
    """Return the number of simulations that have used the seeds in AIORDMA_SIMULATION_SEEDS."""
    seeds = sys.modules.get("aiordma._simulation.seeds")
    return int(seeds.environment_uses) if seeds else 0


class _Usage:
    """A plug-in that fails a run with --rdma-seeds if no test has the rdma_seeds marker."""

    def __init__(self) -> None:
        self._has_marker = False
        self._has_no_effect = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_marker = self._has_marker or "rdma_seeds" in report.keywords

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and not self._has_marker:
            self._has_no_effect = True
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._has_no_effect:
            terminalreporter.write_line(
                "ERROR: --rdma-seeds has no effect: no test that ran has the marker rdma_seeds",
                red=True,
            )


# A hook has two advantages over an autouse fixture. Tests without a marker pay only for looking up
# markers, and the device is selected before session and module fixtures are set up.
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set up the device and the faults for a marked test.

    If several markers set the same keyword, the marker closest to the test applies.
    """
    if marker := item.get_closest_marker("rdma_seeds"):
        seeds = _seeds_of(item, marker)
        stack = item.stash.setdefault(_STACK, ExitStack())
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv(_SEEDS, seeds)
        item.stash[_SEED_USES_BEFORE] = _seed_uses()
    if not (markers := list(item.iter_markers("rdma"))):
        return
    faults: dict[str, Any] = {}
    for marker in reversed(markers):
        if marker.args:
            pytest.fail(
                f"the marker rdma must have keyword arguments only, such as rdma(loss=0.01), not "
                f"{marker.args}",
                pytrace=False,
            )
        faults |= marker.kwargs
    stack = item.stash.setdefault(_STACK, ExitStack())
    environment = stack.enter_context(pytest.MonkeyPatch.context())
    environment.setenv("AIORDMA_DEVICE", "embedded0")
    if not faults:
        return
    from . import testing  # noqa: PLC0415 - imported only when a test needs it

    if not testing._has_fault(faults):
        text = _text_of(pytest.mark.rdma(**faults).mark)
        pytest.fail(f"{text} has no fault: add one, such as loss=0.01", pytrace=False)
    try:
        item.stash[_FAULTS] = made = stack.enter_context(testing.faults(**faults))
        made._is_limited_to_process = False
    except (TypeError, ValueError, OSError) as error:
        wrong = f"{_text_of(pytest.mark.rdma(**faults).mark)}: {error}"
    else:
        environment.setenv(_VARIABLE, made.plan)  # for the programs that the test starts
        return
    pytest.fail(wrong, pytrace=False)  # outside `except`, so that pytest shows only this error


@pytest.hookimpl(trylast=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Fail a test that passed without using its seeds or its faults."""
    if item.stash.get(_SEED_USES_BEFORE, None) == _seed_uses():
        marker = item.get_closest_marker("rdma_seeds")
        assert marker
        pytest.fail(
            f"{_text_of(marker)}: the test did not call aiordma.testing.simulate without a "
            "seed, so it used none of these seeds",
            pytrace=False,
        )
    programs = item.stash.get(_PROGRAMS, None)
    if programs and programs._started and not any(programs._folder.iterdir()):
        pytest.fail(
            "no program that the test started with rdma_programs opened embedded0, so the test "
            "did not use the device",
            pytrace=False,
        )
    if (faults := item.stash.get(_FAULTS, None)) is None:
        return
    if never := faults._never_happened(programs._folder if programs else None):
        pytest.fail(
            f"injected faults that never happened, in this process or in a program of "
            f"rdma_programs: {never} (of {faults.plan}); the test did not test them",
            pytrace=False,
        )


# Use an old-style wrapper, because pluggy in Debian 12 does not support `wrapper=True`.
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    if stack := item.stash.get(_STACK, None):
        stack.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any]:
    report: pytest.TestReport = (yield).get_result()
    if report.failed:
        if faults := item.stash.get(_FAULTS, None):
            counts = f"{faults.plan}; in this process: {faults.counts()}"
            report.sections.append(("RDMA faults", counts))
        if programs := item.stash.get(_PROGRAMS, None):
            report.sections.append(("RDMA trace", programs.trace(_MAX_TRACE_LINES)))


class Programs:
    """A runner for programs on the embedded device, like `aiordma run`.

    The `rdma_programs` fixture provides this object. The faults in the test's marker also apply to
    the programs. If the test fails, its report contains the last lines of the programs' trace.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a program. By default, its standard output is a text pipe.

        `options` are passed to `subprocess.Popen`. At the end of the test, the program is
        terminated. If it does not end within 5 seconds, it is killed.
        """
        from .verbs._device.environment import report_unknown_variables  # noqa: PLC0415 - on demand

        report_unknown_variables()
        given: Mapping[str, str] = options.pop("env", None) or os.environ
        environment = {**given, "AIORDMA_TRACE": str(self._folder / "%p.jsonl")}
        if faults := os.environ.get(_VARIABLE):
            environment[_VARIABLE] = faults
        options = {"stdout": subprocess.PIPE, "text": True, **options, "env": environment}
        run = [sys.executable, "-m", "aiordma", "run", *map(str, command)]
        process = subprocess.Popen(run, **options)
        self._started.append(process)
        return process

    def run(
        self, *command: str | Path, timeout: float = 60, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program and wait for it to end. `options` are the same as for `start`.

        The result and the exceptions are the same as for `subprocess.run`.
        """
        __tracebackhide__ = True
        process = self.start(*command, **{"stderr": subprocess.PIPE, **options})
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise
        if check and process.returncode:
            error = subprocess.CalledProcessError(process.returncode, process.args, out, err)
            error.add_note(f"{out or ''}{err or ''}"[-4000:])
            raise error
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def trace(self, lines: int | None = None) -> str:
        """Return the programs' trace in the `aiordma trace` format.

        If `lines` is given, return only that many lines from the end. Injected faults are marked in
        the trace, for example with ``fault=LOSS``.
        """
        files = sorted(map(str, self._folder.glob("*.jsonl")))
        if not files:
            return "no program has opened the device"
        command = [sys.executable, "-m", "aiordma", "trace", *files]
        listing = subprocess.run(command, capture_output=True, text=True, check=False)
        return "\n".join((listing.stdout + listing.stderr).splitlines()[-lines if lines else 0 :])

    def _end(self) -> None:
        for process in self._started:
            process.terminate()
        for process in self._started:
            try:
                process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a program without reading its pipes, because its child processes may hold them open."""
    process.kill()
    process.wait()
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        with suppress(BrokenPipeError):
            pipe.close()


@pytest.fixture
def rdma_faults(request: pytest.FixtureRequest) -> aiordma.testing.Faults:
    """Provide the `Faults` object for the test's marker, with `counts()`, `seed` and `plan`."""
    faults: aiordma.testing.Faults | None = request.node.stash.get(_FAULTS, None)
    if faults:
        return faults
    pytest.fail(
        "the test has no marker with faults: add @pytest.mark.rdma(loss=0.01)", pytrace=False
    )


@pytest.fixture
def rdma_programs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Programs]:
    """Provide a `Programs` object, which runs programs on the embedded device."""
    folder = tmp_path / "rdma-traces"
    folder.mkdir()
    request.node.stash[_PROGRAMS] = programs = Programs(folder)
    yield programs
    programs._end()
