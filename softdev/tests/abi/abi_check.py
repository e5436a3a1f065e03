"""Compare our ABI header with the distribution's. `make abi` runs this program.

Our header (softdev/abi/) is written by hand so that building needs no RDMA package. A program that
prints every size, offset and constant named in our header is compiled against both headers, and the
two outputs must be the same. Every call of softdev/abi/calls.h and provider_calls.h is declared
again after the distribution's headers, so that the compiler rejects different types. Each call must
also exist in the real libraries.

Constants that some distributions do not have yet are compared where the headers declare them.

Our header is a subset of the ABI, so the distribution may declare more. A missing field still shows
up as a different offset or size.
"""

import difflib
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .abi_layout import CompileError, build, preprocessed, program, run

SOFTDEV = Path(__file__).resolve().parents[2]

# Constants added in rdma-core 45, which the headers of Debian 12 lack.
NEWER = (
    "IBV_ODP_SUPPORT_FLUSH",
    "IBV_WC_FLUSH",
    "IBV_ACCESS_FLUSH_GLOBAL",
    "IBV_ACCESS_FLUSH_PERSISTENT",
    "IBV_QP_EX_WITH_FLUSH",
    "IBV_WR_FLUSH",
)

HEADERS = ("verbs.h", "rdma_cma.h", "efadv.h", "mlx5dv.h")
OURS = '#include "abi/abi.h"\n'

# The kernel's __be64 is unsigned long long, but uint64_t is unsigned long. The ABI is the same, but
# the compiler treats them as different types.
DISTRIBUTION = """
#include <stdint.h>
#include <linux/types.h>
#define __be64 uint64_t
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <infiniband/efadv.h>
#include <infiniband/mlx5dv.h>
"""

# The headers also define some calls as function-like macros. A name in parentheses is not expanded.
CALLS = """
#include <dlfcn.h>
#include <stdio.h>

#define CALL(library, result, name, arguments) result(name) arguments;
#include "calls.h"
#define OPTIONAL CALL
#include "provider_calls.h"
#undef CALL

static void lookup(const char *soname, const char *name)
{
	void *library = dlopen(soname, RTLD_NOW);

	if (!library || !dlsym(library, name))
		printf("%s: no %s\\n", soname, name);
}

int main(void)
{
#define verbs "libibverbs.so.1"
#define cm "librdmacm.so.1"
#define efa "libefa.so.1"
#define mlx5 "libmlx5.so.1"
#define CALL(library, result, name, arguments) lookup(library, #name);
#include "calls.h"
#define OPTIONAL CALL
#include "provider_calls.h"
	return 0;
}
"""


@dataclass(frozen=True)
class Report:
    """The number of facts compared, and a message for each disagreement."""

    facts: int
    faults: list[str]


def compare_layout(device: Path, reference: str, folder: Path) -> Report:
    """Compare the ABI header of `device` with the declarations that `reference` includes."""
    declared = preprocessed(reference)
    newer = {name for name in NEWER if not re.search(rf"\b{name}\b", declared)}
    source = program([device / "abi" / name for name in HEADERS], without=newer)
    ours = run(build(OURS + source, folder / "ours", [f"-I{device}"]))
    try:
        theirs = run(build(reference + source, folder / "theirs", []))
    except CompileError as error:
        return Report(len(ours), [str(error)])
    differences = difflib.unified_diff(theirs, ours, "reference", "ours", lineterm="", n=0)
    return Report(len(ours), list(differences))


def compare_calls(device: Path, reference: str, folder: Path) -> Report:
    """Compare our prototypes with `reference`, and check that the libraries export the calls."""
    lists = ("calls.h", "provider_calls.h")
    lines = [line for name in lists for line in (device / "abi" / name).read_text().splitlines()]
    calls = sum(line.startswith(("CALL(", "OPTIONAL(")) for line in lines)
    try:
        found = build(reference + CALLS, folder / "calls", [f"-I{device / 'abi'}", "-ldl"])
    except CompileError as error:
        return Report(calls, [str(error)])
    return Report(calls, run(found))


def main() -> int:
    if not Path("/usr/include/rdma/rdma_cma.h").exists():
        print("abi: no headers to compare with: apt-get install libibverbs-dev librdmacm-dev")
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        layout = compare_layout(SOFTDEV, DISTRIBUTION, folder)
        calls = compare_calls(SOFTDEV, DISTRIBUTION, folder)
    faults = layout.faults + calls.faults
    for fault in faults:
        print(fault)
    verdict = "differ: see above" if faults else "agree"
    print(f"abi: {layout.facts} facts and {calls.facts} calls {verdict}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
