"""Test that UnsupportedError names the device and the capability that it lacks."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import NoReturn

import pytest

from aiordma import verbs
from aiordma._native import failure, ffi
from aiordma.errors import UnsupportedError
from aiordma.verbs import AccessFlags

Use = Callable[[verbs.Context, verbs.ProtectionDomain], object]


def prefetch(pd: verbs.ProtectionDomain) -> None:
    with pd.reg_mr(4096) as mr:
        mr.prefetch()


# Each entry lists the device call to reject, a function that uses it, and the capability that the
# error must name.
USES: list[tuple[str, Use, str]] = [
    ("ibv_alloc_dm", lambda context, _: context.alloc_dm(64), "device memory"),
    ("ibv_alloc_td", lambda context, _: context.alloc_td(), "thread domains"),
    (
        "ibv_alloc_parent_domain",
        lambda context, pd: context.alloc_parent_domain(pd),
        "parent domains",
    ),
    ("ibv_alloc_null_mr", lambda _, pd: pd.alloc_null_mr(), "null memory regions"),
    ("ibv_reg_dmabuf_mr", lambda _, pd: pd.reg_dmabuf_mr(0, 4096), "dma-buf"),
    ("ibv_reg_mr", lambda _, pd: pd.reg_implicit(), "on-demand"),
    ("ibv_reg_mr", lambda _, pd: pd.reg_mr(64, AccessFlags.ON_DEMAND), "on-demand"),
    ("ibv_reg_mr", lambda _, pd: pd.reg_mr(bytearray(64), AccessFlags.MW_BIND), "MW_BIND"),
    ("ibv_advise_mr", lambda _, pd: prefetch(pd), "advice"),
    ("ibv_create_cq_ex", lambda context, _: context.create_cq(16, extended=True), "extended"),
    ("ibv_query_rt_values_ex", lambda context, _: context.query_rt_values_ex(), "clock"),
]


@pytest.fixture
def reject_call(context: verbs.Context, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Provide a function that makes a device call fail as unsupported. Clear all capabilities."""
    empty = verbs.ExtendedDeviceAttributes.read(ffi.new("struct ibv_device_attr_ex *"))
    monkeypatch.setattr(context, "query_device_ex", lambda: empty)

    def take(call: str) -> None:
        def refuse(*arguments: object) -> NoReturn:
            raise failure(call, errno.EOPNOTSUPP)

        monkeypatch.setattr(context.library.calls, call, refuse)
        if call == "ibv_reg_mr":  # the embedded device uses this call for contiguous memory
            monkeypatch.setattr(context.library, "reg_own_mr", refuse)

    return take


@pytest.mark.parametrize(("call", "use", "capability"), USES)
def test_unsupported_call_error_includes_device_and_capability(
    context: verbs.Context,
    pd: verbs.ProtectionDomain,
    reject_call: Callable[[str], None],
    call: str,
    use: Use,
    capability: str,
) -> None:
    reject_call(call)
    with pytest.raises(UnsupportedError, match=capability) as caught:
        use(context, pd)
    assert caught.value.device == context.name
    assert caught.value.verb == call
    assert f"device '{context.name}' does not support" in str(caught.value)


def test_cq_resize_raises_unsupported_error_without_device_support(
    cq: verbs.CompletionQueue, reject_call: Callable[[str], None]
) -> None:
    reject_call("ibv_resize_cq")
    before = cq.cqe
    with pytest.raises(UnsupportedError, match="resizing completion queues"):
        cq.resize(1000)
    assert cq.cqe == before
