"""Write the linker scripts that make `aiordma run`'s library export rdma-core's symbols.

meson runs this program (meson.build) with exports.txt and calls.h. The program writes a linker
script, a version script for each of the two libraries, and C stubs for the missing calls. The
linker script makes each public name in calls.h an alias of the device's function soft_NAME. The
version scripts are for dlvsym(3), which finds only symbols with the right version. The dynamic
linker accepts an unversioned symbol for any version.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

CALL = re.compile(r"^(?:CALL|OPTIONAL)\(\w+, .+?, (\w+), \(", re.MULTILINE)
GROUP = re.compile(r"^(\w[\w.]*) (\w+):\n((?:    .*\n)+)", re.MULTILINE)

FORMS = {
    "null": ("void *", "return NULL;"),
    "minus": ("long ", "return -1;"),
    "errno": ("int ", "return EOPNOTSUPP;"),
    "void": ("void ", ""),
    "rsocket": ("long ", "return preload_refuse_rsocket();"),
}

# Provider libraries use private symbols of libibverbs. Their version contains a number that depends
# on the rdma-core release (IBVERBS_PRIVATE_34), as does the name of one function
# (verbs_register_driver_34). The ranges extend beyond the known releases, so that newer programs
# start and fail only when they call a missing function.
PRIVATE = range(13, 100)
LATER = {"IBVERBS_1": range(41), "RDMACM_1": range(21)}


def stub(name: str, form: str) -> str:
    result, ending = FORMS[form]
    return f"PUBLIC {result}{name}(void)\n{{\n\terrno = EOPNOTSUPP;\n\t{ending}\n}}\n"


def version_script(names: dict[str, list[str]]) -> str:
    """Return a linker version script with the symbols of each version."""
    return "".join(
        f"{version} {{ {'global: ' + '; '.join(of) + '; ' if of else ''}}};\n"
        for version, of in names.items()
    )


def main(table: str, header: str, script: str, verbs: str, cm: str, missing: str) -> None:
    calls = set(CALL.findall(Path(header).read_text()))
    versions: defaultdict[str, list[str]] = defaultdict(list)
    forms = {f"verbs_register_driver_{number}": "void" for number in PRIVATE}
    device = set()
    same: dict[str, str] = {}
    for version, how, names in GROUP.findall(Path(table).read_text()):
        if version not in ("PRIVATE", "LIBC"):
            versions[version] += names.split()
        if how == "device":
            device |= set(names.split())
        elif how == "same":
            same |= {name: name.replace("64", "") for name in names.split()}
        elif how != "here":
            forms |= dict.fromkeys(names.split(), how)
    if device != calls:
        sys.exit(f"{table} and {header} differ: {', '.join(sorted(device ^ calls))}")
    for prefix, numbers in LATER.items():
        for number in numbers:
            versions[f"{prefix}.{number}"]
    for number in PRIVATE:
        versions[f"IBVERBS_PRIVATE_{number}"]
    other_names = {name: f"soft_{name}" for name in sorted(calls)} | same
    Path(script).write_text("".join(f"{name} = {of};\n" for name, of in other_names.items()))
    Path(verbs).write_text(
        version_script(versions)
        # Hide the device's symbols and those added by coverage measurement. They are patterns
        # because LLVM's linker rejects names of missing symbols.
        + "AIORDMA { local: soft_*; aiordma_embedded_*; __gcov_*; mangle_path*; };\n"
    )
    Path(cm).write_text(version_script({it: [] for it in versions if it.startswith("RDMACM")}))
    stubs = "".join(stub(name, form) for name, form in sorted(forms.items()))
    Path(missing).write_text(f'#include <errno.h>\n\n#include "preload/preload.h"\n\n{stubs}')


main(*sys.argv[1:])
