"""Test errors that docstrings promise and that no other test covers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiordma import verbs
from aiordma.errors import UnsupportedError, VerbsError
from aiordma.verbs import AccessFlags


def test_reg_mr_raises_verbs_error_for_unknown_rights(pd: verbs.ProtectionDomain) -> None:
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
def test_ece_and_rate_limit_calls_raise_unsupported_error(
    qp: verbs.QueuePair, use: Callable[[verbs.QueuePair], object]
) -> None:
    with pytest.raises(UnsupportedError, match=qp.context.name):
        use(qp)
