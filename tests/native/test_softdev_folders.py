"""The folders of the embedded device call and include one way (docs/embedded-device.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from .. import softdev_folders

BUILDS = sorted((softdev_folders.ROOT / "build").glob("*/native/softdev/libdevice.a.p"))


@pytest.fixture(scope="module")
def calls() -> dict[tuple[str, str], list[str]]:
    if not BUILDS:
        pytest.skip("there are no objects of the device here: it was built elsewhere")
    newest = max(BUILDS, key=lambda path: path.stat().st_mtime)
    return softdev_folders.calls(softdev_folders.symbols(newest.parents[2]))


def test_every_folder_has_a_rank() -> None:
    folders = {path.name for path in softdev_folders.DEVICE.iterdir() if path.is_dir()}
    assert folders == set(softdev_folders.RANKS) - {"softdev"}


def test_every_folder_has_an_interface() -> None:
    for folder in set(softdev_folders.RANKS) - {"softdev"}:
        assert (softdev_folders.DEVICE / folder / f"{folder}.h").is_file()


def test_calls_go_down(calls: dict[tuple[str, str], list[str]]) -> None:
    assert calls["cm", "wire"]  # the objects have been read
    assert not softdev_folders.calls_against_the_order(calls)


def test_a_call_up_is_found() -> None:
    wrong = softdev_folders.calls_against_the_order({("engine", "wire"): ["soft_link_close"]})
    assert wrong == ["engine calls soft_link_close of wire"]


def test_includes_go_down() -> None:
    assert not softdev_folders.includes_against_the_order()


@pytest.mark.parametrize("header", ["wire/wire.h", "rc/rc.h", "objects/frame.h", "missing.h"])
def test_an_include_up_or_of_an_inside_is_found(header: str, tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    source = tmp_path / "shm" / "ring.c"
    source.write_text(f'#include "objects/objects.h"\n#include "{header}"\n')
    assert softdev_folders.includes_against_the_order(tmp_path) == [f"shm/ring.c includes {header}"]
