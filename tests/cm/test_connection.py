"""Tests of establishing, using and ending connections."""

from __future__ import annotations

import errno
import functools
import math
import os
import re
import socket
from contextlib import ExitStack

import pytest

from aiordma import cm, verbs
from aiordma.cm import ConnectionId, EventType, Option
from aiordma.errors import AddressError, BufferStateError, RouteError, VerbsError, host_port
from aiordma.verbs import QPState, SendFlags, WROpcode
from tests.cm.conftest import Connected, address_of, expect, next_event, refused, resolved, with_qp


def test_event_channel_does_not_block(events: cm.EventChannel) -> None:
    assert not os.get_blocking(events.fd)
    assert events.get_event() is None
    assert f"fd {events.fd}" in repr(events)


def test_connection_establishes_both_ids_with_private_data(
    connected: Connected, listener: ConnectionId
) -> None:
    request = connected.request
    assert request.listen_id is listener
    assert request.private_data[:8] == b"question"
    assert not any(request.private_data[8:])
    assert len(request.private_data) <= cm.CONNECT_DATA_MAX
    by_id = {event.id: event for event in connected.established}
    assert set(by_id) == {connected.active, connected.passive}
    assert by_id[connected.active].private_data[:6] == b"answer"
    assert all(event.error() is None for event in connected.established)
    for id in (connected.active, connected.passive):
        assert id.qp is not None
        assert id.qp.state is QPState.RTS
        assert id.qp.query().qp_state is QPState.RTS
        assert id.port_num == 1
        assert id.context is connected.context
    assert connected.context.borrowed
    assert connected.context.async_events() == []
    assert connected.active.peer_address == listener.local_address
    assert connected.passive.local_address == listener.local_address
    assert connected.passive.peer_address == connected.active.local_address


def test_disconnect_delivers_disconnected_then_timewait_exit(
    events: cm.EventChannel, connected: Connected
) -> None:
    """The queue pair may be reused after TIMEWAIT_EXIT."""
    connected.active.disconnect()
    seen: dict[ConnectionId, list[EventType]] = {connected.active: [], connected.passive: []}
    while not all(EventType.TIMEWAIT_EXIT in kinds for kinds in seen.values()):
        event = next_event(events)
        assert event.error() is None
        seen[event.id].append(event.type)
        if (event.id, event.type) == (connected.passive, EventType.DISCONNECTED):
            connected.passive.disconnect()  # rdma_disconnect(3): both ends must call it
    for id, kinds in seen.items():
        assert kinds == [EventType.DISCONNECTED, EventType.TIMEWAIT_EXIT]
        assert id.qp is not None
        assert id.qp.query().qp_state is QPState.ERR


def test_queue_pair_is_closed_by_destroy_qp_or_id_close(connected: Connected) -> None:
    qp = connected.active.qp
    assert qp is not None
    connected.active.destroy_qp()
    assert qp.closed
    assert connected.active.qp is None
    connected.active.destroy_qp()
    qp = connected.passive.qp
    assert qp is not None
    connected.passive.close()  # the queue pair goes before the id
    assert qp.closed
    assert connected.passive.closed
    assert connected.passive.peer_address is not None


def test_create_qp_requires_pd_of_the_same_context(
    events: cm.EventChannel, listener: ConnectionId, context: verbs.Context
) -> None:
    with context.alloc_pd() as pd, context.create_cq(16) as cq:
        with pytest.raises(ValueError, match="pd must belong to the context of"):
            listener.create_qp(pd, cq)
        with events.create_id() as unbound, pytest.raises(ValueError, match="None"):
            unbound.create_qp(pd, cq)


# --- addresses ---------------------------------------------------------------------------------


def test_bind_to_port_0_picks_a_free_port(events: cm.EventChannel, host: str) -> None:
    with events.create_id() as one, events.create_id() as two:
        for id in (one, two):
            assert id.local_address is None
            id.bind_addr((host, 0))
        assert one.local_address != two.local_address
        assert one.local_address is not None
        assert one.local_address[0] == host
        assert one.local_address[1] > 0
        assert one.peer_address is None
        assert host_port(one.local_address) in repr(one)


def test_listen_raises_eaddrinuse_when_address_is_in_use(
    events: cm.EventChannel, listener: ConnectionId
) -> None:
    address = address_of(listener)
    with events.create_id() as id:

        def listen() -> None:  # which of the two calls fails depends on the library
            id.bind_addr(address)
            id.listen()

        with pytest.raises(AddressError, match=re.escape(host_port(address))) as caught:
            listen()
        assert caught.value.errno == errno.EADDRINUSE
        assert isinstance(caught.value, OSError)


def test_only_one_of_two_ids_bound_to_an_address_can_listen(
    events: cm.EventChannel, host: str, deviations: frozenset[str]
) -> None:
    with events.create_id() as one, events.create_id() as two:
        for id in (one, two):
            id.set_reuseaddr(True)
        one.bind_addr((host, 0))
        two.bind_addr(address_of(one))
        if "an id that is bound beside a listener is in its way" not in deviations:
            one.listen()
        with pytest.raises(
            AddressError, match=rf"cannot listen on \S+:{address_of(two)[1]}: "
        ) as caught:
            two.listen()
        assert caught.value.errno == errno.EADDRINUSE


def test_bind_to_a_nonlocal_address_raises_address_error(events: cm.EventChannel) -> None:
    with events.create_id() as id:
        with pytest.raises(AddressError, match=r"bind to 198\.51\.100\.7:0") as caught:
            id.bind_addr(("198.51.100.7", 0))
        assert caught.value.errno in (errno.EADDRNOTAVAIL, errno.ENODEV)


def test_request_names_its_listener_when_several_share_a_channel(
    events: cm.EventChannel, context: verbs.Context
) -> None:
    """Each request names the listener that it reached, for both address families."""
    hosts = {str(entry.gid.ip) for entry in context.query_gid_table()}
    hosts = {host for host in hosts if not host.startswith("fe80")}
    assert {":" in host for host in hosts} == {True, False}
    listeners = [events.create_id() for _ in range(2) for _ in hosts]
    for id, host in zip(listeners, [*hosts, *hosts], strict=True):
        id.bind_addr((host, 0))
        id.listen()
    for id in listeners:
        connected = Connected(events, address_of(id))
        assert connected.request.listen_id is id
        assert connected.passive.local_address == id.local_address
        connected.close()
    for id in listeners:
        id.close()


def test_afonly_allows_both_families_to_share_a_port(events: cm.EventChannel) -> None:
    for last in [False] * 20 + [True]:  # another process may have the port
        with events.create_id() as six, events.create_id() as four:
            six.set_afonly(True)
            six.bind_addr(("::", 0))
            six.listen()
            try:
                four.bind_addr(("0.0.0.0", address_of(six)[1]))
            except AddressError:
                if last:
                    raise
                continue
            four.listen()
            return


def test_id_options_are_validated_and_rejected_after_bind(
    events: cm.EventChannel, host: str
) -> None:
    with events.create_id() as id:
        id.set_tos(0x20)
        id.set_reuseaddr(True)
        id.set_ack_timeout(0.1)
        id.set_option(Option.TOS, 0)
        with pytest.raises(ValueError, match="invalid value 256 for option TOS"):
            id.set_tos(256)
        with pytest.raises(ValueError, match="ack timeout"):
            id.set_ack_timeout(0)
        id.bind_addr((host, 0))
    with events.create_id() as id:
        id.set_reuseaddr(True)
        id.set_afonly(True)
        id.bind_addr(("::", 0))
        id.listen()
        refused(errno.EINVAL, lambda: id.set_reuseaddr(False))  # too late
        refused(errno.EINVAL, lambda: id.set_afonly(True))


@pytest.mark.parametrize("seconds", [4.096e-6 * 2**14, math.inf])
def test_ack_timeout_is_applied_to_the_queue_pair(
    events: cm.EventChannel, listener: ConnectionId, seconds: float
) -> None:
    connected = Connected(events, address_of(listener), ack_timeout=seconds)
    assert connected.active.qp is not None
    assert connected.active.qp.query().timeout == seconds
    connected.close()


# --- order of calls ---------------------------------------------------------------------------


def test_out_of_order_call_error_states_when_the_call_is_allowed(
    events: cm.EventChannel, host: str
) -> None:
    with events.create_id() as id:
        for step, rule in (
            (id.connect, r"connect\(\) must be called once, after ROUTE_RESOLVED"),
            (id.disconnect, "must be called after ESTABLISHED or accept"),
            (id.accept, "must be called once, on the ID of a CONNECT_REQUEST"),
            (id.reject, "must be called once, on the ID of a CONNECT_REQUEST"),
        ):
            with pytest.raises(
                VerbsError, match=f"{rule}.*; calls and events so far: none"
            ) as caught:
                step()
            assert caught.value.verb == f"rdma_{step.__name__}"
            assert caught.value.errno in (errno.EINVAL, errno.ENOTCONN)


def test_out_of_order_call_error_lists_earlier_calls_and_events(
    events: cm.EventChannel, listener: ConnectionId, host: str
) -> None:
    """The error also states the rule that was violated."""
    with events.create_id() as id:
        with pytest.raises(
            RouteError,
            match=r"must be called after ADDR_RESOLVED .*; calls and events so far: none",
        ) as caught:
            id.resolve_route()
        assert str(caught.value).count("must be called after ADDR_RESOLVED") == 1
        id.resolve_addr(address_of(listener))
        expect(events, EventType.ADDR_RESOLVED)
        done = "calls and events so far: resolve_addr, ADDR_RESOLVED"
        for step, error, rule in (
            (id.connect, VerbsError, r"after ROUTE_RESOLVED \(resolve_route\) and create_qp"),
            (id.disconnect, VerbsError, "must be called after ESTABLISHED"),
            (id.accept, VerbsError, "must be called once, on the ID of a CONNECT_REQUEST"),
            (
                functools.partial(id.bind_addr, (host, 0)),
                AddressError,
                "must be called once, before",
            ),
            (
                functools.partial(id.resolve_addr, (host, 1)),
                AddressError,
                r"resolve_addr\(\) must be called once",
            ),
            (
                id.listen,
                VerbsError,
                r"listen\(\) must be called once, on an ID that is new or bound",
            ),
        ):
            with pytest.raises(error, match=f"{rule}.*; {done}$"):
                step()
    with pytest.raises(VerbsError, match=r"must be called once.*so far: .*bind_addr, listen"):
        listener.listen()


def test_migrated_id_delivers_events_to_the_new_channel(
    device: verbs.Device, events: cm.EventChannel, connected: Connected
) -> None:
    with cm.EventChannel(device.library) as other:
        connected.passive.migrate(other)
        assert connected.passive.channel is other
        connected.active.disconnect()
        assert expect(other, EventType.DISCONNECTED).id is connected.passive
        connected.passive.disconnect()
        assert expect(events, EventType.DISCONNECTED).id is connected.active
        while (event := events.get_event()) is not None:  # TIMEWAIT_EXIT may already be there
            assert event.id is connected.active
        passive = connected.passive
    assert passive.closed  # with the channel that it was moved to
    assert not connected.active.closed


def test_closing_the_channel_closes_its_ids(device: verbs.Device, host: str) -> None:
    before = verbs.live()
    events = cm.EventChannel(device.library)
    listener = events.create_id()
    listener.bind_addr((host, 0))
    listener.listen()
    connected = Connected(events, address_of(listener))
    qp = connected.active.qp
    assert qp is not None
    events.close()
    for thing in (listener, connected.active, connected.passive, qp):
        assert thing.closed
    connected.close()
    assert verbs.live() == before


def test_get_event_skips_events_of_a_dropped_id(
    events: cm.EventChannel, listener: ConnectionId
) -> None:
    address = address_of(listener)
    id = events.create_id()
    id.resolve_addr(address)
    with pytest.warns(ResourceWarning, match="unclosed <ConnectionId"):
        del id
    with events.create_id() as other:
        other.resolve_addr(address)
        assert expect(events, EventType.ADDR_RESOLVED).id is other


def test_closed_id_and_channel_raise_buffer_state_error(
    events: cm.EventChannel, device: verbs.Device
) -> None:
    id = events.create_id()
    id.close()
    for use in (id.connect, id.listen, lambda: id.local_address, lambda: id.context):
        with pytest.raises(BufferStateError, match="ConnectionId is closed"):
            use()
    channel = cm.EventChannel(device.library)
    channel.close()
    with pytest.raises(BufferStateError, match="EventChannel is closed"):
        channel.get_event()
    with pytest.raises(BufferStateError, match="EventChannel is closed"):
        channel.create_id()


def test_connect_to_a_plain_tcp_port_is_rejected(events: cm.EventChannel, host: str) -> None:
    """A card's ports are separate from TCP's. The embedded device rejects every other peer."""
    with (
        socket.create_server((host, 0)) as server,
        with_qp(events, (host, server.getsockname()[1])) as (id, _pd, _cq),
    ):
        id.connect()
        server.close()
        event = next_event(events)
        assert event.type in (EventType.REJECTED, EventType.UNREACHABLE)
        assert event.error() is not None


def test_accepted_queue_pair_receives_from_srq(
    events: cm.EventChannel, listener: ConnectionId, connected: Connected
) -> None:
    with ExitStack() as stack:
        srq = stack.enter_context(connected.pd.create_srq(4))
        mr = stack.enter_context(connected.pd.reg_mr(256))
        active = stack.enter_context(resolved(events, address_of(listener)))
        active.create_qp(connected.pd, connected.cq)
        active.connect()
        passive = stack.enter_context(expect(events, EventType.CONNECT_REQUEST).id)
        qp = passive.create_qp(connected.pd, connected.cq, srq=srq)
        assert qp.srq is srq
        srq.post_recv_one(1, mr.addr + 128, 128, mr.lkey)
        passive.accept()
        for _ in range(2):
            expect(events, EventType.ESTABLISHED)
        assert active.qp is not None
        mr.buf[:6] = b"shared"
        active.qp.post_send_one(2, WROpcode.SEND, SendFlags.SIGNALED, mr.addr, 6, mr.lkey)
        found: dict[int, verbs.WorkCompletion] = {}
        while len(found) < 2:
            found |= {wc.wr_id: wc for wc in connected.cq.poll()}
        assert (found[1].qp_num, found[1].byte_len) == (qp.qp_num, 6)
        assert bytes(mr.buf[128:134]) == b"shared"
