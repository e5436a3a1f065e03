"""The check of a wheel by `make package` and `make wheel` finds what is wrong with one."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.package import MACHINES, NEEDED, check

MODULE = "_datapath/frames.cpython-311-aarch64-linux-gnu.so"


def wheel(folder: Path, *names: str, elf: str = "aarch64") -> Path:
    """A wheel for aarch64 with these files of the package, compiled for the machine ``elf``."""
    path = folder / "aiordma-0.1.0-cp311-cp311-manylinux_2_28_aarch64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(f"aiordma/{name}", bytes(18) + MACHINES[elf].to_bytes(2, "little"))
    return path


def test_a_good_wheel(tmp_path: Path) -> None:
    check(wheel(tmp_path, *NEEDED, MODULE))


@pytest.mark.parametrize(
    ("names", "elf", "message"),
    [
        (NEEDED[1:], "aarch64", "lacks: py.typed"),
        ([*NEEDED, "_datapath/frames.pxd"], "aarch64", r"not need: aiordma/_datapath/frames\.pxd"),
        (NEEDED, "x86_64", r"not for aarch64: .*libibverbs\.so\.1"),
        ([*NEEDED, MODULE.replace("aarch64", "x86_64")], "aarch64", "not for aarch64: .*frames"),
    ],
)
def test_a_bad_wheel(tmp_path: Path, names: list[str], elf: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        check(wheel(tmp_path, *names, elf=elf))
