"""Contenders: pairs of processes that run jobs and measure them.

A job returns the duration of one operation. All contenders in a comparison are started first, and
then take turns, because a machine's speed changes from minute to minute.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import Any

from . import device

Words = tuple[str, ...]

Cores = tuple[int, int]
"""The core the client runs on, and the core the server runs on."""


def two_cores() -> Cores:
    """Return one core for the client and one for the server, or the only core twice."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[min(1, len(cores) - 1)]


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Return a context manager that pins this process and new child processes to one core.

    Child processes started in the block stay pinned. Leaving the block restores this process's CPU
    affinity.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


LIMIT = 120.0  # seconds until a job counts as hung; jobs take a few seconds at most


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    hung = threading.Timer(LIMIT, process.kill)
    hung.start()
    line = process.stdout.readline()
    hung.cancel()
    if not line:
        code = process.wait()
        raise RuntimeError("hung" if code == -signal.SIGKILL else f"ended with {code}")
    return line


def write_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")


def end(process: subprocess.Popen[str]) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=10)
    process.kill()
    process.wait()


class Contender:
    """A client process and a server process that run jobs.

    The first job starts the processes, and `close` stops them.
    """

    new_process_per_job = False  # whether each job starts new processes

    def __init__(self) -> None:
        self._stack = ExitStack()

    def do(self, kind: str, **numbers: Any) -> float:
        """Run a job and return the duration of one operation, in seconds."""
        raise NotImplementedError

    def close(self) -> None:
        self._stack.close()

    def _start(self, command: Sequence[str], core: int) -> subprocess.Popen[str]:
        """Start a process on a core.

        `close` closes the process's standard input, and kills the process if it does not exit.
        """
        with on_core(core):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
        self._stack.callback(end, process)
        return process


class InPython(Contender):
    """A contender written in Python.

    `way` is one of `worker.WAYS`, and `loop` is one of `worker.loops()`. `before` contains the
    command prefixes for the client and the server.

    Processes that keep polling are suspended during other contenders' turns. Processes are assumed
    to poll if `python` is another environment's interpreter, or if `way` ends with "awake".
    """

    def __init__(
        self,
        way: str,
        loop: str,
        cores: Cores,
        python: str = sys.executable,
        before: tuple[Words, ...] = ((), ()),
    ) -> None:
        super().__init__()
        self._before = before
        self._python = python
        self._polling: list[subprocess.Popen[str]] = []
        self._way = way
        self._loop = loop
        self._cores = cores
        self._client: subprocess.Popen[str] | None = None

    def do(self, kind: str, **numbers: Any) -> float:
        if self._client is not None:
            self._signal(signal.SIGCONT)
        else:
            worker = [self._python, "-m", "bench.worker"]
            folder = self._stack.enter_context(TemporaryDirectory())
            client, server = self._cores
            asks, serves = ([*words, *worker] for words in self._before)
            serving = self._start([*serves, "serve", self._way, self._loop, folder], server)
            self._client = self._start([*asks, "measure", self._way, self._loop], client)
            write_line(self._client, read_line(serving).rstrip())
            if self._python != sys.executable or self._way.endswith("awake"):
                self._polling = [serving, self._client]
                self._stack.callback(self._signal, signal.SIGCONT)
        try:
            write_line(self._client, json.dumps({"kind": kind, **numbers}))
            duration = float(read_line(self._client))
        except RuntimeError:
            self.close()
            self._client, self._polling = None, []
            raise
        self._signal(signal.SIGSTOP)
        return duration

    def _signal(self, number: signal.Signals) -> None:
        for process in self._polling:
            process.send_signal(number)


class InC(Contender):
    """A contender written in C (verbs.c) that calls the verbs API directly.

    It uses the same device as aiordma. `waiting` specifies how the client and the server each wait
    for completions: "polling" or "sleeping". Each kind of job runs in its own pair of processes.
    `links` is the value of AIORDMA_EMBEDDED_LINKS.
    """

    def __init__(self, waiting: tuple[str, str], cores: Cores, links: str = "") -> None:
        super().__init__()
        self._environment = ["env", f"AIORDMA_EMBEDDED_LINKS={links}"] if links else []
        self._arguments = [*waiting, *map(str, cores)]
        self._core = cores[0]
        self._client: dict[tuple[str, int, int], subprocess.Popen[str]] = {}

    def do(self, kind: str, **numbers: Any) -> float:
        job = kind, numbers.get("size", 1), numbers.get("window", 1)
        if job not in self._client:
            program = str(device.program("verbs"))
            command = [*self._environment, program, *self._arguments, *map(str, job)]
            self._client[job] = self._start(command, self._core)
        write_line(self._client[job], str(numbers["count"]))
        return float(read_line(self._client[job]))
