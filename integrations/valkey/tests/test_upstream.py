"""Run valkey-py's own asyncio tests, from its source distribution, with connections over RDMA.

They run in a separate process with the plugin ``over_rdma``. EXCLUDED lists the tests that are
skipped, with the reasons. If any other test fails, this test fails, too.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from xml.etree import ElementTree

import pytest

from .conftest import Server

BUILD = Path(__file__).parents[3] / "build" / "valkey"

MODULES = "it needs modules that are not part of Valkey (JSON, search, bloom, time series, graph)"
CLUSTER = "it needs a cluster of six servers"
SENTINEL = "it needs three sentinels; by TCP it fails here as well"
DEFAULT = "it connects to localhost:6379, whatever the URL says; by TCP it fails here as well"
TLS = "of TLS over TCP"
TIMING = (
    "its steps have limits of 10, 100 and 2,000 ms, which a busy machine exceeds: by TCP it fails"
    " as well beside the same load;"
    " test_client.py::test_subscriber_reconnects_and_subscribes_again has no such limits"
)
MESSAGE = "it gives a message 100 ms, which a busy machine exceeds"
STREAMS = "it replaces asyncio.open_connection, which nothing calls here"

EXCLUDED = {
    "test_bloom.py": MODULES,
    "test_graph.py": MODULES,
    "test_json.py": MODULES,
    "test_search.py": MODULES,
    "test_timeseries.py": MODULES,
    "test_cluster.py": CLUSTER,
    "test_cwe_404.py": "of a TCP proxy before the server, which delays bytes",
    "test_cache.py::TestSentinelLocalCache": SENTINEL,
    "test_sentinel.py::test_master_for": SENTINEL,
    "test_sentinel.py::test_slave_for": SENTINEL,
    "test_connection_pool.py::TestConnectionPool::test_multiple_connections": DEFAULT,
    "test_connection_pool.py::TestConnectionPool::test_max_connections": DEFAULT,
    "test_connection_pool.py::TestConnectionPool::test_reuse_previously_released_connection": (
        DEFAULT
    ),
    "test_commands.py::TestValkeyCommands::test_client_setinfo": DEFAULT,
    "test_connect.py::test_tcp_ssl": TLS,
    "test_connection.py::test_connection_disconnect_race": STREAMS,
    "test_pubsub.py::TestPubSubAutoReconnect": TIMING,
    "test_pubsub.py::TestPubSubRun::test_late_subscribe": MESSAGE,
}


@pytest.fixture
def source() -> Path:
    """Provide the source distribution of the installed valkey-py, downloaded if necessary."""
    version = importlib.metadata.version("valkey")
    folder = BUILD / f"valkey-{version}"
    if not folder.exists():
        python = Path(__file__).parents[3] / ".venv" / "bin" / "python"
        words = ["-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest"]
        subprocess.run([python, *words, BUILD, f"valkey=={version}"], check=True)
        with tarfile.open(BUILD / f"valkey-{version}.tar.gz") as archive:
            archive.extractall(BUILD, filter="data")
    return folder


def test_upstream_run_fails_when_the_server_dies(tmp_path: Path) -> None:
    server = Server(tmp_path)
    tests: subprocess.Popen[bytes] = subprocess.Popen(["sleep", "inf"])
    dying = threading.Thread(target=server.kill)
    dying.start()
    try:
        with pytest.raises(pytest.fail.Exception, match=r"died:(?s:.*)accept connections rdma"):
            server.outlives(tests)
    finally:
        tests.kill()
        tests.wait()
        dying.join()


# This limit covers the whole run, even on a busy machine. Each valkey-py test has its own limit.
@pytest.mark.timeout(3600)
def test_valkey_py_tests_pass_over_rdma(server: Server, source: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    left_out = [
        f"--{'ignore' if name.endswith('.py') else 'deselect'}=tests/test_asyncio/{name}"
        for name in EXCLUDED
    ]
    log = BUILD / "upstream.log"
    with log.open("wb") as output:
        tests = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "over_rdma", "-p", "no:cacheprovider", "--quiet",
             "-c", "pyproject.toml", "-o", "addopts=", "--timeout", "60", "--junitxml", report,
             "--valkey-url", f"valkey://127.0.0.1:{server.tcp_port}/0",
             "-m", "not valkeymod and not onlycluster", "tests/test_asyncio", *left_out],
            cwd=source,
            env={
                **os.environ,
                "PYTHONPATH": f"{Path(__file__).parent}:{source}",
                "OVER_RDMA": f"valkey:{server.tcp_port}:{server.port}",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        server.outlives(tests)
    said = log.read_text()
    assert report.exists(), said[-5000:]
    suite = ElementTree.parse(report).getroot()[0]
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite
        if case.find("failure") is not None or case.find("error") is not None
    ]
    counts = {kind: int(suite.get(kind, 0)) for kind in ("tests", "skipped", "failures", "errors")}
    print("valkey-py:", counts)
    assert not failed, said[-5000:]
    over_rdma = re.search(r"(\d+) connections over RDMA", said)
    assert over_rdma is not None
    assert int(over_rdma[1]) > 100, counts
