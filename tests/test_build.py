"""meson.build names every source: what it leaves out would be neither compiled nor tested."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("native/verbs", "native/softdev", "native/fast", "tests/soft", "tests/fuzz")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_source_is_built(folder: str) -> None:
    described = (ROOT / folder / "meson.build").read_text()
    every = folder == "native/softdev"  # its folders have no meson.build of their own
    sources = list((ROOT / folder).glob("**/*.c" if every else "*.c"))
    assert sources
    names = [it.relative_to(ROOT / folder).with_suffix("") for it in sources]
    left_out = [name for name in names if f"'{name}'" not in described.replace(".c'", "'")]
    assert not left_out
