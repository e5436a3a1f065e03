"""Create the directories that programs list in /sys and /dev under `aiordma run`.

meson runs this program (meson.build) with tree.h. A program that lists one of the device's
directories lists a directory created here instead. The files are empty because only their names
matter. Symbolic links are replaced with directories, because a wheel cannot contain links.

Each device has its own directories. Directories that list devices exist once for each number of
devices. For example, ``2/sys/class/infiniband`` lists two devices.
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
DEVICES = int(re.findall(r"SOFT_MAX_HCAS = (\d+)", STATE.read_text())[0])

# Maximum number of table entries listed in a directory, because each entry is a file in the wheel.
# Devices other than the first one have a single GID, so their directories list only one entry.
LISTED = 32


def of_device(path: str, number: int) -> str:
    """Return the path of another device's file for a path of the first device."""
    return path.replace("embedded0", f"embedded{number}").replace(
        "uverbs1000", f"uverbs{1000 + number}"
    )


def paths(header: str) -> Iterator[str]:
    """Generate the paths of the first device's files.

    A symbolic link is represented by a file named ``.link`` in a directory named after the link.
    """
    for kind, below_device, path in ENTRY.findall(Path(header).read_text()):
        whole = (DEVICE if below_device else "") + path
        yield f"{whole}/.link" if kind == "LINK" else whole


def files(header: str) -> Iterator[str]:
    """Generate the paths of the files to create, for every device and every number of devices."""
    for path in paths(header):
        lists_devices = not path.startswith(ROOT)
        for number in range(DEVICES if of_device(path, 1) != path else 1):
            if lists_devices:
                for device_count in range(number + 1, DEVICES + 1):
                    yield f"/{device_count}{of_device(path, number)}"
            else:
                for index in range(1 if number or "#" not in path else LISTED):
                    yield of_device(path, number).replace("#", str(index))
    # A device's own directory exists only once, so the listing of ROOT contains a link to it.
    for device_count in range(1, DEVICES + 1):
        for number in range(device_count):
            yield f"/{device_count}{ROOT}/embedded{number}/.link"


def main(header: str, folder: str) -> None:
    """Replace ``folder`` with the directories and empty files for the table in ``header``."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in files(header):
        file = Path(folder + name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


main(*sys.argv[1:])
