"""Rows for Open MPI over UCX and libfabric, and MPICH over UCX, with the tests of mpi4py."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import Command, Row, Software
from .ucx import OVER_RDMA, OVER_TCP

# Only the source distribution contains the test suite.
MPI4PY_TESTS = (
    "{venv}/bin/pip download --quiet --no-deps --no-binary mpi4py --dest {venv} mpi4py",
    "mkdir {venv}/source",
    "sh -c 'tar -xzf {venv}/mpi4py-*.gz -C {venv}/source --strip-components=1'",
)

LOCKS = "one-sided locks (test_util_sync)"
OPEN_MPI = Software(
    "Open MPI",
    "openmpi-bin",
    apt=("openmpi-bin",),
    pip=("mpi4py", "numpy"),
    then=MPI4PY_TESTS,
    note=f"The mpi4py rows exclude the following tests, which also fail over TCP: {LOCKS}, process "
    "creation (test_spawn), and dynamic windows.",
)
MPICH = Software(
    "MPICH",
    "mpich",
    apt=("mpich",),
    pip=("mpi4py", "numpy"),
    # mpi4py's wheel looks for libmpi.so.12, but Debian calls MPICH's library libmpich.so.12.
    then=(*MPI4PY_TESTS, "ln -s /usr/lib/x86_64-linux-gnu/libmpich.so.12 {venv}/lib/libmpi.so.12"),
    note=f"The mpi4py row excludes the tests of {LOCKS}, which also fail over TCP.",
)

# Without MPI4PY_RC_THREADS, mpi4py requests a thread level that Open MPI's osc pt2pt rejects.
ROOT_MAY = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "MPI4PY_RC_THREADS": "0",
}
# Reasons for the failures of mpi4py's tests, by Open MPI configuration.
FAILS = {
    "ofi": "libfabric's rxm crashes when Open MPI starts a persistent request without data, "
    "because rxm copies from a null pointer (stack: mca_pml_cm_start, mca_mtl_ofi, libfabric, "
    "memcpy)."
}
MPIRUN = "mpirun.openmpi --oversubscribe -np 2"
OMPI_OVER = {
    "ucx": ("--mca pml ucx --mca osc ucx", OVER_RDMA),
    "ofi": (
        "--mca pml cm --mca mtl ofi --mca mtl_ofi_provider_include 'verbs;ofi_rxm' --mca osc pt2pt",
        {},
    ),
}
MPI4PY_SUITE = "{python} -W ignore {venv}/source/test/main.py -f"
# Tests that also fail without the device:
# - util_sync: A rank waits for an accumulate that requires the other rank to call MPI, but the
#   other rank sleeps until its memory changes.
# - spawn: The child waits in PMIx_Init, and its parents wait in PMIx_Lookup.
# - TestWinCreateDynamic: ompi_osc_ucx_free crashes in ucp_mem_unmap.
MPICH_WITHOUT = "-e util_sync"
OMPI_WITHOUT = f"{MPICH_WITHOUT} -e spawn -x TestWinCreateDynamic"
# The time limit for 2,000 tests, in seconds. The ranks poll constantly, so the tests are slow on a
# busy machine.
SUITE_LIMIT = 1200
MPI_PAIR = "{python} {here}/programs/mpi_pair.py"
MPI_FIGURE = r"([\d.]+) MiB/s"
# The minimum number of bytes that RDMA must carry. Each of the two ranks sends smaller messages and
# 100 messages of 1 MiB.
MPI_BYTES = 2 * 100 << 20


def open_mpi() -> Iterator[Row]:
    over_tcp = Command(
        f"{MPIRUN} --mca pml ob1 --mca btl tcp,self --mca osc pt2pt {MPI_PAIR}", "", MPI_FIGURE
    )
    for name, (options, environment) in OMPI_OVER.items():
        yield Row(
            "Open MPI",
            f"two ranks over {name}",
            Command(f"{MPIRUN} {options} {MPI_PAIR}", "", MPI_FIGURE),
            MPI_BYTES,
            unit="MiB/s each way",
            environment={**ROOT_MAY, **environment},
            tcp=over_tcp,
            tcp_environment=ROOT_MAY,
            quick=name == "ucx",
        )
        yield Row(
            "Open MPI",
            f"mpi4py's tests over {name}",
            Command(f"{MPIRUN} {options} {MPI4PY_SUITE} {OMPI_WITHOUT}"),
            1 << 20,
            environment={**ROOT_MAY, **environment},
            says=r"(?m)^OK\b",
            fails=dict.fromkeys(("shared", "tcp"), FAILS[name]) if name in FAILS else {},
            limit=SUITE_LIMIT,
        )


def mpich() -> Iterator[Row]:
    found = {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": "{venv}/lib"}
    pair = Command(f"mpirun.mpich -np 2 {MPI_PAIR}", "", MPI_FIGURE)
    yield Row(
        "MPICH",
        "two ranks over UCX",
        pair,
        MPI_BYTES,
        unit="MiB/s each way",
        environment={**OVER_RDMA, **found},
        tcp=pair,
        tcp_environment={**OVER_TCP, **found},
    )
    yield Row(
        "MPICH",
        "mpi4py's tests",
        Command(f"mpirun.mpich -np 2 {MPI4PY_SUITE} {MPICH_WITHOUT}"),
        1 << 20,
        environment={**OVER_RDMA, **found},
        says=r"(?m)^OK\b",
        limit=SUITE_LIMIT,
    )


def rows() -> Iterator[Row]:
    yield from open_mpi()
    yield from mpich()
