"""meson.build names every source: what it leaves out would be neither compiled nor tested."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("native/verbs", "native/soft", "native/fast", "tests/soft", "tests/fuzz")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_source_is_built(folder: str) -> None:
    described = (ROOT / folder / "meson.build").read_text()
    sources = list((ROOT / folder).glob("*.c"))
    assert sources
    left_out = [it.name for it in sources if f"'{it.stem}'" not in described.replace(".c'", "'")]
    assert not left_out
