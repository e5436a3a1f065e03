"""The duration of `import aiordma` in a new process, compared with that of its dependencies."""

from __future__ import annotations

import compileall
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiordma

from .lanes import Comparison, Contenders, Data, Lane, Options, Requirement, at_most, ratio, seconds

NOTE = """\
This test measures how long an import statement takes in a new process. `import aiordma`
loads only a table of names. A name's module is loaded when the program first uses the name.
`from aiordma import connect, listen` uses two names immediately, so it loads everything that a
connection needs."""

WORK = "import"
OURS, BASE = "import aiordma", "import asyncio, msgpack, cffi"
WHOLE = "from aiordma import connect, listen"


def lane(statement: str) -> Lane:
    program = (
        f"from time import perf_counter as now; start = now(); {statement}; print(now() - start)"
    )

    def do() -> float:
        return float(subprocess.check_output([sys.executable, "-c", program]))

    return Lane(WORK, statement, do)


def lanes(contenders: Contenders, options: Options) -> list[Lane]:
    # Compile aiordma in advance, as `pip install` does. If PYTHONDONTWRITEBYTECODE is set, Python
    # does not cache the bytecode, and every measured import would include the compilation.
    compileall.compile_dir(Path(aiordma.__file__).parent, quiet=1)
    return [lane(OURS), lane(WHOLE), lane(BASE)]


def requirements(data: Data) -> Iterator[Requirement]:
    base = seconds(data, WORK, BASE)
    for ours in (OURS, WHOLE):
        found = ratio(seconds(data, WORK, ours), base)
        yield at_most(f"`{ours}`: time relative to `{BASE}`", 1.5, found)


COMPARISON = Comparison(
    "Import",
    NOTE,
    lanes,
    requirements,
    "ms",
    lambda work, seconds: seconds * 1e3,
    OURS,
    caption="Import time in ms",
)
