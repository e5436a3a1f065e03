"""Writes what gives the embedded device the public names of libibverbs and librdmacm.

Run by meson (meson.build): calls.h in, a linker script and a version script out. The linker script
makes the public name of each call of calls.h another name for the device's function soft_NAME. The
version script exports the public names and nothing else; names without a version satisfy a program
that asks for any version.
"""

import re
import sys
from pathlib import Path

CALL = re.compile(r"^(?:CALL|OPTIONAL)\(\w+, .+?, (\w+), \(")


def main(header: str, script: str, versions: str) -> None:
    lines = Path(header).read_text().splitlines()
    names = [match[1] for line in lines if (match := CALL.match(line))]
    Path(script).write_text("".join(f"{name} = soft_{name};\n" for name in names))
    # What preload.c defines itself matches the patterns.
    exported = "; ".join([*names, "ibv_*", "rsocket"])
    Path(versions).write_text(f"{{ global: {exported}; local: *; }};\n")


main(*sys.argv[1:])
