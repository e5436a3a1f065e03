"""Run the commands of docs/command-line.md with the `aiordma` under test."""

from __future__ import annotations

from pathlib import Path

from .page_commands import blocks, run_commands

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"


def run_section(section: str, folder: Path) -> str:
    """Run the commands of a section on the embedded device and return their output."""
    return run_commands("".join(block.commands for block in blocks(PAGE, section)), folder)
