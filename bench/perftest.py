"""perftest, the usual programs for measuring RDMA devices, on the same device: the embedded one
under `aiordma run`, another one as they are.

python -m bench.perftest        in the virtual machine of tests/softroce: measures SoftRoCE, the
                                kernel's device, and prints a line of JSON
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

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

NOTE = (
    "*perftest* is `ib_send_bw`, `ib_write_bw` and `ib_send_lat` on the same device, which poll "
    "all the time. Of 1 MiB many messages are under way: the time for one of them. Half a round "
    "trip is what perftest calls latency: for aiordma half of an echo."
)

SEND, WRITE, LATENCY = "1 MiB send", "1 MiB write", "64 B send, half a round trip"
MIB = 1 << 20
LIMIT = 60.0  # seconds until a program counts as hung
TRIES = 5

# The column of the one line below the headings that is taken, and what makes seconds of it.
PROGRAMS = {"send_bw": 3, "write_bw": 3, "send_lat": 4}


class InPerftest(Contender):
    """Each job is a run of its own, of `ib_` and its kind."""

    afresh = True

    def __init__(self, device: str, options: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._words = ["-d", device, "-F", *options]
        self._run = [sys.executable, "-m", "aiordma", "run"] if device == "embedded0" else []

    def do(self, kind: str, **numbers: int) -> float:
        # On a busy machine perftest may not find out how quick the processor's clock is: then it
        # says so on stderr, and that all bandwidths are 0.  Or another program has the port.
        for _ in range(TRIES):
            if figure := self._once(kind, numbers["size"], numbers["count"]):
                return figure / 1e6 if kind.endswith("_lat") else numbers["size"] / (figure * MIB)
        raise RuntimeError(f"ib_{kind} could not measure anything in {TRIES} runs")

    def _once(self, kind: str, size: int, count: int) -> float:
        port = free_port()
        words = [*self._run, f"ib_{kind}", *self._words, "-p", str(port)]
        words += ["-s", str(size), "-n", str(count)]
        ends = []
        for core, host in zip(reversed(two_cores()), ([], ["127.0.0.1"]), strict=True):
            with on_core(core):
                process = subprocess.Popen([*words, *host], stdout=subprocess.PIPE, text=True)
            ends.append(process)
            if not host and not listens(port, process):
                process.communicate(timeout=LIMIT)
                return 0
        server, client = (end.communicate(timeout=LIMIT)[0] for end in ends)
        if any(end.returncode for end in ends):
            raise RuntimeError(f"{' '.join(words)} failed:\n{server}\n{client}")
        return result(client)[PROGRAMS[kind]]


def result(text: str) -> list[float]:
    """The numbers of the one line below the headings."""
    lines = text.splitlines()
    heading = next(at for at, line in enumerate(lines) if line.lstrip().startswith("#bytes"))
    return [float(word) for word in lines[heading + 1].split()]


def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("", 0))  # as the program will, on all addresses
        port: int = one.getsockname()[1]
        return port


def listens(port: int, process: subprocess.Popen[str]) -> bool:
    """Wait until it does: a client that comes too early gives up.  False: it has ended."""
    until = time.monotonic() + LIMIT
    while f":{port:04X} 00000000:0000 0A" not in Path("/proc/net/tcp").read_text():  # 0A: LISTEN
        if process.poll() is not None:
            return False
        if time.monotonic() > until:
            process.kill()
            return False
        time.sleep(0.01)
    return True


def lanes(
    contenders: Contenders, options: Options, device: str = DEVICE, *words: str
) -> Iterator[Lane]:
    ours = contenders.python("aiordma")
    many, trips = options.count(160, 16), options.count(1000)
    yield Lane.of(ours, SEND, "aiordma", "send_many", size=MIB, count=many, window=16)
    yield Lane.of(ours, WRITE, "aiordma", "write_many", size=MIB, count=many, window=16)
    yield Lane(LATENCY, "aiordma", lambda: ours.do("echo", size=64, count=trips) / 2)
    if shutil.which("ib_send_bw"):
        beside = contenders.other(InPerftest, device, words)
        yield Lane.of(beside, SEND, "perftest", "send_bw", size=MIB, count=many)
        yield Lane.of(beside, WRITE, "perftest", "write_bw", size=MIB, count=many)
        yield Lane.of(beside, LATENCY, "perftest", "send_lat", size=64, count=trips)


def requirements(data: Data) -> Iterator[Requirement]:
    """No requirement on the embedded device; SoftRoCE has some."""
    return iter(())


COMPARISON = Comparison("perftest on the embedded device", NOTE, lanes, requirements)

# ---- SoftRoCE ------------------------------------------------------------------------------------

ON_SOFTROCE = (
    "The same on `rxe0`, the kernel's SoftRoCE, within a virtual machine whose processor is "
    "emulated: times there mean nothing, ratios little."
)
# As tests/softroce/vm has it: the device, its address, and the GID of that address.
RXE, ADDRESS, GID = "rxe0", "10.9.9.1", ("-x", "1")
MARK = "measured: "
SHARE = 0.4  # of the work on the embedded device: all takes far longer


def inside(options: Options) -> Data:
    with Contenders() as contenders:
        return take_turns(list(lanes(contenders, options, RXE, *GID)), options)


def in_machine(options: Options) -> Data:
    """Boots the machine."""
    command = [
        str(HERE.parent / "tests" / "softroce" / "vm"),
        sys.executable,
        "-m",
        "bench.perftest",
    ]
    command += [str(options.turns), str(options.share * SHARE)]
    environment = {**os.environ, "AIORDMA_DEVICE": RXE, "AIORDMA_BENCH_HOST": ADDRESS}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            data: Data = json.loads(line.removeprefix(MARK))
            return data
    raise RuntimeError(f"the machine ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def softroce_requirements(data: Data) -> Iterator[Requirement]:
    for work in (SEND, WRITE):
        found = ratio(seconds(data, work, "perftest"), seconds(data, work, "aiordma"))
        yield at_least(f"{work} on SoftRoCE: times perftest's bandwidth", 0.95, found)


SOFTROCE = Comparison(
    "perftest on SoftRoCE", ON_SOFTROCE, lanes, softroce_requirements, elsewhere=in_machine
)

if __name__ == "__main__":
    print(MARK + json.dumps(inside(Options(int(sys.argv[1]), float(sys.argv[2])))))
