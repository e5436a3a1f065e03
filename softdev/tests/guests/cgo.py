"""Row for Go with cgo.

It uses a program of this folder, because Debian 12 has no package that uses RDMA from Go.
"""

from __future__ import annotations

from collections.abc import Iterator

from .rows import Command, Row, Software

BUILD = "{here}/../../build/guests"
PROGRAM = f"{BUILD}/cgo"

SOFTWARE = Software(
    "Go",
    "golang-go",
    apt=("golang-go", "gcc", "libibverbs-dev"),
    build=f"env GOCACHE={BUILD}/go-cache go build -o {PROGRAM} {{here}}/programs/cgo/main.go",
    note="This is a cgo program with 16 goroutines, each of which has its own queue pair.",
)


def rows() -> Iterator[Row]:
    yield Row(
        SOFTWARE.name,
        "writes of 64 KiB",
        Command(PROGRAM),
        16 * 20 * 65536,
        says=r"(?m)^written$",
        quick=True,
    )
