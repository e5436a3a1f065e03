"""Write the C source of `aiordma._native._lib` with cffi in API mode.

The program also writes the module's type stub and generated tables. meson runs the program
(meson.build), and the package never imports it. The headers in softdev/ and native/ are the only
source of declarations. cffi and the compiler read the same headers, so a wrong layout fails the
build instead of the program.
"""

import re
import sys
from contextlib import suppress
from pathlib import Path

from cffi import FFI

NATIVE = Path(__file__).parent
SOFTDEV = NATIVE.parent / "softdev"
PACKAGE = NATIVE.parent / "aiordma"
sys.path += str(NATIVE), str(PACKAGE / "_native")  # not on the path with PYTHONSAFEPATH

from enums import enums  # noqa: E402
from lib_stub import Stub  # noqa: E402

# Types from system headers, whose layout cffi learns from the compiler.
PRELUDE = """
typedef struct { ...; } pthread_mutex_t;
typedef struct { ...; } pthread_cond_t;
struct timespec { long tv_sec; long tv_nsec; ...; };
typedef int... socklen_t;
struct sockaddr { ...; };
struct sockaddr_in { ...; };
struct sockaddr_in6 { ...; };
struct sockaddr_storage { ...; };
"""

CALL = re.compile(
    r"^(?:CALL|OPTIONAL)\("
    r"(?P<library>\w+), (?P<result>.+?), (?P<name>\w+), (?P<arguments>\(.*\))\)$"
)


def calls_struct(name: str, header: str, *more: str) -> str:
    """Return the cffi declaration of a structure with a function pointer for each call.

    The calls are listed in `header`, which is the text of calls.h or provider_calls.h.
    """
    members = [match for line in header.splitlines() if (match := CALL.match(line))]
    if len(members) != sum(line.startswith(("CALL(", "OPTIONAL(")) for line in header.splitlines()):
        raise ValueError(f"cannot declare struct {name}: invalid CALL or OPTIONAL line")
    lines = (f"\t{m['result']}(*{m['name']}) {m['arguments']};" for m in members)
    return f"struct {name} {{\n" + "\n".join((*lines, *more)) + "\n};\n"


def declarations() -> str:
    """Return the C declarations that cffi makes available to Python."""
    abi = "".join((SOFTDEV / "abi" / name).read_text() for name in ABI)
    member = "\tconst struct aiordma_device_calls *device;"
    calls = calls_struct("aiordma_calls", (SOFTDEV / "abi" / "calls.h").read_text(), member)
    providers = (SOFTDEV / "abi" / "provider_calls.h").read_text()
    provider_calls = calls_struct("aiordma_provider_calls", providers)
    interface = (NATIVE / "verbs" / "interface.h").read_text()
    # cffi cannot parse preprocessor lines, so remove the include guard and the includes.
    device = (SOFTDEV / "src" / "embedded.h").read_text()
    return PRELUDE + abi + calls + provider_calls + interface + re.sub(r"(?m)^#.*\n", "", device)


ABI = ("verbs.h", "newer.h", "rdma_cma.h", "efadv.h", "mlx5dv.h", "device_calls.h")

ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source("aiordma._native._lib", '#include "verbs/boundary.h"\n#include "embedded.h"')
ffibuilder.emit_c_code(sys.argv[1])

STEP = re.compile(r"^QP_STEP\((\w+), (\w+), (\w+), ([^,]+),([^,]+)\)$", re.MULTILINE)


def steps() -> str:
    """Return Python source code for a table of queue pair state transitions.

    Queue pair types, states and attribute masks are written as numbers.
    """
    value: dict[str, int] = ffibuilder._parser._int_constants
    lines = ['"""The steps of abi/qp_states.h. Written by native/lib_source.py."""\n\nSTEPS = (\n']
    header = (SOFTDEV / "abi" / "qp_states.h").read_text()
    found = STEP.findall(header)
    if len(found) != header.count("\nQP_STEP("):
        raise ValueError("cannot parse qp_states.h: invalid QP_STEP line")
    for kind, *states, required, optional in found:
        numbers = [value[f"IBV_QPT_{kind}"], *(value[f"IBV_QPS_{it}"] for it in states)]
        for mask in required, optional:
            numbers.append(sum(value[it] for it in re.findall(r"IBV_QP_\w+", mask)))
        lines.append(f"    ({', '.join(map(str, numbers))}),\n")
    return "".join([*lines, ")\n"])


WRITTEN = {
    "_native/_lib.pyi": Stub(ffibuilder).text(),
    "verbs/_device/enums.py": "".join(
        enums(ffibuilder, (PACKAGE / "verbs/_device/enums.py.in").read_text())
    ),
    "_core/qp_steps.py": steps(),
}
for output, (place, text) in zip(sys.argv[2:], WRITTEN.items(), strict=True):
    Path(output).write_text(text)
    # In a checkout, type checkers look for stubs next to the sources, not in the build folder.
    if (NATIVE.parent / ".git").exists():
        with suppress(OSError):  # the checkout may be read-only
            (PACKAGE / place).write_text(text)
