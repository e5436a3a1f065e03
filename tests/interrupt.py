"""Ctrl-C for a process that runs an event loop."""

from __future__ import annotations

import signal
import subprocess


def interrupt(process: subprocess.Popen[str], patience: float = 35) -> int:
    """Sends SIGINT and waits for the end, `patience` seconds at a time; returns the exit status.

    A signal that comes after the interpreter last looked for one, and before the loop sleeps in
    epoll_wait, is seen when the loop next wakes, as in any program of asyncio.run: a person
    presses again, and so does this. What the process prints has to fit into its pipes.
    """
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            pass
    process.kill()
    raise AssertionError("the process did not end when it was interrupted three times")
