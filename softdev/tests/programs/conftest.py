"""Running one program, or two that find each other, under `aiordma run`.

On the embedded device whatever ``--device`` says: elsewhere these programs prove nothing about
aiordma. They come from Debian's packages ibverbs-utils, rdmacm-utils, perftest and python3-pyverbs;
where one is missing its tests fail and say so, which is why `make test` leaves this folder to
`make programs`.
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

# Seconds for a program to come to its end, however busy the machine is: less than half of the time
# of a test, which waits for both, and perftest's client for ever for a server that has failed.
LIMIT = 50.0

RUN = [sys.executable, "-m", "aiordma", "run"]

# The files of /proc/net with listening sockets; the states are those of
# include/net/tcp_states.h of Linux, where a datagram socket without a peer counts as closed.
WAITING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}

# What perftest says when it was kept from the processor while it measured the processor's
# frequency, which it does before it prints: all the traffic is over by then. A latency is inf then;
# instead of a bandwidth the program prints the second text and ends with 1, and its peer does not
# end well.
NO_CLOCK = "Correlation coefficient"
NO_REPORT = "Can't produce a report"


@dataclass(frozen=True)
class Ended:
    """A program that has ended, with its standard output and error."""

    words: tuple[str, ...]
    status: int
    text: str
    errors: str

    def expect(self, status: int = 0) -> str:
        """The output of a successful program; the test fails with it otherwise."""
        if self.status != status:
            self.fail()
        return self.text

    def fail(self) -> NoReturn:
        """Describe the end of the program."""
        how = f"ended with {self.status}" if self.status != -9 else "was killed at its time limit"
        pytest.fail(f"{' '.join(self.words)} {how}:\n{self.text}\n{self.errors}", pytrace=False)


@dataclass(frozen=True)
class Running:
    """A program under `aiordma run`."""

    words: tuple[str, ...]
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]

    def end(self, limit: float = LIMIT) -> Ended:
        """Wait for its end; after so many seconds it is killed, with status -9."""
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
    """Fail with the package to install if the program is missing."""
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
    """A program under `aiordma run`, killed if it does not end."""
    installed(words[0])
    # Files, not pipes: whatever it says, it never waits for a reader.
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
    """Run one program to its end."""
    with started(words) as running:
        return running.end()


def listens(port: int) -> bool:
    """Whether a process of this machine listens on the port; found without connecting to it."""
    for table, waiting in WAITING.items():
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == waiting and int(local.rpartition(":")[2], 16) == port:
                return True
    return False


def is_member(group: str) -> bool:
    """Whether a process of this machine has joined an IPv4 multicast group."""
    # The address as the kernel has it in memory, printed as a number of the machine.
    number = int.from_bytes(socket.inet_aton(group), sys.byteorder)
    return f"{number:08X} " in Path("/proc/net/igmp").read_text()


@pytest.fixture
def port() -> Iterator[int]:
    """A free port, which no other test has meanwhile."""
    with chosen_port() as number:
        yield number


def run_pair(server: Sequence[str], client: Sequence[str], port: int) -> tuple[Ended, Ended]:
    """Run a server, and its client as soon as the server listens on ``port``, to their ends."""
    return run_pair_when(lambda: listens(port), server, client)


def run_pair_when(
    ready: Callable[[], bool], server: Sequence[str], client: Sequence[str]
) -> tuple[Ended, Ended]:
    """Run a server, and its client as soon as the server is ready, to their ends."""
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
