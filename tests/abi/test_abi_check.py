"""The ABI check is able to fail: it reports each kind of mistake a header can have."""

import re
import shutil
from pathlib import Path

import pytest

from .abi_check import DISTRIBUTION, NATIVE, Report, compare_calls, compare_layout

# A mistake: the file, what to replace, by what, and what the report must name.
LAYOUT_MISTAKES = {
    "two fields swapped": (
        "verbs.h",
        r"(\tuint32_t lkey;\n)(\tuint32_t rkey;\n)",
        r"\2\1",
        "struct ibv_mr.lkey offset",
    ),
    "two fields of a nameless structure swapped": (
        "verbs.h",
        r"(\t+uint64_t compare_add;\n)(\t+uint64_t swap;\n)",
        r"\2\1",
        "struct ibv_send_wr.wr.atomic.swap offset",
    ),
    "a field left out": (
        "rdma_cma.h",
        r"\tuint8_t flow_control;\n",
        "",
        "struct rdma_conn_param.retry_count offset",
    ),
    "a last field left out": (
        "verbs.h",
        r"\tuint32_t rate_limit;\n",
        "",
        "struct ibv_qp_attr size",
    ),
    "a field of another width": (
        "verbs.h",
        r"\tuint16_t lid;",
        "\tuint32_t lid;",
        "struct ibv_port_attr.lid offset",
    ),
    "a field of another sign": (
        "verbs.h",
        r"\tint gid_tbl_len;",
        "\tunsigned int gid_tbl_len;",
        "struct ibv_port_attr.gid_tbl_len unsigned",
    ),
    "an integer for a pointer": (
        "verbs.h",
        r"\tvoid \*cq_context;",
        "\tuint64_t cq_context;",
        "struct ibv_cq.cq_context offset",
    ),
    "a flag of another value": (
        "verbs.h",
        r"IBV_SEND_SIGNALED = 1 << 1",
        "IBV_SEND_SIGNALED = 1 << 5",
        "IBV_SEND_SIGNALED = 32",
    ),
    "an enumerator left out": (
        "verbs.h",
        r"\tIBV_WC_LOC_EEC_OP_ERR,\n",
        "",
        "IBV_WC_LOC_PROT_ERR = 3",
    ),
    "a field that only we have": (
        "verbs.h",
        r"\tuint32_t handle;",
        "\tuint32_t handel;",
        "has no member named 'handel'",
    ),
    "a constant that only we have": (
        "verbs.h",
        r"IBV_WC_GRH = ",
        "IBV_WC_HRG = ",
        "'IBV_WC_HRG' undeclared",
    ),
    "a define that only we have": (
        "rdma_cma.h",
        r"\A",
        "#define RDMA_FANTASY 7\n",
        "'RDMA_FANTASY' undeclared",
    ),
}

CALL_MISTAKES = {
    "another argument": (r"int \*num_devices", "unsigned *num_devices", "ibv_get_device_list"),
    "another result": (r"uint16_t, rdma_get_src_port", "int, rdma_get_src_port", "rdma_get_src"),
    "an argument left out": (r"\bint cqe, void", "void", "ibv_create_cq"),
    "no such call": (r"\bibv_alloc_pd\b", "ibv_alloc_pdd", "libibverbs.so.1: no ibv_alloc_pdd"),
    "the wrong library": (r"cm, int, rdma_listen", "verbs, int, rdma_listen", "no rdma_listen"),
}


# Two mistakes in one structure or enumeration, and what the compiler refuses, are each apart.
TOGETHER = [
    [
        "two fields swapped",
        "two fields of a nameless structure swapped",
        "a field left out",
        "a last field left out",
        "a field of another width",
        "an integer for a pointer",
        "a flag of another value",
        "an enumerator left out",
    ],
    ["a field of another sign"],
    ["a field that only we have", "a constant that only we have", "a define that only we have"],
]


def mistaken(folder: Path, *mistakes: tuple[str, str, str]) -> Path:
    """A copy of native/ with the first match of a pattern in a file replaced, for each mistake."""
    native = folder / "native"
    shutil.copytree(NATIVE, native)
    for name, pattern, replacement in mistakes:
        path = native / "abi" / name
        text, count = re.subn(pattern, replacement, path.read_text(), count=1)
        assert count == 1, f"{name} has nothing like {pattern!r} any more: change this test"
        path.write_text(text)
    return native


def assert_reports(report: Report, expected: str) -> None:
    # The C locale's quotation marks, whatever the compiler's are.
    faults = "\n".join(report.faults).replace("\N{LEFT SINGLE QUOTATION MARK}", "'")
    assert expected in faults.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")


@pytest.fixture
def distribution() -> str:
    """Declarations of the distribution, where they are installed; `make abi` sees to that."""
    if not Path("/usr/include/rdma/rdma_cma.h").exists():
        pytest.skip("libibverbs-dev and librdmacm-dev are not installed (make abi needs them)")
    return DISTRIBUTION


def test_a_header_agrees_with_itself(tmp_path: Path) -> None:
    report = compare_layout(NATIVE, f'#include "{NATIVE}/abi/abi.h"\n', tmp_path)
    assert report.faults == []
    assert report.facts > 500


@pytest.mark.parametrize("mistakes", TOGETHER, ids=lambda mistakes: mistakes[0])
def test_a_mistake_in_the_layout_is_reported(mistakes: list[str], tmp_path: Path) -> None:
    native = mistaken(tmp_path, *(LAYOUT_MISTAKES[mistake][:3] for mistake in mistakes))
    report = compare_layout(native, f'#include "{NATIVE}/abi/abi.h"\n', tmp_path)
    for mistake in mistakes:
        assert_reports(report, LAYOUT_MISTAKES[mistake][3])


def test_every_mistake_is_tried() -> None:
    tried = [mistake for mistakes in TOGETHER for mistake in mistakes]
    assert sorted(tried) == sorted(LAYOUT_MISTAKES)


@pytest.mark.parametrize("mistake", ["two fields swapped", "a field that only we have"])
def test_against_the_distribution_too(mistake: str, distribution: str, tmp_path: Path) -> None:
    name, pattern, replacement, expected = LAYOUT_MISTAKES[mistake]
    native = mistaken(tmp_path, (name, pattern, replacement))
    assert_reports(compare_layout(native, distribution, tmp_path), expected)


@pytest.mark.parametrize("mistake", CALL_MISTAKES)
def test_a_mistake_in_the_calls_is_reported(
    mistake: str, distribution: str, tmp_path: Path
) -> None:
    pattern, replacement, expected = CALL_MISTAKES[mistake]
    native = mistaken(tmp_path, ("calls.h", pattern, replacement))
    assert_reports(compare_calls(native, distribution, tmp_path), expected)
