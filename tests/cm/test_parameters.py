"""Tests of connection parameters: copies, and the limits of private data."""

from __future__ import annotations

import ctypes

import pytest

from aiordma.cm import ConnectionParameters, PortSpace
from aiordma.cm.parameters import check_private_data
from aiordma.errors import LimitError


@pytest.mark.parametrize(
    "parameters",
    [
        ConnectionParameters(),
        ConnectionParameters(
            private_data=bytes(range(196)),
            responder_resources=3,
            initiator_depth=255,
            flow_control=False,
            retry_count=1,
            rnr_retry_count=0,
            srq=True,
            qp_num=0x123456,
        ),
    ],
)
def test_connection_parameters_round_trip(parameters: ConnectionParameters) -> None:
    param, _keep = parameters.packed()
    assert ConnectionParameters.read(param) == parameters


@pytest.mark.parametrize(
    ("space", "call", "limit"),
    [
        (PortSpace.TCP, "connect", 56),
        (PortSpace.TCP, "accept", 196),
        (PortSpace.TCP, "reject", 148),
        (PortSpace.UDP, "connect", 180),
        (PortSpace.UDP, "accept", 136),
        (PortSpace.UDP, "reject", 136),
    ],
)
def test_private_data_beyond_the_limit_raises_limit_error(
    space: PortSpace, call: str, limit: int
) -> None:
    check_private_data(space, call, bytes(limit))
    with pytest.raises(LimitError, match=rf"maximum {limit} for {call}\(\)") as caught:
        check_private_data(space, call, bytes(limit + 1))
    assert (caught.value.amount, caught.value.limit) == (limit + 1, limit)
    with pytest.raises(LimitError):
        check_private_data(space, call, memoryview(bytes(8 * limit)).cast("Q"))
    with pytest.raises(TypeError, match="are addresses"):
        check_private_data(space, call, memoryview((ctypes.py_object * 2)()))
