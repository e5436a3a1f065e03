"""Lists which folder of the embedded device calls which, and fails on a call against the order.

    python -m tests.softdev_folders [BUILD]

The calls are those of the objects in BUILD (build/plain): what one folder's sources leave undefined
and another's define, functions and data alike. Calls through tables that a folder is given do not
count: that is what the tables are for. Includes are read from the sources: a folder includes of
another, lower one its interface and nothing else. docs/embedded-device.md has the rules.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
DEVICE = ROOT / "native" / "softdev"

RANKS = {
    "engine": 0,
    "trace": 1,
    "inject": 2,
    "objects": 3,
    "shm": 4,
    "rc": 4,
    "ud": 4,
    "wire": 5,
    "cm": 6,
    "softdev": 7,  # softdev.c, which puts the device together
}
"""From low to high; a folder calls those of lower rank, and none of its own rank but itself."""

READS = {("trace", "objects/objects.h")}
"""Includes against the order: the trace reads the objects' structures, and calls none of them."""

COMMON = {"softdev.h", "embedded.h", "abi/abi.h", "abi/calls.h"}
"""Headers outside the folders: the device's own calls and the ABI."""

INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


@dataclass
class Symbols:
    """Of one folder: what its objects define and what they need."""

    defined: set[str] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)


def symbols(build: Path) -> dict[str, Symbols]:
    """The symbols of each folder, from a build's objects, which are named FOLDER_SOURCE.c.o."""
    folders: defaultdict[str, Symbols] = defaultdict(Symbols)
    objects = sorted((build / "native" / "softdev" / "libdevice.a.p").glob("*.o"))
    if not objects:
        raise FileNotFoundError(f"no objects of the embedded device in {build}: make build")
    found = _nm(objects)
    for path in objects:
        folder = path.name.removesuffix(".c.o").split("_")[0]
        for source in (DEVICE / folder).glob("*.c"):
            if path.name == f"{folder}_{source.name}.o":
                break
        else:
            if path.name != "softdev.c.o":
                continue  # of a source that has another name now
        for kind, name in found[path.name]:
            if kind == "U":
                folders[folder].needed.add(name)
            elif kind.isupper():
                folders[folder].defined.add(name)
    return dict(folders)


def _nm(objects: list[Path]) -> defaultdict[str, list[tuple[str, str]]]:
    """The kind and name of each symbol, by the name of the object."""
    command = ["nm", "--extern-only", "--print-file-name", *map(str, objects)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for line in done.stdout.splitlines():
        path, _, symbol = line.rpartition(":")
        *_, kind, name = symbol.split()
        found[Path(path).name].append((kind, name))
    return found


def calls(folders: dict[str, Symbols]) -> dict[tuple[str, str], list[str]]:
    """What each folder calls in each other one."""
    return {
        (caller, callee): sorted(folders[caller].needed & folders[callee].defined)
        for caller, callee in product(folders, folders)
        if caller != callee
    }


def is_allowed(caller: str, callee: str) -> bool:
    """Whether the order lets one folder call, or include, another one."""
    return RANKS[callee] < RANKS[caller]


def calls_against_the_order(table: dict[tuple[str, str], list[str]]) -> list[str]:
    return [
        f"{caller} calls {name} of {callee}"
        for (caller, callee), names in table.items()
        for name in names
        if not is_allowed(caller, callee)
    ]


def includes_against_the_order(device: Path = DEVICE) -> list[str]:
    """Includes of a higher folder, or of another header than a folder's interface."""
    wrong = []
    for path in sorted(device.rglob("*.[ch]")):
        folder = path.parent.name if path.parent != device else "softdev"
        for name in INCLUDE.findall(path.read_text()):
            of, _, header = name.rpartition("/")
            if name in COMMON or (not of and (path.parent / name).is_file()):
                continue
            known = of in RANKS and header == f"{of}.h" and is_allowed(folder, of)
            if not known and (folder, name) not in READS:
                wrong.append(f"{path.relative_to(device)} includes {name}")
    return wrong


def main(build: str = "build/plain") -> int:
    table = calls(symbols(ROOT / build))
    names = sorted(RANKS, key=RANKS.__getitem__)
    shown = Table("calls", title="functions and data that each folder uses of each other one")
    for name in names[:-1]:
        shown.add_column(name, justify="right")
    for caller in names:
        numbers = (len(table.get((caller, callee), ())) for callee in names[:-1])
        shown.add_row(caller, *(f"{number}" if number else "" for number in numbers))
    Console().print(shown)
    wrong = calls_against_the_order(table) + includes_against_the_order()
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
