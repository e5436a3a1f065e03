"""The numbers that the pure core shares with the verbs ABI are those of ``native/abi/verbs.h``."""

from __future__ import annotations

import re
from enum import IntEnum, IntFlag
from pathlib import Path

import pytest

from aiordma._core.qp_states import QPAttrMask, QPState, QPType
from aiordma._core.region import Rights
from aiordma.errors import WORK_COMPLETION_ERRORS

HEADER = Path(__file__).parents[2] / "native" / "abi" / "verbs.h"


def enum_values(name: str) -> dict[str, int]:
    """The constants of one C enum of the header, as a C compiler counts them."""
    body = re.search(rf"enum {name} {{(.*?)}};", HEADER.read_text(), re.DOTALL)
    assert body, f"no enum {name} in {HEADER}"
    values: dict[str, int] = {}
    following = 0
    for entry in re.sub(r"/\*.*?\*/", "", body[1], flags=re.DOTALL).split(","):
        constant, _, expression = (part.strip() for part in entry.partition("="))
        if constant:
            shift = re.fullmatch(r"(\w+)(?:\s*<<\s*(\w+))?", expression)
            if shift:
                following = int(shift[1], 0) << int(shift[2] or "0", 0)
            values[constant] = following
            following += 1
    return values


@pytest.mark.parametrize(
    ("enum", "name", "prefix"),
    [
        (QPType, "ibv_qp_type", "IBV_QPT_"),
        (QPState, "ibv_qp_state", "IBV_QPS_"),
        (QPAttrMask, "ibv_qp_attr_mask", "IBV_QP_"),
        (Rights, "ibv_access_flags", "IBV_ACCESS_REMOTE_"),
    ],
)
def test_enums(enum: type[IntEnum | IntFlag], name: str, prefix: str) -> None:
    header = enum_values(name)
    assert {member.name: int(member) for member in enum} == {
        member.name: header[f"{prefix}{member.name}"] for member in enum
    }


def test_every_attribute_of_the_abi_is_known() -> None:
    assert enum_values("ibv_qp_attr_mask").keys() == {f"IBV_QP_{bit.name}" for bit in QPAttrMask}


def test_every_failing_status_has_its_class() -> None:
    header = enum_values("ibv_wc_status")
    del header["IBV_WC_SUCCESS"]
    assert header == {
        f"IBV_WC_{cls.status_name}": status for status, cls in WORK_COMPLETION_ERRORS.items()
    }
