"""Test numpy numbers and names of enum members wherever verbs take a number or a choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiordma import verbs
from aiordma.verbs import AddressVector, QPCapabilities, QPState, SendWorkRequest, WROpcode

USES: dict[str, Callable[[verbs.QueuePair, verbs.MemoryRegion, Any], object]] = {
    "cqe": lambda qp, mr, value: qp.context.create_cq(value),
    "max_send_wr": lambda qp, mr, value: qp.pd.create_qp(
        qp.send_cq, capabilities=QPCapabilities(max_send_wr=value)
    ),
    "max_wr": lambda qp, mr, value: qp.pd.create_srq(value),
    "qp_type must be a member of": lambda qp, mr, value: qp.pd.create_qp(qp.send_cq, qp_type=value),
    "access": lambda qp, mr, value: qp.pd.reg_mr(64, value),
    "iova": lambda qp, mr, value: qp.pd.reg_mr(64, iova=value),
    "addr": lambda qp, mr, value: qp.pd.reg_pointer(value, 8),
    "offset": lambda qp, mr, value: mr.sge(value),
    "length": lambda qp, mr, value: mr.sge(0, value),
    "max": lambda qp, mr, value: qp.send_cq.poll(value),
    "index": lambda qp, mr, value: qp.context.query_gid(value),
    "port_num": lambda qp, mr, value: qp.context.query_port(value),
    "pkey": lambda qp, mr, value: qp.context.find_pkey(value),
    "psn": lambda qp, mr, value: qp.endpoint(psn=value),
    "qp_state": lambda qp, mr, value: qp.modify(qp_state=value),
    "sgid_index": lambda qp, mr, value: qp.pd.create_ah(AddressVector(sgid_index=value,
                                                                      dgid=verbs.GID(bytes(16)))),
    "wr_id": lambda qp, mr, value: qp.post_send([SendWorkRequest(value, WROpcode.SEND)]),
    "addr of a ScatterGatherElement": lambda qp, mr, value: qp.post_recv(
        [verbs.ReceiveWorkRequest(1, [verbs.ScatterGatherElement(value, 1, 1)])]
    ),
    "length of a Scatter": lambda qp, mr, value: qp.post_send_one(1, 0, 0, 1, value, 1),
    "lkey of a ScatterGatherElement": lambda qp, mr, value: qp.post_recv_one(1, 1, 1, value),
    "remote_addr": lambda qp, mr, value: qp.post_send_one(1, 0, 0, 1, 1, 1, value),
    "imm_data": lambda qp, mr, value: qp.post_send_one(1, 0, 0, 1, 1, 1, imm_data=value),
    "guid": lambda qp, mr, value: verbs.find_device(guid=value),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_integer_arguments_reject_non_integer_values(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue, name: str
) -> None:
    with pd.create_qp(cq) as qp, pd.reg_mr(64) as mr:
        for value in (1.5, np.float32(1), "1", [1]):
            with pytest.raises(TypeError, match=f"{name}.*, not {type(value).__name__}"):
                USES[name](qp, mr, value)
        assert qp.state is QPState.RESET
