"""Tests of which C file may include which, as test_imports.py does for Python.

A C file may include the headers of its own folder and of the folders in the table. The inner
folders of the embedded device have ranks (``softdev/src/softdev.h``). A folder includes only the
interface of a lower one. Its objects use no function or variable of a higher one, however that is
declared. Calls through tables that a folder is given do not count.

The device's state is in ``soft_device``. Its objects have no other variables, apart from a list in
this file.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DEVICE = ROOT / "softdev" / "src"

# For each folder of C code: the other folders whose headers it may include.
FOLDERS: dict[str, set[str]] = {
    "softdev/abi": set(),
    "softdev/src": {"softdev/abi"},
    "native/verbs": {"softdev/abi"},
    "softdev/preload": {"softdev/src", "softdev/abi"},
}

# The ranks of the device's folders. A folder may use only lower ones. `softdev` contains the files
# that combine them.
RANKS = {"engine": 0, "trace": 1, "inject": 2, "objects": 3, "path": 4, "rc": 5, "ud": 5}
RANKS |= {"shm": 5, "tcp": 5, "roce": 5, "link": 6, "cm": 7, "softdev": 8, "sim": 9}

# Headers outside the device's folders, and one exception to the order. The trace reads the
# structures of the objects but calls none of their functions.
COMMON = {"softdev.h", "embedded.h", "abi/abi.h", "abi/calls.h", "abi/qp_states.h"}
EXCEPTION = ("trace", "objects/objects.h")

# The global variables that each device folder may define. All other state is in `soft_device`.
VARIABLES = {
    "engine": {"soft_device", "guarded"},  # pthread_atfork handlers exist once per process
    "shm": {"soft_copy_avoids_movsb"},  # a property of the processor
    "roce": {"crc_tables"},  # the CRC's tables
    "sim": {"sim"},  # all simulated hosts
}

# Headers that no source file may include. Only generated code uses Python.h, and builds must not
# need the headers of RDMA packages.
NOWHERE = ("Python.h", "infiniband/", "rdma/")

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def folder_of(path: Path) -> str:
    return "/".join(path.relative_to(ROOT).parts[:2])


def rank_folder(path: Path) -> str:
    """Return the device folder that contains a file."""
    return path.parent.name if path.parent != DEVICE else "softdev"


def found(name: str, including: Path) -> Path | None:
    """Return the header that the compiler finds, or None. The includer's folder comes first."""
    paths = (
        (folder / name).resolve()
        for folder in (including.parent, ROOT / "native", DEVICE.parent, DEVICE)
    )
    return next((path for path in paths if path.exists()), None)


def faults(path: Path) -> Iterator[str]:
    """Yield the forbidden includes of a file."""
    folder = folder_of(path)
    assert folder in FOLDERS, f"{path.name}: say in the table what {folder} may include"
    for own, system in INCLUDE.findall(path.read_text()):
        header = found(own, path) if own else None
        if system.startswith(NOWHERE):
            yield f"{path.name}: <{system}>"
        elif own and (not header or folder_of(header) not in {folder, *FOLDERS[folder]}):
            yield f"{path.name} includes {own}"
        elif (
            header
            and folder == "softdev/src"
            and own not in COMMON
            and header.parent != path.parent
        ):
            here, of = rank_folder(path), rank_folder(header)
            is_interface = header.name == f"{of}.h" and RANKS[of] < RANKS[here]
            if not is_interface and (here, own) != EXCEPTION:
                yield f"{path.name} includes {own}"


def test_device_sources_include_only_allowed_folders() -> None:
    assert not [
        fault
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.[ch]")
        for fault in faults(path)
    ]


def test_allowed_folder_includes_are_acyclic() -> None:
    TopologicalSorter(FOLDERS).prepare()


def symbols(*options: str) -> Iterator[tuple[str, str]]:
    """Yield the folder and the output of nm for each object file of the newest build."""
    builds = (ROOT / "build").glob("*/softdev/src/libdevice.a.p")
    newest = max(builds, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        pytest.skip("there are no objects of the device here: it was built elsewhere")
    for source in DEVICE.rglob("*.c"):
        name = "_".join(source.relative_to(DEVICE).parts)
        command = ["nm", *options, str(newest / f"{name}.o")]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        yield rank_folder(source), done.stdout


def test_device_functions_call_only_lower_layers() -> None:
    defined: dict[str, str] = {}
    needed: defaultdict[str, set[str]] = defaultdict(set)
    for folder, lines in symbols("--extern-only", "--format=posix"):
        for symbol, kind in re.findall(r"^(\S+) (\w)\b", lines, re.MULTILINE):
            if kind == "U":
                needed[folder].add(symbol)
            elif kind.isupper():
                defined[symbol] = folder
    calls = {
        (caller, symbol, defined[symbol])
        for caller, symbols in needed.items()
        for symbol in symbols & defined.keys()
        if defined[symbol] != caller
    }
    assert len(calls) > 100
    clocks = {"clock_gettime", "gettimeofday", "time"}
    assert {folder for folder in needed if needed[folder] & clocks} == {"engine"}  # soft_platform
    assert not [call for call in calls if RANKS[call[2]] >= RANKS[call[0]]]


def test_global_state_is_limited_to_known_variables() -> None:
    # For a static variable inside a function, GCC emits the symbol `name.0`, and clang emits
    # `function.name`. Names that start with __ belong to the compiler.
    variable = r"^(?!__)(?:\w+\.)??(\w+?)(?:\.\d+)? *\|.*\|\.(?:data(?!\.rel\.ro)|bss)"
    found: defaultdict[str, set[str]] = defaultdict(set)
    for folder, lines in symbols("--format=sysv"):
        if names := re.findall(variable, lines, re.MULTILINE):
            found[folder].update(names)
    assert found == VARIABLES
