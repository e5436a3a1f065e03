"""A plug-in for pytest, for the tests of RDMA software: faults by a marker, programs by a fixture.

It is there wherever aiordma is installed, and imports nothing until a test uses it::

    @pytest.mark.rdma(loss=0.01, seed=7)
    async def test_transfer(): ...  # aiordma or pyverbs in this process, with 1 % loss

    def test_server(rdma_programs):
        server = rdma_programs.start("./server", "7471")  # ended with the test
        assert server.stdout.readline() == "ready\\n"
        assert "PASS" in rdma_programs.run("./client", "7471").stdout

docs/ci-without-hardware.md has more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .testing import Faults

_FAULTS: pytest.StashKey[Faults] = pytest.StashKey()
_PROGRAMS: pytest.StashKey[Programs] = pytest.StashKey()
_LINES = 200
"""Of the trace of a failed test, in its report."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "rdma(**faults): run on aiordma's embedded device, with the faults of "
        "aiordma.testing.faults: loss=0.01, seed=7 ...",
    )


@pytest.fixture(autouse=True)
def _rdma(request: pytest.FixtureRequest) -> Iterator[None]:
    """The device and the faults of a marked test; those of the nearest marker count."""
    markers = list(request.node.iter_markers("rdma"))
    faults: dict[str, Any] = {}
    for marker in reversed(markers):
        if marker.args:
            raise TypeError(
                f"the marker rdma takes keywords, as rdma(loss=0.01), not {marker.args}"
            )
        faults |= marker.kwargs
    if not markers:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("AIORDMA_DEVICE", "embedded0")
        if faults:
            from . import testing  # noqa: PLC0415 - nothing before a test needs it

            request.node.stash[_FAULTS] = stack.enter_context(testing.faults(**faults))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.failed:
        if faults := item.stash.get(_FAULTS, None):
            report.sections.append(("RDMA faults", f"{faults.plan}: {faults.counts()}"))
        if programs := item.stash.get(_PROGRAMS, None):
            report.sections.append(("RDMA trace", programs.trace()))
    return report


class Programs:
    """Starts programs on the embedded device, as `aiordma run` does: the fixture `rdma_programs`.

    The faults of the test's marker are theirs too.  If the test fails, its report has the end of
    their trace.
    """

    def __init__(self, folder: Path, faults: str) -> None:
        self._folder, self._faults = folder, faults
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Starts a program, whose standard output is a pipe of text unless `options` say otherwise.

        They are those of `subprocess.Popen`.  When the test ends, it is terminated, and killed if
        that does not end it within 5 seconds.
        """
        environment = {
            **(options.pop("env", None) or os.environ),
            "AIORDMA_TRACE": str(self._folder / "%p.jsonl"),
            **({"AIORDMA_EMBEDDED_FAULTS": self._faults} if self._faults else {}),
        }
        options = {"stdout": subprocess.PIPE, "text": True, **options, "env": environment}
        run = [sys.executable, "-m", "aiordma", "run", *map(str, command)]
        process = subprocess.Popen(run, **options)
        self._started.append(process)
        return process

    def run(
        self, *command: str | Path, timeout: float = 60, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end; `subprocess.run` has the options, errors and the result."""
        process = self.start(*command, **{"stderr": subprocess.PIPE, **options})
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        if check and process.returncode:
            error = subprocess.CalledProcessError(process.returncode, process.args, out, err)
            error.add_note(f"{out or ''}{err or ''}"[-4000:])
            raise error
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def trace(self) -> str:
        """The end of what the programs have done so far, as `aiordma trace` lists it."""
        files = sorted(map(str, self._folder.glob("*.jsonl")))
        if not files:
            return "no program has opened the device"
        command = [sys.executable, "-m", "aiordma", "trace", *files]
        listing = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = (listing.stdout + listing.stderr).splitlines()
        return "\n".join(lines[-_LINES:])

    def _end(self) -> None:
        for process in self._started:
            process.terminate()
        for process in self._started:
            try:
                process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


@pytest.fixture
def rdma_programs(
    _rdma: None, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Programs]:
    """Programs on the embedded device; see `Programs`."""
    folder = tmp_path / "rdma-traces"
    folder.mkdir()
    faults = request.node.stash.get(_FAULTS, None)
    programs = Programs(folder, faults.plan if faults else "")
    request.node.stash[_PROGRAMS] = programs
    yield programs
    programs._end()
