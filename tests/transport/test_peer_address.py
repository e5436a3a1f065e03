"""Test that a peer cannot make the embedded device connect to other hosts, or too often.

A peer names the address of its queue pair, and the device connects there only if the address is the
peer's own.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from aiordma import verbs
from aiordma._core import protocol
from aiordma._native import embedded
from aiordma._transport.connect_tcp import MAGIC, MESSAGE_SIZE
from aiordma._transport.tcp_link import REFUSED
from aiordma.errors import ProtocolError

from .connection_factory import SMALL, ConnectionFactory, ends, hello
from .marks import by_tcp, one_loop
from .raw_peer import Stranger, endpoint_at, raw_pair, server_for_queue_pairs

pytestmark = pytest.mark.any_device

# No host has an address in TEST-NET-2 (RFC 5737).
FOREIGN = "198.51.100.1"
OPTION = "allow_other_addresses"


@one_loop
@by_tcp
async def test_listener_refuses_endpoint_that_differs_from_client_address(
    factory: ConnectionFactory,
) -> None:
    async with (
        await factory.listen() as listener,
        Stranger.connect(
            factory, listener.port, hello_data=hello().pack(), address=FOREIGN
        ) as peer,
    ):
        assert peer.answer.startswith(REFUSED)
        rest = await peer.reader.read()
        assert FOREIGN.encode() in peer.answer + rest
        assert OPTION.encode() in peer.answer + rest
        await factory.works(listener)


@one_loop
@by_tcp
async def test_allow_other_addresses_permits_a_foreign_endpoint(factory: ConnectionFactory) -> None:
    config = replace(SMALL, allow_other_addresses=True)
    async with (
        await factory.listen(config) as listener,
        Stranger.connect(
            factory, listener.port, hello_data=hello().pack(), address=FOREIGN
        ) as peer,
    ):
        assert peer.answer.startswith(MAGIC)


@one_loop
@by_tcp
async def test_client_rejects_endpoint_that_differs_from_server_address(
    factory: ConnectionFactory,
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(MESSAGE_SIZE)
        writer.write(MAGIC + endpoint_at(FOREIGN) + hello().pack())
        writer.close()

    async with await asyncio.start_server(answer, factory.host, 0) as server:
        port = server.sockets[0].getsockname()[1]
        error = await ends(factory.connect(port), ProtocolError)
        assert FOREIGN in str(error)
        assert OPTION in str(error)


@one_loop
@by_tcp
async def test_inband_request_from_another_address_is_refused(factory: ConnectionFactory) -> None:
    async with raw_pair(factory) as (server, peer):
        peer.send_control(protocol.ConnectRequest(1, 1, endpoint_at(FOREIGN), hello().pack()))
        refusal = await peer.control()
        assert isinstance(refusal, protocol.Error)
        assert FOREIGN in refusal.text
        assert not server.closed


def gid(address: str) -> bytes:
    return verbs.GID.from_ip(address).raw


@pytest.mark.parametrize(
    ("claimed", "peer", "allowed"),
    [
        (FOREIGN, FOREIGN, True),
        (FOREIGN, "198.51.100.2", False),
        ("127.0.0.1", FOREIGN, False),
        ("::1", "2001:db8::1", False),
        ("2001:db8::1", "2001:db8::1", True),
        ("fe80::1", "fe80::1", True),
        ("fe80::1", "fe80::2", False),
        ("127.0.0.1", "127.5.6.7", True),
    ],
)
def test_endpoint_address_must_match_the_peer_address(
    claimed: str, peer: str, allowed: bool
) -> None:
    with verbs.open_device("embedded0"):
        assert embedded().may_be_on_same_host(gid(claimed), gid(peer)) is allowed


@one_loop
@by_tcp
async def test_delay_between_connection_attempts_increases(factory: ConnectionFactory) -> None:
    """This keeps attempts rare, whatever is at that address.

    The sixth comes after 1 + 4 + ... + 256 ms.
    """
    loop = asyncio.get_running_loop()
    with server_for_queue_pairs(factory.host) as target:
        target.setblocking(False)
        begin = loop.time()
        async with (
            await factory.listen() as listener,
            Stranger.connect(
                factory, listener.port, hello_data=hello().pack(), data_port=target.getsockname()[1]
            ),
        ):
            for _ in range(6):
                reached, _ = await loop.sock_accept(target)
                reached.close()
            assert loop.time() - begin >= 0.341
