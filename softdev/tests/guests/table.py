"""The matrix of real RDMA software from packages of Debian and PyPI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from . import cgo, engines, libfabric, mpi, storage, ucx, valkey
from .rows import Command, Row, Software

SOFTWARE = [
    Software("rdma-core utilities", "ibverbs-utils", apt=("ibverbs-utils", "rdmacm-utils")),
    Software(
        "perftest",
        "perftest",
        apt=("perftest", "qperf"),  # qperf provides the figures over TCP
        note="The table omits `ib_write_bw -e`, because perftest does not support events for "
        "writes. Also omitted are `--cqe-poll`, which was added in a later version, and "
        "`--run_infinitely`, which works but never exits.",
    ),
    Software(
        "qperf",
        "qperf",
        apt=("qperf",),
        note="Debian's build does not include the xrc tests. Without `-cm1`, qperf addresses "
        "its peer by LID without a GRH. RoCE cards reject such addresses. This device accepts "
        "them within a host, but not on RoCE links.",
    ),
    Software("uDAPL", "dapl2-utils", apt=("dapl2-utils", "libdapl2")),
    libfabric.SOFTWARE,
    ucx.SOFTWARE,
    mpi.OPEN_MPI,
    mpi.MPICH,
    engines.NIXL,
    engines.MOONCAKE,
    engines.IBVERBS,
    engines.INFINISTORE,
    cgo.SOFTWARE,
    storage.FIO,
    storage.ISER,
    valkey.VALKEY,
]

QPERF_FIGURE = r"= +([\d.]+) (?:ns|bytes|/sec)"
QPERF_OF_TCP = {
    "lat": Command(
        "qperf -lp {port} -t 1 -uu 127.0.0.1 tcp_lat",
        "qperf -lp {port}",
        QPERF_FIGURE,
        endless=True,
    ),
    "bw": Command(
        "qperf -lp {port} -t 1 -uu 127.0.0.1 tcp_bw", "qperf -lp {port}", QPERF_FIGURE, endless=True
    ),
}


def both(words: str, figure: str = "") -> Command:
    """Return a command whose client uses the server's command line followed by an address."""
    return Command(f"{words} 127.0.0.1", words, figure)


# ---- rdma-core's examples -----------------------------------------------------------------------


def utilities() -> Iterator[Row]:
    name = "rdma-core utilities"
    yield Row(
        name, "ibv_devinfo", Command("ibv_devinfo -v"), 0, says="hca_id:\tembedded0", quick=True
    )
    for kind in ("rc", "uc", "ud", "srq"):
        yield Row(
            name,
            f"ibv_{kind}_pingpong",
            both(
                f"ibv_{kind}_pingpong -g 0 -s 1024 -p {{port}} {{count}}", r"= ([\d.]+) usec/iter"
            ),
            2 * 100 * 1024,
            count=("-n 100", "-n 10000"),
            unit="us/iteration",
            quick=kind == "rc",
        )
    rping = "rping {side} -a 127.0.0.1 -p {{port}} -S 1000 {{count}} -v -V"
    yield Row(
        name,
        "rping",
        Command(rping.format(side="-c"), rping.format(side="-s")),
        100 * 1000,
        count=("-C 100", "-C 100"),
        says="ping data: rdma-ping-99",
        quick=True,
    )
    # udaddy always uses the same port.
    for program, options, port in (("ucmatose", "-p {port} ", 0), ("udaddy", "", 7174)):
        words = f"{program} {options}-C 100 -S 1000"
        yield Row(name, program, Command(f"{words} -s 127.0.0.1", words), 2 * 100 * 1000, port=port)
    yield Row(
        name,
        "rdma_client and rdma_server",
        Command("rdma_client -s 127.0.0.1 -p {port}", "rdma_server -p {port}"),
        2 * 16,
    )


# ---- perftest -----------------------------------------------------------------------------------

PERFTEST = [
    ("send", "-c RC"), ("write", "-c RC"), ("read", "-c RC"), ("atomic", ""),
    ("send", "-c UC"), ("write", "-c UC"), ("send", "-c UD"),
    ("send", "-R"), ("write", "-R"), ("read", "-R"), ("atomic", "-R"), ("send", "-c UD -R"),
    ("send", "-e"), ("read", "-e"), ("atomic", "-e"),
]  # fmt: skip
LATENCY = r"(?m)^ *\d+ +\d+ +[\d.]+ +[\d.]+ +([\d.]+)"  # t_typical
BANDWIDTH = r"(?m)^ *\d+ +\d+ +[\d.]+ +([\d.]+)"


def perftest() -> Iterator[Row]:
    for operation, options in PERFTEST:
        # qperf reports ns and bytes/s. perftest's MB is 2^20 bytes.
        for kind, pattern, unit, times in (
            ("lat", LATENCY, "us", 1e-3),
            ("bw", BANDWIDTH, "MB/s", 2**-20),
        ):
            over_tcp = replace(QPERF_OF_TCP[kind], times=times)
            program = f"ib_{operation}_{kind}"
            datagrams = " -s 1024" if "UD" in options else ""
            yield Row(
                "perftest",
                f"{program} {options}".strip(),
                both(f"{program} -p {{port}} -d embedded0 {options}{datagrams} {{count}}", pattern),
                # Latency tests transfer 2 bytes per iteration, and atomics transfer 8.
                100 * (2 if kind == "lat" and not datagrams else 8),
                count=("-n 100", "-n 100" if datagrams else "-n 2000"),
                unit=unit,
                tcp=None if program == "ib_atomic_bw" else over_tcp,
                quick=options in {"-c RC", ""},
            )
    # Options that change how work is posted or polled, each tested with ib_send_bw.
    for options in (
        "--use-srq -q 4", "-q 8", "-b", "-a", "-Q 1", "-l 8", "-I 0", "-m 4096 -s 1048576",
        "-N", "-D 1", "--reply_every 10",
    ):  # fmt: skip
        yield Row(
            "perftest",
            f"ib_send_bw {options}",
            both(f"ib_send_bw -p {{port}} -d embedded0 {options}"),
            100 * 1024,
        )


# ---- qperf --------------------------------------------------------------------------------------

QPERF = [
    "rc_bw", "rc_lat", "rc_bi_bw", "uc_bw", "uc_lat", "uc_bi_bw", "ud_bw", "ud_lat", "ud_bi_bw",
    "rc_rdma_read_bw", "rc_rdma_read_lat", "rc_rdma_write_bw", "rc_rdma_write_lat",
    "rc_rdma_write_poll_lat", "uc_rdma_write_bw", "uc_rdma_write_lat", "uc_rdma_write_poll_lat",
    "rc_compare_swap_mr", "rc_fetch_add_mr", "ver_rc_compare_swap", "ver_rc_fetch_add",
]  # fmt: skip


def qperf() -> Iterator[Row]:
    for test in QPERF:
        kind = "lat" if test.endswith("lat") else "bw"
        latency = kind == "lat"
        atomic = test.startswith(("ver", "rc_compare", "rc_fetch"))
        yield Row(
            "qperf",
            test,
            Command(
                f"qperf -lp {{port}} -t 1 -uu 127.0.0.1 {test}",
                "qperf -lp {port}",
                QPERF_FIGURE,
                endless=True,
            ),
            # A latency test transfers one byte at a time for a second. On a slow machine, the total
            # may be only a few bytes.
            2 if latency else 100,
            unit="ns" if latency else "/s" if atomic else "bytes/s",
            tcp=None if atomic else QPERF_OF_TCP[kind],
        )


# ---- uDAPL --------------------------------------------------------------------------------------


def udapl() -> Iterator[Row]:
    begin = "dapltest -T T -s 127.0.0.1 -D ofa-v2-cma -i 100 -t 1 -w 1"
    messages = "client SR 256 server SR 256"
    for name, operations, size in (
        ("messages", messages, 256),
        ("RDMA writes", f"client RW 65536 {messages}", 65536),
        ("RDMA reads", f"{messages} client RR 4096", 4096),
    ):
        yield Row(
            "uDAPL",
            f"dapltest, {name}",
            Command(f"{begin} {operations}", "dapltest -T S -D ofa-v2-cma", endless=True),
            100 * size,
            environment={"DAT_OVERRIDE": "{here}/dat.conf"},
            port=62000,
            says="Total Send",
            quick=name == "messages",
        )


TABLE = [
    *utilities(), *perftest(), *qperf(), *udapl(), *libfabric.rows(),
    *ucx.rows(), *mpi.rows(), *engines.rows(), *cgo.rows(), *storage.rows(),
    *valkey.rows(),
]  # fmt: skip
