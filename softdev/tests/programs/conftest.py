"""Helpers that run one program, or two that communicate, under `aiordma run`.

The programs use the embedded device whatever ``--device`` says, because on another device they
would prove nothing about aiordma. They come from the Debian packages ibverbs-utils, rdmacm-utils,
perftest and python3-pyverbs. The tests of a missing program fail and name the package, so only
`make programs` runs this folder, and `make test` does not.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

import pytest

from .ports import chosen_port

PACKAGES = {
    "ibv_": "ibverbs-utils",
    "ib_": "perftest",
    "fi_": "libfabric-bin",
    "cmake": "cmake",
    "c++": "g++",
    "tshark": "tshark",
    "valgrind": "valgrind",
}
DEFAULT_PACKAGE = "rdmacm-utils"

# Time in seconds after which a program is killed. A limit is needed because perftest's client waits
# forever for a server that has failed. A test waits for two programs, so the timeout of a test is
# more than twice as long.
LIMIT = 50.0

RUN = [sys.executable, "-m", "aiordma", "run"]

# Socket tables in /proc/net, each with the state of a socket that waits for peers. An unconnected
# datagram socket is in state TCP_CLOSE. Linux's include/net/tcp_states.h defines the states.
WAITING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}

# perftest measures the CPU frequency after all messages have been exchanged. If it is preempted
# while measuring, it prints NO_CLOCK. A latency test then reports inf as the latency. A bandwidth
# test prints NO_REPORT instead of a bandwidth and exits with status 1, and its peer fails as well.
NO_CLOCK = "Correlation coefficient"
NO_REPORT = "Can't produce a report"


@dataclass(frozen=True)
class Ended:
    """A program that has ended, with its exit status, standard output and standard error."""

    words: tuple[str, ...]
    status: int
    text: str
    errors: str

    def expect(self, status: int = 0) -> str:
        """Return the standard output. Fail the test if the exit status differs from `status`."""
        if self.status != status:
            self.fail()
        return self.text

    def fail(self) -> NoReturn:
        """Fail the test with the program's status and output."""
        how = f"ended with {self.status}" if self.status != -9 else "was killed at its time limit"
        pytest.fail(f"{' '.join(self.words)} {how}:\n{self.text}\n{self.errors}", pytrace=False)


@dataclass(frozen=True)
class Running:
    """A program that is running under `aiordma run`."""

    words: tuple[str, ...]
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]

    def end(self, limit: float = LIMIT) -> Ended:
        """Wait until the program ends. After `limit` seconds it is killed, and its status is -9."""
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        told = []
        for file in (self.output, self.errors):
            file.seek(0)
            told.append(file.read().decode(errors="replace"))
        return Ended(self.words, self.process.returncode, *told)


def installed(program: str) -> None:
    """Fail the test if a program is missing, naming the package to install."""
    if shutil.which(program) is None:
        package = next(
            (name for prefix, name in PACKAGES.items() if program.startswith(prefix)),
            DEFAULT_PACKAGE,
        )
        pytest.fail(
            f"{program} is not installed: on Debian and Ubuntu, apt-get install {package}",
            pytrace=False,
        )


@contextmanager
def started(words: Sequence[str]) -> Iterator[Running]:
    """Start a program under `aiordma run`, and kill it on exit if it is still running."""
    installed(words[0])
    # Use files, because a program would block when a pipe is full.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*RUN, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )
        try:
            yield Running(tuple(words), process, output, errors)
        finally:
            process.kill()
            process.wait()


def run_program(*words: str) -> Ended:
    """Run a program until it ends."""
    with started(words) as running:
        return running.end()


def listens(port: int) -> bool:
    """Return whether a process on this machine listens on a port, without connecting to it."""
    for table, waiting in WAITING.items():
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == waiting and int(local.rpartition(":")[2], 16) == port:
                return True
    return False


def is_member(group: str) -> bool:
    """Return whether a process on this machine has joined an IPv4 multicast group."""
    # The kernel prints the four bytes of the address as an integer in host byte order.
    number = int.from_bytes(socket.inet_aton(group), sys.byteorder)
    return f"{number:08X} " in Path("/proc/net/igmp").read_text()


@pytest.fixture
def port() -> Iterator[int]:
    """Provide a free port that no other test uses at the same time."""
    with chosen_port() as number:
        yield number


def run_pair(server: Sequence[str], client: Sequence[str], port: int) -> tuple[Ended, Ended]:
    """Run a server and, once it listens on ``port``, a client. Return both after they end."""
    return run_pair_when(lambda: listens(port), server, client)


def run_pair_when(
    ready: Callable[[], bool], server: Sequence[str], client: Sequence[str]
) -> tuple[Ended, Ended]:
    """Run a server and, once ``ready`` returns true, a client. Return both after they end."""
    with started(server) as waiting:
        deadline = time.monotonic() + LIMIT
        while not ready():
            with suppress(subprocess.TimeoutExpired):
                waiting.process.wait(0.01)
                waiting.end().fail()
            if time.monotonic() > deadline:
                waiting.end().fail()
        with started(client) as asking:
            asked = asking.end()
        return waiting.end(), asked
