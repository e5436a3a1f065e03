"""Send Ctrl-C to a process that runs an event loop."""

from __future__ import annotations

import signal
import subprocess


def interrupt(process: subprocess.Popen[str], patience: float = 35) -> int:
    """Send SIGINT until the process ends, and return its exit status.

    Each of the three attempts waits `patience` seconds. A signal that arrives between the
    interpreter's last check and epoll_wait() is handled only when the loop next wakes, as in any
    asyncio.run() program. A user would press Ctrl-C again. The output must fit into the pipes.
    """
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            pass
    process.kill()
    raise AssertionError("the process did not end when it was interrupted three times")
