"""Test what carries the bytes of a connection, as reported by the device."""

from __future__ import annotations

import os

import pytest

from aiordma import verbs
from aiordma.verbs import LinkLayer, TransportType
from aiordma.verbs._qp.queue_pair import wire_of_port

from .connection_factory import ConnectionFactory, check_alive


async def test_both_sides_name_the_wire(factory: ConnectionFactory) -> None:
    if factory.device == "embedded0":
        shared = os.environ.get("AIORDMA_EMBEDDED_LINKS") != "tcp"
        expected = "shared memory" if shared else "tcp"
    else:
        expected = "roce"
    async with factory.pair() as (client, server):
        await check_alive(client, server)
        assert client.wire == server.wire == expected
        qp = client._endpoint.qp
        assert qp is not None
        assert qp.wire == expected
    assert client.wire is None


def test_unconnected_queue_pair_names_no_wire_on_the_embedded_device(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    with pd.create_qp(cq) as qp:
        embedded = pd.context.name == "embedded0"
        assert qp.wire == (None if embedded else "roce")


@pytest.mark.any_device
@pytest.mark.parametrize(
    ("layer", "transport", "name"),
    [
        (LinkLayer.ETHERNET, TransportType.IB, "roce"),
        (LinkLayer.INFINIBAND, TransportType.IB, "infiniband"),
        (LinkLayer.ETHERNET, TransportType.IWARP, "iwarp"),
        (LinkLayer.UNSPECIFIED, TransportType.UNKNOWN, None),
    ],
)
def test_wire_of_port_names_the_link_of_a_card(
    layer: LinkLayer, transport: TransportType, name: str | None
) -> None:
    assert wire_of_port(layer, transport) == name
