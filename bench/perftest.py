"""A contender that uses perftest, the standard benchmark for RDMA devices, on the same device.

On the embedded device, perftest runs under `aiordma run`. On other devices, it runs directly.

    python -m bench.perftest        measure SoftRoCE and print a line of JSON

This command runs inside the virtual machine of softdev/tests/softroce. SoftRoCE is the software
device of the Linux kernel.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from .contender import Contender, on_core, two_cores
from .device import HERE
from .lanes import (
    Comparison,
    Contenders,
    Data,
    Lane,
    Options,
    Requirement,
    at_least,
    ratio,
    seconds,
    take_turns,
)
from .ways import DEVICE

NOTE = """\
This test compares aiordma with *perftest*, a suite of C benchmarks such as `ib_send_bw`, on the
same device. The perftest programs poll and keep many messages in flight. The last row is
different: it shows half the round-trip time of a single message (perftest's *latency*)."""

SEND, WRITE, LATENCY = "1 MiB send", "1 MiB write", "64 B send, half round trip"
KIB, MIB = 1 << 10, 1 << 20
MANY = {
    SEND: ("send", MIB, 160, 16),
    WRITE: ("write", MIB, 160, 16),
    "64 KiB write": ("write", 64 * KIB, 4000, 128),
    "64 KiB read": ("read", 64 * KIB, 4000, 16),
}
"""The parameters for each work: operation, size, count, and operations in flight.

aiordma keeps the same number of operations in flight.
"""
ASKED = "64 KiB write", "64 KiB read"
LIMIT = 60.0  # seconds until a program counts as hung
TRIES = 5

# For each program, the column of its output that contains the average bandwidth in MiB/s or the
# typical latency in us.
PROGRAMS = {"send_bw": 3, "write_bw": 3, "read_bw": 3, "send_lat": 4}


@dataclass(frozen=True)
class End:
    """The device and the network used by one of the two programs."""

    device: str
    options: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    """A command prefix that selects the device and the network."""
    host: str = "127.0.0.1"
    """The address to use for perftest's TCP connection to this end."""

    @classmethod
    def here(cls, device: str, options: tuple[str, ...] = ()) -> Self:
        run = (sys.executable, "-m", "aiordma", "run") if device == "embedded0" else ()
        return cls(device, options, run)


class InPerftest(Contender):
    """A contender that runs a perftest program for each job.

    The program's name is `ib_` followed by the kind of job. `ends` contains the client's end and
    the server's end.
    """

    new_process_per_job = True

    def __init__(self, *ends: End) -> None:
        super().__init__()
        self._client, self._server = ends

    def do(self, kind: str, **numbers: Any) -> float:
        # On a busy machine, perftest may fail to determine the processor's clock rate. It then
        # prints a warning to stderr and reports a bandwidth of 0. A run also fails if another
        # program has taken the port.
        for _ in range(TRIES):
            figure = self._once(kind, **numbers)
            if 0 < figure < math.inf:
                return figure / 1e6 if kind.endswith("_lat") else numbers["size"] / (figure * MIB)
        raise RuntimeError(f"ib_{kind} could not measure anything in {TRIES} runs")

    def _once(self, kind: str, size: int, count: int, *, events: bool = False) -> float:
        port = free_port()
        words = ["-F", "-p", str(port), "-s", str(size), "-n", str(count)]
        words += ["--events"] * events
        started = []
        both = ((self._server, ()), (self._client, (self._server.host,)))
        for core, (end, host) in zip(reversed(two_cores()), both, strict=True):
            command = [*end.before, f"ib_{kind}", "-d", end.device, *end.options, *words, *host]
            with on_core(core):
                process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            started.append(process)
            if not host and not listens(port, process):
                process.communicate(timeout=LIMIT)
                return 0
        try:
            server, client = (one.communicate(timeout=LIMIT)[0] for one in started)
        except subprocess.TimeoutExpired:
            raise RuntimeError("hung") from None
        finally:
            for one in started:
                one.kill()
        if any(one.returncode for one in started):
            raise RuntimeError(f"ib_{kind} {' '.join(words)} failed:\n{server}\n{client}")
        return result(client)[PROGRAMS[kind]]


def result(text: str) -> list[float]:
    """Return the numbers in the first result line of perftest's output."""
    lines = text.splitlines()
    heading = next(at for at, line in enumerate(lines) if line.lstrip().startswith("#bytes"))
    return [float(word) for word in lines[heading + 1].split()]


def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("", 0))  # on all addresses, like the program
        port: int = one.getsockname()[1]
        return port


def listens(port: int, process: subprocess.Popen[str]) -> bool:
    """Wait until a process is listening on a port in its network namespace.

    A perftest client fails if it connects before the server is listening. If the process is not
    listening after LIMIT seconds, this function kills it.

    Returns:
        False if the process has exited or was killed.
    """
    until = time.monotonic() + LIMIT
    table = Path(f"/proc/{process.pid}/net/tcp")
    while process.poll() is None:
        with suppress(OSError):  # the process has just exited
            if f":{port:04X} 00000000:0000 0A" in table.read_text():  # 0A: LISTEN
                return True
        if time.monotonic() > until:
            process.kill()
            break
        time.sleep(0.01)
    return False


def lanes(
    contenders: Contenders, options: Options, device: str = DEVICE, *words: str
) -> Iterator[Lane]:
    ours = contenders.python("aiordma")
    trips = options.count(1000)
    beside = None
    if shutil.which("ib_send_bw"):
        beside = contenders.other(InPerftest, *[End.here(device, words)] * 2)
    for work, (kind, size, count, window) in MANY.items():
        numbers = {"size": size, "count": options.count(count, window)}
        yield Lane.of(ours, work, "aiordma", f"{kind}_many", window=window, **numbers)
        if beside:
            yield Lane.of(beside, work, "perftest", f"{kind}_bw", **numbers)
    yield Lane(LATENCY, "aiordma", lambda: ours.do("echo", size=64, count=trips) / 2)
    if beside:
        yield Lane.of(beside, LATENCY, "perftest", "send_lat", size=64, count=trips)


def requirements(data: Data) -> Iterator[Requirement]:
    for work in ASKED:
        found = ratio(seconds(data, work, "perftest"), seconds(data, work, "aiordma"))
        yield at_least(f"{work} on the embedded device: bandwidth relative to perftest", 0.8, found)


COMPARISON = Comparison(
    "perftest on the embedded device",
    NOTE,
    lanes,
    requirements,
    caption="Time per message on the embedded device in us",
)

# ---- SoftRoCE ------------------------------------------------------------------------------------

ON_SOFTROCE = """\
This test compares aiordma with perftest on the kernel's SoftRoCE device (`rxe0`). It runs in a
virtual machine with an emulated processor. The absolute times are therefore meaningless, and
the ratios are only a rough indication."""
# The device in softdev/tests/softroce/vm, its address, and perftest's option for the GID index.
RXE, ADDRESS, GID = "rxe0", "10.9.9.1", ("-x", "1")
MARK = "measured: "
SHARE = 0.4  # fraction of the embedded device's workload, because the emulation is slow


def inside(options: Options) -> Data:
    with Contenders() as contenders:
        return take_turns(list(lanes(contenders, options, RXE, *GID)), options)


def in_machine(module: str, options: Options, **environment: str) -> Data:
    """Run `python -m MODULE TURNS SHARE` in the virtual machine and return its results."""
    command = [str(HERE.parent / "tests" / "softroce" / "vm"), sys.executable, "-m", module]
    command += [str(options.turns), str(options.share)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            data: Data = json.loads(line.removeprefix(MARK))
            return data
    raise RuntimeError(f"the machine ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def on_softroce(options: Options) -> Data:
    fewer = replace(options, share=options.share * SHARE)
    return in_machine("bench.perftest", fewer, AIORDMA_DEVICE=RXE, BENCH_HOST=ADDRESS)


def softroce_requirements(data: Data) -> Iterator[Requirement]:
    for work in (SEND, WRITE):
        found = ratio(seconds(data, work, "perftest"), seconds(data, work, "aiordma"))
        yield at_least(f"{work} on SoftRoCE: bandwidth relative to perftest", 0.95, found)


SOFTROCE = Comparison(
    "perftest on SoftRoCE",
    ON_SOFTROCE,
    lanes,
    softroce_requirements,
    caption="Time per message on SoftRoCE in us",
    elsewhere=on_softroce,
)

if __name__ == "__main__":
    print(MARK + json.dumps(inside(Options(int(sys.argv[1]), float(sys.argv[2])))))
