"""The ABI check is able to fail: it reports each kind of mistake a header can have."""

import re
import shutil
from pathlib import Path

import pytest

from .abi_check import DISTRIBUTION, SOFTDEV, Report, compare_calls, compare_layout

# Mistakes: the file, what to replace, by what, and what the report must name. A sign is seen only
# where the rest agrees, and what the compiler refuses comes before all, so they are apart.
LAYOUT_MISTAKES = {
    "layout": [
        ("verbs.h", r"(\tuint32_t lkey;\n)(\tuint32_t rkey;\n)", r"\2\1", "ibv_mr.lkey offset"),
        ("verbs.h", r"(\t+\w+ compare_add;\n)(\t+\w+ swap;\n)", r"\2\1", "wr.atomic.swap offset"),
        ("rdma_cma.h", r"\tuint8_t flow_control;\n", "", "rdma_conn_param.retry_count offset"),
        ("verbs.h", r"\tuint32_t rate_limit;\n", "", "struct ibv_qp_attr size"),
        ("verbs.h", r"\tuint16_t lid;", "\tuint32_t lid;", "struct ibv_port_attr.lid offset"),
        ("verbs.h", r"\tvoid \*cq_context;", "\tuint64_t cq_context;", "ibv_cq.cq_context offset"),
        ("verbs.h", "SEND_SIGNALED = 1 << 1", "SEND_SIGNALED = 1 << 5", "SEND_SIGNALED = 32"),
        ("verbs.h", r"\tIBV_WC_LOC_EEC_OP_ERR,\n", "", "IBV_WC_LOC_PROT_ERR = 3"),
    ],
    "sign": [("verbs.h", r"\tint gid_tbl_len", "\tunsigned int gid_tbl_len", "tbl_len unsigned")],
    "names": [
        ("verbs.h", r"\tuint32_t handle;", "\tuint32_t handel;", "has no member named 'handel'"),
        ("verbs.h", r"IBV_WC_GRH = ", "IBV_WC_HRG = ", "'IBV_WC_HRG' undeclared"),
        ("rdma_cma.h", r"\A", "#define RDMA_FANTASY 7\n", "'RDMA_FANTASY' undeclared"),
    ],
}

CALL_MISTAKES = {
    "another argument": (r"int \*num_devices", "unsigned *num_devices", "ibv_get_device_list"),
    "another result": (r"uint16_t, rdma_get_src_port", "int, rdma_get_src_port", "rdma_get_src"),
    "an argument left out": (r"\bint cqe, void", "void", "ibv_create_cq"),
    "no such call": (r"\bibv_alloc_pd\b", "ibv_alloc_pdd", "libibverbs.so.1: no ibv_alloc_pdd"),
    "the wrong library": (r"cm, int, rdma_listen", "verbs, int, rdma_listen", "no rdma_listen"),
}


def mistaken(folder: Path, *mistakes: tuple[str, str, str]) -> Path:
    """A copy of the headers with the first match of a pattern in one replaced, for each mistake."""
    device = folder / "softdev"
    shutil.copytree(SOFTDEV / "abi", device / "abi")
    for name, pattern, replacement in mistakes:
        path = device / "abi" / name
        text, count = re.subn(pattern, replacement, path.read_text(), count=1)
        assert count == 1, f"{name} has nothing like {pattern!r} any more: change this test"
        path.write_text(text)
    return device


def assert_reports(report: Report, expected: str) -> None:
    # The C locale's quotation marks, whatever the compiler's are.
    faults = "\n".join(report.faults).replace("\N{LEFT SINGLE QUOTATION MARK}", "'")
    assert expected in faults.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")


def test_a_header_agrees_with_itself(tmp_path: Path) -> None:
    report = compare_layout(SOFTDEV, f'#include "{SOFTDEV}/abi/abi.h"\n', tmp_path)
    assert report.faults == []
    assert report.facts > 500


@pytest.mark.parametrize("mistakes", LAYOUT_MISTAKES)
def test_a_mistake_in_the_layout_is_reported(mistakes: str, tmp_path: Path) -> None:
    device = mistaken(tmp_path, *(mistake[:3] for mistake in LAYOUT_MISTAKES[mistakes]))
    report = compare_layout(device, f'#include "{SOFTDEV}/abi/abi.h"\n', tmp_path)
    for *_, expected in LAYOUT_MISTAKES[mistakes]:
        assert_reports(report, expected)


@pytest.mark.parametrize("mistake", CALL_MISTAKES)
def test_a_mistake_in_the_calls_is_reported(mistake: str, tmp_path: Path) -> None:
    """Against the distribution, where it is installed; `make abi` sees to that."""
    if not Path("/usr/include/rdma/rdma_cma.h").exists():
        pytest.skip("libibverbs-dev and librdmacm-dev are not installed (make abi needs them)")
    pattern, replacement, expected = CALL_MISTAKES[mistake]
    device = mistaken(tmp_path, ("calls.h", pattern, replacement))
    assert_reports(compare_calls(device, DISTRIBUTION, tmp_path), expected)
