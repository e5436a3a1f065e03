"""Tests of the commands for `aiordma run` in docs/command-line.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.docs.command_line import PAGE, run_section

from .conftest import installed, run_pair

ROWS = re.findall(r"^\| `aiordma run (.*)` \| `aiordma run (.*)` \|$", PAGE.read_text(), re.M)


def test_run_section_commands_list_the_embedded_device(tmp_path: Path) -> None:
    installed("ibv_devices")
    printed = run_section("run", tmp_path)
    assert re.search(r"^ +embedded0 +\t[0-9a-f]{16}$", printed, re.MULTILINE)
    assert "hca_id:\tembedded0" in printed


@pytest.mark.parametrize(("server", "client"), ROWS)
def test_documented_program_pairs_succeed(server: str, client: str, port: int) -> None:
    """Use a free port, since the default one may be in use."""
    assert len(ROWS) == 3
    own = ["-p", str(port)]
    waiting, asking = run_pair([*shlex.split(server), *own], [*shlex.split(client), *own], port)
    asking.expect()
    if "rping" not in server:  # without -C its server takes the end of the client for a failure
        waiting.expect()
