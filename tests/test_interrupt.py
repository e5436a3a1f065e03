"""A process whose first Ctrl-C is lost is interrupted again, and one that never ends is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .interrupt import interrupt

# Takes as many interrupts as it is told to, then ends.
DEAF = """\
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print(flush=True)
for _ in range(int(sys.argv[1])):
    signal.sigwait([signal.SIGINT])
sys.exit(7)
"""


def deaf(interrupts: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF, str(interrupts)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.parametrize("needed", [1, 2])
def test_as_often_as_it_takes(needed: int) -> None:
    with deaf(needed) as process:
        assert interrupt(process, patience=2 if needed > 1 else 20) == 7


def test_not_for_ever() -> None:
    with deaf(4) as process, pytest.raises(AssertionError, match="three times"):
        interrupt(process, patience=0.01)
    assert process.returncode < 0
