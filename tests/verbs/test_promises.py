"""Errors that docstrings promise and that no test of the thing itself meets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from aiordma import verbs
from aiordma.errors import PostError, UnsupportedError, VerbsError
from aiordma.verbs import AccessFlags, Endpoint, QPType


@pytest.mark.parametrize("header", [b"", bytes(39), bytes(40)])
def test_what_is_no_global_routing_header(header: bytes) -> None:
    with pytest.raises(ValueError, match="GRH"):
        verbs.GRH.parse(header)


@pytest.mark.parametrize(
    "wrong", [{"gid": bytes(15)}, {"qp_num": 1 << 24}, {"psn": -1}, {"lid": 1 << 16}]
)
def test_an_endpoint_out_of_bounds(wrong: dict[str, int | bytes]) -> None:
    good = Endpoint(gid=bytes(16), qp_num=1, psn=1, lid=0, mtu=3)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(good, **wrong)  # type: ignore[arg-type]


def test_memory_with_gaps(pd: verbs.ProtectionDomain) -> None:
    with pytest.raises(BufferError):
        pd.reg_mr(memoryview(bytearray(8))[::2])


def test_rights_that_the_device_does_not_know(pd: verbs.ProtectionDomain) -> None:
    with pytest.raises(VerbsError, match="ibv_reg_mr") as caught:
        pd.reg_mr(4096, AccessFlags.LOCAL_WRITE | AccessFlags(1 << 19))
    assert caught.value.errno


@pytest.mark.parametrize(
    "use",
    [
        lambda qp: qp.set_ece(verbs.ECE(1)),
        lambda qp: qp.query_ece(),
        lambda qp: qp.modify_rate_limit(verbs.RateLimit(1)),
    ],
)
def test_what_no_software_device_has(
    qp: verbs.QueuePair, use: Callable[[verbs.QueuePair], object]
) -> None:
    with pytest.raises(UnsupportedError, match=qp.context.name):
        use(qp)


def test_binding_where_nothing_can_be_posted(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    rights = AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND
    with (
        pd.reg_mr(64, rights) as mr,
        pd.alloc_mw() as window,
        pd.create_qp(cq) as qp,
        pytest.raises(PostError),
    ):
        window.bind(qp, mr, AccessFlags.REMOTE_READ)


def test_datagrams_bind_nothing(pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue) -> None:
    rights = AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND
    with (
        pd.reg_mr(64, rights) as mr,
        pd.alloc_mw() as window,
        pd.create_qp(cq, qp_type=QPType.UD) as qp,
        pytest.raises(UnsupportedError, match="UD"),
    ):
        window.bind(qp, mr, AccessFlags.REMOTE_READ)
