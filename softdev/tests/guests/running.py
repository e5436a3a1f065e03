"""Run the commands of a row, with a process group for each program and bounded waits."""

from __future__ import annotations

import mmap
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

from softdev.tests.programs.conftest import NO_REPORT, RUN, listens

from .rows import Command

HERE = Path(__file__).parent
TERMINATED = {0, -signal.SIGTERM, 128 + signal.SIGTERM}
# Seconds to wait after SIGTERM before a program is killed. Some programs ignore signals.
PATIENCE = 10.0
# Maximum number of characters of a program's output in a failure message.
TAIL = 3000

SENT = re.compile(rb'"type":"post_send"[^\n]*?"length":(\d+)')


class Program:
    """A running program of a row, which writes its output to a file."""

    def __init__(
        self, words: str, environment: Mapping[str, str], output: Path, device: bool
    ) -> None:
        self.words, self.output = words, output
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                [*(RUN if device else []), *shlex.split(words)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def expect(self, limit: float) -> str:
        """Wait until the program ends, and return its output. Fail the test on error or timeout."""
        try:
            status = self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self.fail(f"has not ended in {limit:g} s")
        if status and NO_REPORT not in self.text:
            self.fail(f"ended with {status}")
        return self.text

    def fail(self, how: str) -> NoReturn:
        pytest.fail(
            f"`{self.words}` {how}; the end of its output:\n{self.text[-TAIL:]}", pytrace=False
        )

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def terminate(self, limit: float) -> int:
        """Terminate the program and its children, and return its exit status.

        SIGTERM lets mpirun terminate its own children. After `limit` seconds, SIGKILL follows.
        """
        if self.running:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(limit)
        self._signal(signal.SIGKILL)
        return self._process.wait()


@contextmanager
def started(*arguments: object) -> Iterator[Program]:
    program = Program(*arguments)  # type: ignore[arg-type]
    try:
        yield program
    finally:
        program.terminate(PATIENCE)


def run(
    command: Command,
    values: Mapping[str, object],
    environment: Mapping[str, str],
    output: Path,
    limit: float,
    device: bool = True,
) -> str:
    """Run a command and return the output of its client and server, or fail the test."""
    output.mkdir(parents=True, exist_ok=True)
    client, server = (words.format(**values) for words in (command.client, command.server))
    if not server:
        with started(client, environment, output / "client", device) as asking:
            return asking.expect(limit)
    with started(server, environment, output / "server", device) as waiting:
        deadline = time.monotonic() + limit
        while not listens(int(str(values["port"]))):
            if not waiting.running:
                waiting.fail("ended before it listened")
            if time.monotonic() > deadline:
                waiting.fail(f"does not listen on port {values['port']} after {limit:g} s")
            time.sleep(0.01)
        with started(client, environment, output / "client", device) as asking:
            try:
                text = asking.expect(limit)
            except pytest.fail.Exception as failure:
                tail = waiting.text[-TAIL:]
                pytest.fail(f"{failure}\nIts server, `{server}`:\n{tail}", pytrace=False)
        if NO_REPORT in text:
            return text
        if not command.endless:
            waiting.expect(limit)
        elif not waiting.running:
            waiting.fail("ended before it was told to")
        elif (status := waiting.terminate(limit)) not in TERMINATED:
            waiting.fail(f"ended with {status} when it was terminated")
        return text + waiting.text


def carried(folder: Path) -> int:
    """Return the total length of the send work requests in the traces."""
    total = 0
    for path in folder.iterdir():
        if path.stat().st_size == 0:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as trace:
            total += sum(int(found[1]) for found in SENT.finditer(trace))
    return total
