"""perftest's bandwidth on SoftRoCE, the kernel's device, in the virtual machine of tests/softroce.

python -m bench.softroce        inside: measures, and prints a line of JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from . import perftest
from .device import HERE
from .lanes import (
    Comparison,
    Contenders,
    Data,
    Options,
    Requirement,
    at_least,
    ratio,
    seconds,
    take_turns,
)

NOTE = (
    "The same on `rxe0`, the kernel's SoftRoCE, within a virtual machine whose processor is "
    "emulated: times there mean nothing, ratios little."
)
# As tests/softroce/vm has it: the device, its address, and the GID of that address.
RXE, ADDRESS, GID = "rxe0", "10.9.9.1", ("-x", "1")
MARK = "measured: "
SHARE = 0.4  # of the work on the embedded device: all takes far longer


def inside(options: Options) -> Data:
    with Contenders() as contenders:
        return take_turns(list(perftest.lanes(contenders, options, RXE, *GID)), options)


def measure(options: Options) -> Data:
    """Boots the machine."""
    command = [str(HERE.parent / "tests" / "softroce" / "vm"), sys.executable, "-m", __name__]
    command += [str(options.turns), str(options.share * SHARE)]
    environment = {
        **os.environ,
        "AIORDMA_DEVICE": RXE,
        "AIORDMA_BENCH_HOST": ADDRESS,
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            data: Data = json.loads(line.removeprefix(MARK))
            return data
    raise RuntimeError(f"the machine ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def requirements(data: Data) -> Iterator[Requirement]:
    for work in (perftest.SEND, perftest.WRITE):
        found = ratio(seconds(data, work, "perftest"), seconds(data, work, "aiordma"))
        yield at_least(f"{work} on SoftRoCE: times perftest's bandwidth", 0.95, found)


COMPARISON = Comparison("perftest on SoftRoCE", NOTE, measure, requirements)

if __name__ == "__main__":
    print(MARK + json.dumps(inside(Options(int(sys.argv[1]), float(sys.argv[2])))))
