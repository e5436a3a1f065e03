"""rdma-core's own tests of libibverbs, written against hardware, on the embedded device.

They are Python programs on pyverbs, which is linked with libibverbs; Debian's python3-pyverbs has
both, for the system's Python.
"""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path

import pytest

from .conftest import run_program

SUITE = Path("/usr/share/doc/rdma-core/tests")
PYTHON = "/usr/bin/python3"

NO_COMMAND_FD = "it shares the device by its file descriptor, and there is no such file"
RULE_OF_MLX5 = "a rule of one card, which ibv_alloc_dm(3) does not have"

# Tests that fail, and why that is as it should be, or known.
KNOWN = {
    "test_create_ah_roce": "addresses without a GRH are those of this host",
    "test_dm_bad_access": RULE_OF_MLX5,
    "test_dm_write_bad_flow": RULE_OF_MLX5,
    "test_import_dm": NO_COMMAND_FD,
    "test_imported_rc_ex_rdma_write": NO_COMMAND_FD,
}


def copy_suite(to: Path) -> None:
    """Debian's compressed files, decompressed."""
    if not SUITE.is_dir():
        pytest.fail(
            f"{SUITE} is not there: on Debian, apt-get install python3-pyverbs", pytrace=False
        )
    shutil.copytree(SUITE, to)
    for packed in to.rglob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))


def test_upstream(tmp_path: Path) -> None:
    copy_suite(tmp_path / "tests")
    words = [str(tmp_path / "tests" / "run_tests.py"), "--dev", "embedded0", "--gid", "0", "-v"]
    done = run_program(PYTHON, "-B", *words)
    assert re.search(r"^Ran \d+ tests in", done.errors, re.MULTILINE), done.errors
    failed = set(re.findall(r"^(?:ERROR|FAIL): (\w+) \(", done.errors, re.MULTILINE))
    assert failed == KNOWN.keys(), done.errors
    # The others are for cards of one maker, or ask for what no software device has.
    assert len(re.findall(r"\bok$", done.errors, re.MULTILINE)) >= 100
