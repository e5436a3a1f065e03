"""In-band connections, which are opened over an existing connection instead of a socket.

The messages are::

    connecting side -> listener   ConnectRequest (endpoint, hello)   the listener makes its queue
    listener -> connecting side   ConnectReply (endpoint, hello)     pair and connects it, then
                                                                     replies; or Error
    on the new queue pair         ReadyToUse                         the connecting side has
                                                                     connected its own

Control messages on an existing queue pair replace a socket and its wake-ups. ReadyToUse, or the
first message of the key proof, arrives on the new queue pair itself. It shows that the listener may
send there.

The design follows from these facts:

- If a side cannot send a request immediately, or gets no reply in time, it falls back to a socket.
  Nothing here waits for credits. Only the connection limit is a refusal, because a socket would be
  refused as well.
- The listener may have been closed, and another one may use its port. The reply is then CANCELLED,
  and a socket reaches the current listener.
- A request that has been sent cannot be withdrawn. If it is given up, it keeps its number until the
  reply arrives, and the peer is then told that its connection has ended.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from functools import partial
from itertools import islice
from typing import NamedTuple

from .._core import protocol
from .._core.handshake_layout import ENDPOINT_SIZE
from .._core.refusal import REJECTED_BY_APPLICATION
from .._event_loop.futures import settle
from .._native import fork
from ..cm.address import Address
from ..errors import (
    BusyError,
    ConnectionBrokenError,
    ConnectionClosedError,
    ProtocolError,
    RDMAError,
    RejectedError,
    host_port,
)
from .acceptor import Acceptor, ConnectionLimitError, Request, refusal_text
from .connect_attempt import ConnectAttempt, Target
from .connection import Connection
from .connection_group import ConnectionGroup, GroupMember
from .endpoint import AddressedEndpoint, listener_name
from .handshake import Handshake, Message
from .inspection import ConnectionMethod
from .lifecycle import ControlChannel, Link, NoLink

logger = logging.getLogger("aiordma.tcp")

# The fraction of `Config.connect_timeout` to wait for a reply. The rest is reserved for connecting
# over a socket.
REPLY_SHARE = 0.25

# The number of connections to check for send credits before falling back to a socket.
MAX_MEMBERS_CHECKED = 4


class PeerKey(NamedTuple):
    """The properties that all connections of a group share."""

    devices: tuple[str, ...]
    address: Address
    source: Address | None
    auth: bytes | None

    @classmethod
    def of(cls, target: Target) -> PeerKey:
        names = tuple(device.name for device in target.devices)
        return cls(names, target.address, target.source, target.security.auth)


_groups: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, weakref.WeakValueDictionary[PeerKey, ConnectionGroup]
] = weakref.WeakKeyDictionary()

# After a fork, all groups still belong to the parent process.
fork.reset_in_child(_groups.clear)


# ---- the connecting side -------------------------------------------------------------------------


class FallbackToSocket(RDMAError):
    """An in-band request failed or could not be sent, so a socket must be used."""


class PendingConnect:
    """A connect request in progress. The future `reply` completes with its outcome."""

    def __init__(self, group: ConnectionGroup) -> None:
        self._group = group
        self._replied = False
        self._abandoned = False
        self.member = group.new_member()
        loop = asyncio.get_running_loop()
        self.reply: asyncio.Future[protocol.ConnectReply] = loop.create_future()

    def give_up(self) -> Link:
        """Stop waiting for the reply, and return the link that the caller must release.

        If no reply has arrived yet, return a NoLink. The member itself is then released when the
        peer replies or the request fails.
        """
        if self._replied:
            return self.member
        self._abandoned = True
        self._group.abandoned_requests += 1
        self.reply.cancel()
        return NoLink()

    def on_timeout(self) -> None:
        settle(self.reply, None, FallbackToSocket("the peer did not reply in time"))

    def on_reply(self, reply: protocol.ConnectReply) -> None:
        self._replied = True
        if self._abandoned:
            self._release_member()
        else:
            settle(self.reply, reply)

    def failed(self, error: Exception) -> None:
        self._replied = True
        settle(self.reply, None, error)
        self._release_member()

    def on_refusal(self, error: protocol.Error) -> None:
        text = error.text
        self.member.mark_ended(text)  # so that releasing the member does not notify the peer
        if error.code == protocol.ErrorCode.QUOTA:  # a request on a socket would also be refused
            self.failed(RejectedError(text, reason=REJECTED_BY_APPLICATION, event=""))
            return
        if error.code == protocol.ErrorCode.CANCELLED:  # the listener is closed
            self._group.peer_accepts = False
        self.failed(FallbackToSocket(text))

    def _release_member(self) -> None:
        if self._abandoned:
            self._group.abandoned_requests -= 1
        self.member.release()


class Initiator:
    """The requests that were sent over one connection and are waiting for a reply."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._pending: dict[int, PendingConnect] = {}

    @property
    def can_send_request(self) -> bool:
        """Whether a request can be sent now."""
        return (
            self._channel.is_open
            and self._channel.controls.can_send_now
            and len(self._pending) < protocol.MAX_UNANSWERED
        )

    def request(self, group: ConnectionGroup, offer: bytes) -> PendingConnect:
        """Send a request. Raises FallbackToSocket if it cannot be sent now."""
        request_id = self._channel.controls.new_request_id()
        pending = self._pending[request_id] = PendingConnect(group)
        request = protocol.ConnectRequest(
            request_id, pending.member.number, offer[:ENDPOINT_SIZE], offer[ENDPOINT_SIZE:]
        )
        if not self._channel.controls.send_now(request):
            del self._pending[request_id]
            pending.member.mark_ended("the connection was not requested")
            pending.member.release()
            raise FallbackToSocket("not enough memory for the connect request")
        return pending

    def handle_control(self, message: protocol.Message) -> bool:
        match message:
            case protocol.ConnectReply():
                pending = self._pending.pop(message.request_id, None)
                if pending is None:
                    raise ProtocolError("the peer replied to a connect request that was not sent")
                pending.on_reply(message)
            case protocol.Error() if message.request_id in self._pending:
                self._pending.pop(message.request_id).on_refusal(message)
            case _:
                return False
        return True

    def end(self) -> None:
        all_pending, self._pending = self._pending, {}
        for pending in all_pending.values():
            pending.failed(FallbackToSocket("the connection that carried the request has ended"))


def _enable_requests(member: GroupMember, channel: ControlChannel) -> None:
    """Let this connection carry requests for others. Call this after the key proof, if any."""
    member.attach(channel)
    channel.set_handler(Initiator(channel))


def add_group(target: Target, member: GroupMember, channel: ControlChannel) -> None:
    """Register a new group, so that later connections to the peer are opened over it."""
    _enable_requests(member, channel)
    groups = _groups.setdefault(asyncio.get_running_loop(), weakref.WeakValueDictionary())
    key = PeerKey.of(target)
    known = groups.get(key)
    if known is None or not known.alive:
        groups[key] = member.group


def _find_initiator(group: ConnectionGroup) -> Initiator | None:
    """Return the Initiator of a member that can send a connect request now, or None."""
    for member in islice(group, MAX_MEMBERS_CHECKED):
        handler = member.channel.handler if member.channel is not None else None
        if isinstance(handler, Initiator) and handler.can_send_request:
            return handler
    return None


async def try_connect(target: Target) -> Connection | None:
    """Connect over an existing connection, or return None if a socket must be used."""
    groups = _groups.get(asyncio.get_running_loop())
    group = groups.get(PeerKey.of(target)) if groups else None
    initiator = _find_initiator(group) if group is not None and group.usable else None
    if group is None or initiator is None:
        return None
    try:
        return await _connect(group, initiator, target)
    except FallbackToSocket as error:
        logger.info("connecting to %s on a socket: %s", host_port(target.address), error)
        return None


async def _connect(group: ConnectionGroup, initiator: Initiator, target: Target) -> Connection:
    """Connect with a request over `initiator`, or raise FallbackToSocket if that is impossible."""
    config, security = target.config, target.security
    handshake = Handshake("in-band", security, client=True, address=group.peer_address)
    with ConnectAttempt[AddressedEndpoint]() as attempt:
        attempt.take_over(
            AddressedEndpoint(
                target.devices, config, security, group.local_address, opener=target.opener
            ),
            handshake,
            rails=target.will_use_rails,
        )
        pending = initiator.request(group, handshake.send_bytes())
        loop = asyncio.get_running_loop()
        timer = loop.call_later(config.connect_timeout * REPLY_SHARE, pending.on_timeout)
        try:
            attempt.create_connection()  # while the listener creates its side
            reply = await pending.reply
            handshake.receive(Message.REPLY, reply.endpoint + reply.hello)
            handshake.compare()
            attempt.connect_queue_pair(group.peer_address)
            attempt.link = pending.member
            connection = await attempt.start(target.devices)
            if handshake.peer.in_band:
                _enable_requests(pending.member, attempt.control_channel)
            return connection
        except BaseException:
            attempt.link = pending.give_up()
            raise
        finally:
            timer.cancel()
            del pending  # the frames of its error refer to this frame


# ---- the listener's side -------------------------------------------------------------------------


class Responder:
    """The listener's side of in-band requests over one connection."""

    def __init__(self, channel: ControlChannel, group: ConnectionGroup, acceptor: Acceptor) -> None:
        self.channel = channel
        self.group = group
        self._acceptor = acceptor

    def handle_control(self, message: protocol.Message) -> bool:
        if not isinstance(message, protocol.ConnectRequest):
            return False
        self._on_request(message)
        return True

    def end(self) -> None:
        """Do nothing. Handshakes do not need this connection after their replies have been sent."""

    def _on_request(self, request: protocol.ConnectRequest) -> None:
        if not request.number or request.number in self.group:
            raise ProtocolError(
                f"the peer requested connection {request.number}, which already exists"
            )
        handshake = Handshake("in-band", self._acceptor.security, client=False)
        handshake.receive(Message.OFFER, request.endpoint + request.hello)
        self._acceptor.admit(InbandRequest(self, request, handshake), in_band=True)


REFUSALS: dict[type[BaseException], protocol.ErrorCode] = {
    BusyError: protocol.ErrorCode.BUSY,
    ConnectionClosedError: protocol.ErrorCode.CANCELLED,
    ConnectionLimitError: protocol.ErrorCode.QUOTA,
}


class InbandRequest(Request):
    """A request that arrived over an existing connection."""

    via: ConnectionMethod = "in-band"

    def __init__(
        self, responder: Responder, request: protocol.ConnectRequest, handshake: Handshake
    ) -> None:
        self._responder = responder
        self._request = request
        self._handshake = handshake
        self._replied = False
        self._member = responder.group.add_member(request.number)
        self._attempt = ConnectAttempt[AddressedEndpoint](self._member)

    def __repr__(self) -> str:
        address = self.peer_address
        return f"<in-band connect request of {host_port(address) if address else 'a peer'}>"

    @property
    def peer_address(self) -> Address | None:
        return self._member.peer_address

    async def handshake(self, acceptor: Acceptor) -> Connection:
        responder, member, attempt = self._responder, self._member, self._attempt
        handshake = self._handshake
        config, security = acceptor.config, acceptor.security
        devices, release_place = acceptor.devices, acceptor.reserve_place()
        attempt.take_over(
            AddressedEndpoint(
                devices,
                config,
                security,
                member.local_address,
                opener=listener_name(member.local_address),
            ),
            handshake,
            in_band=True,
            rails=acceptor.will_use_rails(handshake.peer),
        )
        attempt.create_connection(release_place)
        channel = attempt.control_channel
        member.attach(channel)
        attempt.connect_queue_pair(member.peer_address)
        self._reply(handshake.send_bytes())
        handshake.compare()
        await wait_first_message(channel, member)
        channel.set_handler(Responder(channel, responder.group, acceptor))
        return await attempt.start(devices)

    def _reply(self, reply: bytes) -> None:
        if self._responder.channel.ended:
            raise FallbackToSocket("the connection that carried the request has ended")
        self._responder.channel.send(
            protocol.ConnectReply(
                self._request.request_id, reply[:ENDPOINT_SIZE], reply[ENDPOINT_SIZE:]
            )
        )
        self._replied = True

    def give_up(self, error: BaseException) -> None:
        if not self._replied:
            self._member.mark_ended("the connection was rejected")
            code = REFUSALS.get(type(error), protocol.ErrorCode.INTERNAL)
            text = refusal_text(error)
            self._responder.channel.send(protocol.Error(self._request.request_id, code, text))
        self._attempt.give_up(error)


async def wait_first_message(channel: ControlChannel, member: GroupMember) -> None:
    """Wait for the first message on the new queue pair, which shows that the peer is ready."""
    arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    # A message is early, because the connection handles no messages before `start`.
    channel.owner.on_early = partial(settle, arrived)
    member.established(lambda reason: settle(arrived, None, ConnectionBrokenError(reason)))
    await arrived
    channel.owner.on_early = None
