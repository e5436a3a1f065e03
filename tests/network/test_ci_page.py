"""Test the commands for two hosts in ci-without-hardware.md."""

from __future__ import annotations

import os
from pathlib import Path

from softdev.tests.programs.conftest import installed
from tests.docs.page_commands import blocks, run_commands

from .namespaces import PREFIX, ip

PAGE = Path(__file__).parents[2] / "softdev/docs" / "ci-without-hardware.md"


def test_documented_two_host_commands_run_rping_successfully(tmp_path: Path) -> None:
    """The test renames the namespaces, so that parallel runs do not collide."""
    installed("rping")
    _, block = blocks(PAGE, "Several processes, two hosts")
    own = f"{PREFIX}-{os.getpid()}-host-"
    try:
        printed = run_commands(block.commands.replace("host-", own), tmp_path)
    finally:
        for side in "ab":
            ip("netns", "delete", own + side, check=False)
    assert printed.count("ping data: rdma-ping-4: ") == 1
