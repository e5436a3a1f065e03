"""Which C file may include which: Python's import rules (test_imports.py), for ``native``.

A folder of ``native`` includes its own headers and those of the folders in the table. The embedded
device's inner folders have a table of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).parents[1] / "native"
DEVICE = NATIVE / "softdev"

# Folder, or file of `native` itself -> folders whose headers it may include, besides its own.
FOLDERS: dict[str, set[str]] = {
    "abi": set(),
    "softdev": {"abi"},
    "verbs": {"abi"},
    "preload": {"softdev", "abi"},
}

# Python's, which only generated code needs, and those of the RDMA packages, which no build needs.
NOWHERE = ("Python.h", "infiniband/", "rdma/")

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


@dataclass(frozen=True)
class Include:
    """One line of a file: a header of ours, or one of the system."""

    own: str
    system: str


def sources() -> list[Path]:
    return sorted(path for path in NATIVE.rglob("*.[ch]"))


def folder_of(path: Path) -> str:
    return path.relative_to(NATIVE).parts[0]


def includes(path: Path) -> list[Include]:
    return [Include(*match.groups("")) for match in INCLUDE.finditer(path.read_text())]


def found(name: str, including: Path) -> Path | None:
    """The header as the compiler finds it: beside the file, then in meson's include directories."""
    for folder in (including.parent, NATIVE, DEVICE):
        if (header := (folder / name).resolve()).exists():
            return header
    return None


def test_folders_include_only_what_they_may() -> None:
    assert not [fault for path in sources() for fault in faults(path)]


def faults(path: Path) -> Iterator[str]:
    """What is wrong with the includes of a file."""
    folder = folder_of(path)
    assert folder in FOLDERS, (
        f"{path.name}: say in the table of this test what {folder} may include"
    )
    for include in includes(path):
        if include.own:
            header = found(include.own, path)
            if header is None:
                yield f"{path.name} includes {include.own}, which is not there"
            elif folder_of(header) not in {folder, *FOLDERS[folder]}:
                yield f"{path.name} includes {include.own}"
        elif include.system.startswith(NOWHERE):
            yield f"{path.name}: <{include.system}>"


def test_folders_form_no_cycle() -> None:
    left = dict(FOLDERS)
    while left:
        lowest = [folder for folder, below in left.items() if not below & set(left)]
        assert lowest, f"{', '.join(left)} include each other"
        for folder in lowest:
            del left[folder]
