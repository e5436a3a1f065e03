"""Check that `aiordma run` exports the names of a newer rdma-core. `make exports` runs this.

A program that is linked with a newer libibverbs or librdmacm does not start if one of its names is
missing. The names of the newer version come from the version scripts of its sources (`*.map`,
`*.map.in`), or from the symbols files of its Debian packages (`*.symbols`). Each argument is one of
these files, or a folder to search for them. Every name must be in softdev/preload/exports.txt with
its version.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "preload" / "exports.txt"

LIBRARIES = ("libibverbs", "librdmacm")
BLOCK = re.compile(r"^([\w@.]+) \{(.*?)\}", re.MULTILINE | re.DOTALL)
SYMBOL = re.compile(r"^ (\w+)@(\w[\w.]*) ", re.MULTILINE)

# Prefix of names that are not in exports.txt, because exports.py generates them for every version.
DRIVER = "verbs_register_driver_"


def table_of_exports() -> dict[str, tuple[str, str]]:
    """Map each exported name to its version and its implementation."""
    found: dict[str, tuple[str, str]] = {}
    for line in TABLE.read_text().splitlines():
        if match := re.match(r"(\w[\w.]*) (\w+):$", line):
            version, how = match.groups()
        elif line.startswith("    "):
            found |= dict.fromkeys(line.split(), (version, how))
    return found


def names_in(text: str) -> dict[str, set[str]]:
    """Map each name in a version script or symbols file to its versions."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for version, block in BLOCK.findall(re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)):
        for name in re.findall(r"(\w+)@?[\w@]*;", block.partition("local:")[0]):
            found[name].add(version)
    for name, version in SYMBOL.findall(text):
        found[name].add(version)
    return found


def missing(text: str) -> list[str]:
    """Return the names in `text` that we do not export, or export under another version."""
    ours = {name: version for name, (version, _) in table_of_exports().items()}
    wrong = []
    for name, versions in sorted(names_in(text).items()):
        wanted = {"PRIVATE" if "_PRIVATE_" in it else it for it in versions}
        if name.startswith(DRIVER) or ours.get(name) in wanted:
            continue
        there = f", here {ours[name]}" if name in ours else ""
        wrong.append(f"{name} ({' or '.join(sorted(wanted))}{there})")
    return wrong


def files_of(path: Path) -> list[Path]:
    """Return `path`, or the version scripts and symbols files of both libraries below it."""
    if not path.is_dir():
        return [path]
    return [
        found
        for library in LIBRARIES
        for pattern in (f"{library}.map", f"{library}.map.in", f"{library}1.symbols")
        for found in sorted(path.rglob(pattern))
    ]


def main(arguments: list[str]) -> None:
    files = [file for argument in arguments for file in files_of(Path(argument))]
    if not files:
        sys.exit(
            "no version script and no symbols file: make exports NEWER=FOLDER, with rdma-core's"
            " sources (git clone --depth 1 https://github.com/linux-rdma/rdma-core FOLDER)"
        )
    wrong = {file: missing(file.read_text()) for file in files}
    for file, names in wrong.items():
        print(f"{file}: {len(names_in(file.read_text()))} names, {len(names)} missing")
        for name in names:
            print(f"  {name}")
    if any(wrong.values()):
        sys.exit(f"{TABLE} lacks names: add each under its version, in the form of its call")


if __name__ == "__main__":
    main(sys.argv[1:])
