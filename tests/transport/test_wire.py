"""Test what carries the bytes of a connection, as reported by the device."""

from __future__ import annotations

import os

import pytest

from aiordma import verbs
from aiordma.verbs import LinkLayer, TransportType
from aiordma.verbs._qp.queue_pair import wire_of_port

from .connection_factory import ConnectionFactory, check_alive


async def test_connection_wire_matches_the_device_on_both_sides(factory: ConnectionFactory) -> None:
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


def test_unconnected_embedded_queue_pair_has_no_wire(
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
def test_wire_of_port_maps_link_layer_and_transport_to_a_name(
    layer: LinkLayer, transport: TransportType, name: str | None
) -> None:
    assert wire_of_port(layer, transport) == name
