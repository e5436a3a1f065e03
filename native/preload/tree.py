"""Makes the folders that stand for those of the device in /sys and /dev: `aiordma run`.

Run by meson (meson.build): tree.h in, a folder out. A program that lists one of the device's
folders lists one of these; the files in them are empty and only give their names. Links are
folders here, because a wheel has no links.
"""

import re
import shutil
import sys
from pathlib import Path

DEVICE = "/sys/devices/virtual/aiordma/embedded0"
ENTRY = re.compile(r'^(LINK|NODE|TEXT)\((DEVICE )?"([^"]+)"', re.MULTILINE)

# Of a table with more entries a listing shows the first ones: each is a file in the wheel.
LISTED = 32


def main(header: str, folder: str) -> None:
    top = Path(folder)
    shutil.rmtree(top, ignore_errors=True)
    for kind, below_device, path in ENTRY.findall(Path(header).read_text()):
        whole = str(top) + (DEVICE if below_device else "") + path
        name = f"{whole}/.link" if kind == "LINK" else whole
        for index in range(LISTED if name.endswith("#") else 1):
            file = Path(name.replace("#", str(index)))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()


main(*sys.argv[1:])
