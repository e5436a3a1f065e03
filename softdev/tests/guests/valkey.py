"""Row for Valkey with its RDMA module.

It is built from a source package, because Debian 12 has no package with the module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from .rows import Command, Row, Software

INTEGRATION = "{here}/../../integrations/valkey"
SERVER = "{here}/../../build/valkey/server"

VALKEY = Software(
    "Valkey",
    "valkey-server",
    apt=("dpkg-dev", "librdmacm-dev", "libibverbs-dev"),
    build=f"{INTEGRATION}/tests/build-server {SERVER}",
    tells=f"{SERVER}/valkey-server --version",
    note="The unmodified server is built from the source package of a newer Debian release "
    "(`make valkey`). The client uses streams from [valkey-aiordma](../../docs/valkey.md), or "
    "asyncio streams for kernel TCP.",
)

VALUE = 1 << 20  # programs/valkey_get.py


def rows() -> Iterator[Row]:
    # aiordma contains the embedded device, and refuses to start if another copy is preloaded.
    plain = "env -u LD_PRELOAD -u LD_LIBRARY_PATH"
    client = f"{plain} {sys.executable} {{here}}/programs/valkey_get.py"
    server = f"{SERVER}/valkey-server --bind 127.0.0.1 --save '' --appendonly no"
    figure = r"([\d.]+) us/GET"
    yield Row(
        "Valkey",
        "SET and GET",
        Command(
            f"{client} rdma {{port}} {{count}}",
            f"{server} --port 0 --loadmodule {SERVER}/valkey-rdma.so"
            " --rdma-bind 127.0.0.1 --rdma-port {port}",
            figure,
            endless=True,
        ),
        2 * VALUE,
        count=("100", "5000"),
        unit="us/GET",
        tcp=Command(
            f"{client} tcp {{port}} {{count}}", f"{server} --port {{port}}", figure, endless=True
        ),
        environment={"PYTHONPATH": INTEGRATION, "AIORDMA_DEVICE": "embedded0"},
        tcp_environment={"PYTHONPATH": INTEGRATION},
        says=r"(?m)^the same",
    )
