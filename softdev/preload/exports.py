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
    """Return a C function that fails with EOPNOTSUPP, with a result of the given form."""
    result, ending = FORMS[form]
    return f"PUBLIC {result}{name}(void)\n{{\n\terrno = EOPNOTSUPP;\n\t{ending}\n}}\n"


def version_script(names: dict[str, list[str]]) -> str:
    """Return a linker version script with the symbols of each version."""
    return "".join(
        f"{version} {{ {'global: ' + '; '.join(symbols) + '; ' if symbols else ''}}};\n"
        for version, symbols in names.items()
    )


def main(table: str, header: str, script: str, verbs: str, cm: str, missing: str) -> None:
    """Write the linker script, the two version scripts and the stubs of the missing calls.

    Args:
        table: The path of exports.txt, which lists the symbols and how each is implemented.
        header: The path of calls.h, which must declare the calls implemented by the device.
        script: The path of the linker script to write.
        verbs: The path of libibverbs's version script to write.
        cm: The path of librdmacm's version script to write.
        missing: The path of the C file to write with the stubs.
    """
    calls = set(CALL.findall(Path(header).read_text()))
    versions: defaultdict[str, list[str]] = defaultdict(list)
    forms = {f"verbs_register_driver_{number}": "void" for number in PRIVATE}
    device_calls = set()
    aliases_without_64: dict[str, str] = {}
    for version, implementation, names in GROUP.findall(Path(table).read_text()):
        if version not in ("PRIVATE", "LIBC"):
            versions[version] += names.split()
        if implementation == "device":
            device_calls |= set(names.split())
        elif implementation == "same":
            aliases_without_64 |= {name: name.replace("64", "") for name in names.split()}
        elif implementation != "here":  # a missing call, for which the table has the result's form
            forms |= dict.fromkeys(names.split(), implementation)
    if device_calls != calls:
        sys.exit(f"{table} and {header} differ: {', '.join(sorted(device_calls ^ calls))}")
    # Reading the defaultdict adds the versions that have no symbols here.
    for prefix, numbers in LATER.items():
        for number in numbers:
            versions[f"{prefix}.{number}"]
    for number in PRIVATE:
        versions[f"IBVERBS_PRIVATE_{number}"]
    aliases = {name: f"soft_{name}" for name in sorted(calls)} | aliases_without_64
    Path(script).write_text("".join(f"{name} = {target};\n" for name, target in aliases.items()))
    Path(verbs).write_text(
        version_script(versions)
        # Hide the device's symbols and those added by coverage measurement. They are patterns
        # because LLVM's linker rejects names of missing symbols.
        + "AIORDMA { local: soft_*; aiordma_embedded_*; __gcov_*; mangle_path*; };\n"
    )
    cm_versions: dict[str, list[str]] = {name: [] for name in versions if name.startswith("RDMACM")}
    Path(cm).write_text(version_script(cm_versions))
    stubs = "".join(stub(name, form) for name, form in sorted(forms.items()))
    Path(missing).write_text(f'#include <errno.h>\n\n#include "preload/preload.h"\n\n{stubs}')


main(*sys.argv[1:])
