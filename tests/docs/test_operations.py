"""docs/deployment.md: what systemd is told."""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS


def program(page: str) -> str:
    (found,) = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.M)
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("watchdog", ["", "20000"])
@pytest.mark.parametrize("is_abstract", [False, True])
def test_what_systemd_is_told(tmp_path: Path, is_abstract: bool, watchdog: str) -> None:
    """READY once it serves, WATCHDOG until its end, STOPPING when it was told to stop."""
    name = f"@aiordma-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    environment = {"AIORDMA_DEVICE": "embedded0", "NOTIFY_SOCKET": name, "WATCHDOG_USEC": watchdog}
    told = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(name.replace("@", "\0"))
        command = [sys.executable, "-W", "error", "-c", program("deployment.md")]
        with subprocess.Popen(command, env={**os.environ, **environment}) as process:
            ended = os.pidfd_open(process.pid)
            try:
                watched = [systemd.fileno(), ended]
                while systemd.fileno() in (ready := select.select(watched, [], [], 300)[0]):
                    told.append(systemd.recv(100).decode())
                assert ready == [ended]
            finally:
                os.close(ended)
                process.kill()
    assert process.returncode == 0
    assert [state for state in told if state != "WATCHDOG=1"] == ["READY=1", "STOPPING=1"]
    assert told[0] == "READY=1"
    # The work that is finished after STOPPING takes ten times as long as what it promises.
    assert told.count("WATCHDOG=1") >= 2 if watchdog else "WATCHDOG=1" not in told
