"""Run rdma-core's own tests, which were written against hardware, on the embedded device.

The tests use pyverbs, which is linked with both libraries. Debian's python3-pyverbs contains all of
it for the system's Python. `upstream_newer.py` runs the tests of newer versions.
"""

from __future__ import annotations

import gzip
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from .conftest import Ended, started

SUITE = Path("/usr/share/doc/rdma-core/tests")
PYTHON = "/usr/bin/python3"

# Minimum number of tests that must pass.
PASSING = 140

CARD = "of the cards of one maker"
ETHERNET = "raw Ethernet packets, which the device's links do not carry"
MACHINE = "of what this machine has"

# Patterns for the messages of tests that skip themselves, mapped to the causes. Any other message
# is an error.
SKIPPED = {
    r"Can not run the test over non (?:MLX5|EFA) device": CARD,
    r"Could not open mlx5 context": CARD,
    r"Converting timestamp to nanoseconds is not supported": CARD,
    r"PCI device must be passed by the user": CARD,
    r"Create QP type 8 is not supported": ETHERNET,
    r"Create Raw Packet QP with": ETHERNET,
    r"Extended CQ is not supported": "tag matching, which no queue of the device does",
    r"All gid indices populated": "the table of GIDs is as long as the host has addresses",
    r"Allocating dmabuf is not supported": MACHINE,
    r"Device /dev/dri/\w+ is not present": MACHINE,
    r"There are no huge pages of size 2M": MACHINE,
    r"Must be run by root": MACHINE,
    r"To Create RAW QP must be done by root": MACHINE,
    r"Lack of permission to access /dev/dri": MACHINE,
    r"cuda-python .* must be installed": MACHINE,
    r"ODP is unavailable - Operation not supported": "of cards: prefetching by a mask of theirs",
}


# Replacements in a copy of the suite. They change its fixed port, and extend time limits that a
# busy machine may exceed: 15 s for two processes to meet, 150 times 0.2 s for a test's processes,
# and 10 s for a completion.
REPLACEMENTS = {
    "else '7471'": "else '{port}'",
    "Barrier(NUM_OF_PROCESSES, timeout=15)": "Barrier(NUM_OF_PROCESSES, timeout=300)",
    "repeat_times=150 if": "repeat_times=3000 if",
    "POLL_CQ_TIMEOUT = 10 ": "POLL_CQ_TIMEOUT = 300 ",
}

# Time limit in seconds for the whole suite on a busy machine. It must be below the 1200 s after
# which pytest ends the process (faulthandler_timeout in the Makefile).
LIMIT = 1000.0


def adapt(suite: Path, port: int) -> None:
    """Give a copy of the suite its own port and longer time limits."""
    missing = dict(REPLACEMENTS)
    for path in suite.glob("*.py"):
        text = path.read_text()
        for old, new in REPLACEMENTS.items():
            if old in text:
                text = text.replace(old, new.format(port=port))
                missing.pop(old, None)
        path.write_text(text)
    assert not missing


def copy_suite(to: Path) -> None:
    """Copy the suite, and decompress Debian's compressed files."""
    if not SUITE.is_dir():
        pytest.fail(
            f"{SUITE} is not there: on Debian, apt-get install python3-pyverbs", pytrace=False
        )
    shutil.copytree(SUITE, to)
    for packed in to.rglob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))


def run_suite(folder: Path, python: str = PYTHON) -> Ended:
    """Run all tests in a folder."""
    words = [str(folder / "run_tests.py"), "--dev", "embedded0", "--gid", "0", "-v"]
    with started([python, "-B", *words]) as running:
        return running.end(LIMIT)


def judge(done: Ended, passing: int) -> None:
    """Check that no test fails or skips itself unexpectedly, and that enough tests pass."""
    assert re.search(r"^Ran \d+ tests in", done.errors, re.MULTILINE), done.errors
    failed = re.findall(r"^(?:ERROR|FAIL): (\w+) \(", done.errors, re.MULTILINE)
    assert not failed, done.errors
    assert done.status == 0, done.errors
    reasons = Counter(re.findall(r"skipped ['\"](.*)['\"]$", done.errors, re.MULTILINE))
    unknown = [one for one in reasons if not any(re.match(known, one) for known in SKIPPED)]
    assert not unknown, reasons
    assert len(re.findall(r"\bok$", done.errors, re.MULTILINE)) >= passing, done.errors


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("links", ["shared", "tcp"])
def test_rdma_core_tests_pass_on_the_embedded_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str, port: int
) -> None:
    monkeypatch.setenv("AIORDMA_EMBEDDED_LINKS", links)
    copy_suite(tmp_path / "tests")
    adapt(tmp_path / "tests", port)
    judge(run_suite(tmp_path / "tests"), PASSING)
