"""An installation that was cut off is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import installing
from .rows import Software

SOFTWARE = Software("cut off", "none", pip=("none",), then=("first {venv}", "second {venv}"))


def test_an_installation_that_was_cut_off_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of mpi4py does, a command fails where its folder is there already."""
    called = []
    cut_off = True

    def call(*words: str) -> str:
        if words[0] == "first":
            Path(words[1], "source").mkdir(parents=True)
        if words[0] == "second" and cut_off:
            raise KeyboardInterrupt
        called.append(Path(words[0]).name)
        return ""

    monkeypatch.setattr(installing, "BUILD", tmp_path)
    monkeypatch.setattr(installing, "SOFTWARE", [SOFTWARE])
    monkeypatch.setattr(installing, "call", call)
    install = installing.install.__wrapped__
    with pytest.raises(KeyboardInterrupt):
        install(SOFTWARE.name)
    cut_off = False
    called.clear()
    install(SOFTWARE.name)
    assert called[-3:] == ["pip", "first", "second"]
    called.clear()
    install(SOFTWARE.name)
    assert called == []
