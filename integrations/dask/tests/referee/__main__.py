"""Run distributed's own tests with tcp:// carried over RDMA, and compare them with real TCP.

The tests come from Debian's source package, because neither the wheel nor the sdist on PyPI
contains them. They are older than the distributed release on PyPI, so some also fail over TCP. Each
test that fails is therefore repeated over TCP, and must fail there, too. Tests that only connect
within a process are exempt, because inproc:// is part of distributed. `internals.py` lists the
tests of TCP's internals, which must fail, the tests that may fail by chance, and the tests that
send to other machines, which are not run.

    python -m referee FOLDER [FILE ...]     FOLDER: for sources, results and logs
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from .internals import CHANCE, INTERNALS, OUTSIDE

HERE = Path(__file__).parent
PACKAGES = Path(sysconfig.get_path("purelib"))
FETCHED = PACKAGES / "distributed/tests/fetched"  # deleted together with the virtual environment
SOURCES = "deb-src http://deb.debian.org/debian trixie main\n"
FILES = [
    "distributed/comm/tests/test_comms.py",
    "distributed/tests/test_core.py",
    "distributed/tests/test_worker.py",
    "distributed/tests/test_client.py",
]


def fetch(folder: Path) -> None:
    """Download distributed's tests, and copy them next to the modules they test."""
    if FETCHED.exists():
        return
    apt = folder / "apt"
    for name in ("lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "sources").write_text(SOURCES)
    options = [
        f"-oDir::Etc::SourceList={apt}/sources",
        "-oDir::Etc::SourceParts=-",
        f"-oDir::State::Lists={apt}/lists",
        f"-oDir::Cache={apt}/cache",
        "-oAPT::Sandbox::User=root",
    ]
    subprocess.run(["apt-get", "-qq", *options, "update"], check=True)
    shutil.rmtree(folder / "source", ignore_errors=True)
    subprocess.run(
        ["apt-get", "-qq", *options, "source", "--tar-only", "dask.distributed"],
        cwd=folder,
        check=True,
    )
    (archive,) = folder.glob("dask.distributed_*.orig.tar.*")
    shutil.unpack_archive(archive, folder / "source", filter="data")
    (tree,) = (folder / "source").iterdir()
    for tests in ("distributed/tests", "distributed/comm/tests"):
        shutil.copytree(tree / tests, PACKAGES / tests, dirs_exist_ok=True)
    FETCHED.write_text(archive.name + "\n")


def run(folder: Path, scheme: str, name: str, tests: list[str]) -> dict[str, str]:
    """Run tests, and return "passed", "failed", "failed over inproc" or "skipped" for each."""
    results = folder / f"{name}-{scheme}.json"
    environment = {
        **os.environ,
        "AIORDMA_DEVICE": "embedded0",
        "PYTHONPATH": str(HERE),
        "REFEREE_RESULTS": str(results),
        "DASK_RDMA_AS_TCP": "1" if scheme == "rdma" else "",
    }
    words = [sys.executable, "-m", "pytest", "-c", str(HERE / "pytest.ini"), "--rootdir=."]
    log = folder / f"{name}-{scheme}.log"
    with log.open("w") as output:
        ended = subprocess.run(
            [*words, "-p", "referee_plugin", *(f"--deselect={it}" for it in OUTSIDE), *tests],
            cwd=PACKAGES,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    # If pytest is interrupted or fails internally, the results file exists but is incomplete.
    if ended.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(f"the tests did not run to the end: {log}")
    found: dict[str, str] = json.loads(results.read_text())
    return found


def judge(folder: Path, file: str) -> list[str]:
    """Run a test file over RDMA, and return a message for each unexpected result."""
    name = Path(file).stem
    rdma = run(folder, "rdma", name, [file])
    failed = sorted(test for test, result in rdma.items() if result == "failed")
    asked = [test for test in failed if test not in INTERNALS and test not in CHANCE]
    tcp = run(folder, "tcp", name, asked) if asked else {}
    both = [test for test in asked if tcp.get(test) == "failed"]
    wrong = [f"{test} fails, and on TCP it does not" for test in asked if test not in both]
    listed = [test for test in INTERNALS if test.startswith(f"{file}::")]
    wrong += [
        f"{test} is listed as one of TCP's inside, and {rdma.get(test, 'is not there')}"
        for test in listed
        if rdma.get(test) != "failed"
    ]
    results = list(rdma.values())
    print(
        f"{file}: {results.count('passed')} passed, {results.count('skipped')} skipped, "
        f"{len(listed)} of TCP's inside, {len(both)} fail on TCP as well",
        flush=True,
    )
    for why, tests in (
        ("on TCP as well", both),
        ("by chance", [test for test in failed if test in CHANCE]),
        ("over inproc", [test for test in rdma if rdma[test] == "failed over inproc"]),
    ):
        for test in tests:
            print(f"    {why}: {test.split('::', 1)[1]}")
    return wrong


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    fetch(folder)
    print(f"tests of {FETCHED.read_text().strip()}", flush=True)
    wrong = [line for file in sys.argv[2:] or FILES for line in judge(folder, file)]
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
