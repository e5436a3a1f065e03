"""A plug-in for pytest, for the tests of RDMA software: faults by a marker, programs by a fixture.

It is there wherever aiordma is installed, and imports nothing until a test uses it::

    @pytest.mark.rdma(loss=0.01, seed=7)
    async def test_transfer(): ...  # aiordma or pyverbs in this process, with 1 % loss

    @pytest.mark.rdma(loss="@1", frames="requests")
    async def test_repeated(rdma_faults):
        ...
        assert rdma_faults.counts().lost

    def test_server(rdma_programs):
        server = rdma_programs.start("./server", "7471")  # ended with the test
        assert server.stdout.readline() == "ready\\n"
        assert "PASS" in rdma_programs.run("./client", "7471").stdout

    @pytest.mark.rdma_seeds(20)  # pytest --rdma-seeds=10000 for more
    def test_on_simulated_hosts():
        aiordma.testing.simulate(main, faults=PLAN)

softdev/docs/ci-without-hardware.md has more, and docs/testing.md of simulations.
"""

from __future__ import annotations

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
    import aiordma.testing  # which nothing before a test needs

_STACK: pytest.StashKey[ExitStack] = pytest.StashKey()
_FAULTS: pytest.StashKey[aiordma.testing.Faults] = pytest.StashKey()
_PROGRAMS: pytest.StashKey[Programs] = pytest.StashKey()
_VARIABLE = "AIORDMA_EMBEDDED_FAULTS"
_SEEDS = "AIORDMA_SIMULATION_SEEDS"
_LINES = 200
"""Of the trace of a failed test, in its report."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("aiordma").addoption(
        "--rdma-seeds",
        metavar="SEEDS",
        help="of simulations in tests with the marker rdma_seeds: how many (1000), or which "
        "(500:1000), in a process for each core",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "rdma(**faults): run on aiordma's embedded device, with the faults of "
        "aiordma.testing.faults: loss=0.01, seed=7 ...",
    )
    config.addinivalue_line(
        "markers",
        "rdma_seeds(count=20): what the test gives to aiordma.testing.simulate without a seed runs "
        "with so many seeds, or those of --rdma-seeds; the first that fails ends it",
    )


def _count_of(count: int = 20) -> int:
    """Of the marker rdma_seeds."""
    return count


# Hooks, not a fixture that every test would have: a test without the marker pays for a look at its
# markers, and the device is chosen before the fixtures of wider scopes that it is the first to use.
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The device and the faults of a marked test; a nearer marker's keywords replace others."""
    if (marker := item.get_closest_marker("rdma_seeds")) and not os.environ.get(_SEEDS):
        count = _count_of(*marker.args, **marker.kwargs)
        wanted = str(item.config.getoption("--rdma-seeds") or count)
        stack = item.stash.setdefault(_STACK, ExitStack())
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv(_SEEDS, wanted if ":" in wanted else f"0:{wanted}")
    if not (markers := list(item.iter_markers("rdma"))):
        return
    faults: dict[str, Any] = {}
    for marker in reversed(markers):
        if marker.args:
            pytest.fail(
                f"the marker rdma takes keywords, as rdma(loss=0.01), not {marker.args}",
                pytrace=False,
            )
        faults |= marker.kwargs
    stack = item.stash.setdefault(_STACK, ExitStack())
    environment = stack.enter_context(pytest.MonkeyPatch.context())
    environment.setenv("AIORDMA_DEVICE", "embedded0")
    if not faults:
        return
    from . import testing  # noqa: PLC0415 - nothing before a test needs it

    try:
        item.stash[_FAULTS] = made = stack.enter_context(testing.faults(**faults))
        made._only_here = False
    except (TypeError, ValueError, OSError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in faults.items())
        wrong = f"@pytest.mark.rdma({given}): {error}"
    else:
        environment.setenv(_VARIABLE, made.plan)  # for the programs that the test starts
        return
    pytest.fail(wrong, pytrace=False)  # out of the block, whose exception would be shown too


@pytest.hookimpl(trylast=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Fails a test that has passed without its faults."""
    if (faults := item.stash.get(_FAULTS, None)) is None:
        return
    programs = item.stash.get(_PROGRAMS, None)
    if never := faults._never_happened(programs._folder if programs else None):
        pytest.fail(
            f"{never} of {faults.plan} never happened, in this process or in a program of "
            "rdma_programs, so the test shows nothing about it",
            pytrace=False,
        )


# Wrappers of pluggy's old kind, which the pytest of Debian 12 also has.
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
            report.sections.append(("RDMA trace", programs.trace(_LINES)))


class Programs:
    """Starts programs on the embedded device, as `aiordma run` does: the fixture `rdma_programs`.

    The faults of the test's marker are theirs too.  If the test fails, its report has the end of
    their trace.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Starts a program, whose standard output is a pipe of text unless `options` say otherwise.

        They are those of `subprocess.Popen`.  When the test ends, it is terminated, and killed if
        that does not end it within 5 seconds.
        """
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
        """Runs a program to its end: options of `start`, errors and result of `subprocess.run`."""
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
        """Returns the `aiordma trace` listing of the programs so far: all of it, or the last lines.

        An injected fault is in it as ``fault=LOSS``.
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
    """Does not read to the end: processes that it has started may have its pipes still."""
    process.kill()
    process.wait()
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        with suppress(BrokenPipeError):
            pipe.close()


@pytest.fixture
def rdma_faults(request: pytest.FixtureRequest) -> aiordma.testing.Faults:
    """The faults of the test's marker: `.counts()` of those in this process, `.seed`, `.plan`."""
    faults: aiordma.testing.Faults | None = request.node.stash.get(_FAULTS, None)
    if faults:
        return faults
    pytest.fail("the test has no marker with faults, such as @pytest.mark.rdma(loss=0.01)", False)


@pytest.fixture
def rdma_programs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Programs]:
    """Programs on the embedded device; see `Programs`."""
    folder = tmp_path / "rdma-traces"
    folder.mkdir()
    request.node.stash[_PROGRAMS] = programs = Programs(folder)
    yield programs
    programs._end()
