"""Makes the folders that stand for those of the device in /sys and /dev: `aiordma run`.

Run by meson (meson.build): tree.h in, a folder out. A program that lists one of the device's
folders lists one of these; the files in them are empty and only give their names. Links are
folders here, because a wheel has no links.

Each device has folders of its own. Those that list the devices are there for each number of them:
``2/sys/class/infiniband`` for two.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = "/sys/devices/virtual/aiordma"
DEVICE = f"{ROOT}/embedded0"
ENTRY = re.compile(r'^(LINK|NODE|TEXT)\((DEVICE )?"([^"]+)"', re.MULTILINE)

STATE = Path(__file__).parents[1] / "src" / "objects" / "state.h"
DEVICES = int(re.findall(r"SOFT_HCAS_MOST = (\d+)", STATE.read_text())[0])

# Of a table with more entries a listing shows the first ones: each is a file in the wheel. Another
# device than the first one has a single GID.
LISTED = 32


def of_device(path: str, number: int) -> str:
    return path.replace("embedded0", f"embedded{number}").replace(
        "uverbs1000", f"uverbs{1000 + number}"
    )


def paths(header: str) -> Iterator[str]:
    """Files of the first device; in place of a link, one in a folder."""
    for kind, below_device, path in ENTRY.findall(Path(header).read_text()):
        whole = (DEVICE if below_device else "") + path
        yield f"{whole}/.link" if kind == "LINK" else whole


def files(header: str) -> Iterator[str]:
    for path in paths(header):
        is_listed = not path.startswith(ROOT)
        for number in range(DEVICES if of_device(path, 1) != path else 1):
            if is_listed:
                for count in range(number + 1, DEVICES + 1):
                    yield f"/{count}{of_device(path, number)}"
            else:
                for index in range(1 if number or "#" not in path else LISTED):
                    yield of_device(path, number).replace("#", str(index))
    for count in range(1, DEVICES + 1):
        for number in range(count):
            yield f"/{count}{ROOT}/embedded{number}/.link"


def main(header: str, folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name in files(header):
        file = Path(folder + name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


main(*sys.argv[1:])
