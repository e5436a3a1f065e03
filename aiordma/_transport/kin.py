"""Connections that are asked for over one that is there, instead of a socket of their own.

    asking side -> other    Ask (endpoint, hello)      the other makes its queue pair and connects
    other -> asking side    Answer (endpoint, hello)   it, then answers; or Error
    on the new queue pair   Ready                      the asking side has connected its own

Control messages on a queue pair that is there, instead of a socket and its wake-ups.  Ready, or the
first message of the proof that both have the key, comes on the new queue pair itself: that it comes
is what shows that something may be sent there.

Some facts, and what they mean here:

- Whoever cannot ask at once, or is not answered in time, uses a socket of its own: nobody is worse
  off for the connection that was there.  So nothing waits here for credits, and only a lack of
  places is a refusal: the socket would give the same.
- The listener may have been closed meanwhile and another one be at its port: it says so, and the
  socket finds who is there now.
- An ask that has been sent cannot be taken back.  Who gives it up keeps its number until it is
  answered, and then tells the other side that nothing will come of it.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from functools import partial
from itertools import islice

from .. import verbs
from .._core import protocol
from .._core.connection_states import ConnectionState
from .._core.handshake import Endpoint, Hello
from .._core.refusal import printable
from .._loop.driver import Driver
from .._native import fork
from ..config import Config
from ..errors import ConnectionBrokenError, ProtocolError, RDMAError, RejectedError
from .connection import Connection
from .family import Family, Member
from .half import Half
from .lifecycle import Address, Link, NoLink, weakly
from .messages import Messages
from .reception import NoPlaceError, Reception
from .security import Security
from .tcp_link import REJECTED_BY_APPLICATION

logger = logging.getLogger("aiordma.tcp")

# The part of `Config.connect_timeout` that an answer may take; the rest is for a socket.
PATIENCE = 0.25

# Connections that are tried for a credit before a socket is used.
TRIES = 4

# Device, listener, source, key.
Key = tuple[str, Address, Address | None, bytes | None]

_families: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, weakref.WeakValueDictionary[Key, Family]
] = weakref.WeakKeyDictionary()

# In the child of a fork all of them are its parent's.
fork.reset_in_child(_families.clear)


# ---- the side that asks --------------------------------------------------------------------------


class NotAsked(RDMAError):
    """Nothing comes of an ask, for no fault of who asks: a socket is to be used."""


class Asked:
    """One ask under way; `answer` ends with what became of it."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._answered = False
        self._given_up = False
        self.member = family.new()
        loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[protocol.Answer] = loop.create_future()

    def give_up(self) -> Link:
        """Nobody waits any more; the link that goes with it, if it was answered."""
        if self._answered:
            return self.member
        self._given_up = True
        self._family.overdue += 1
        self.answer.cancel()
        return NoLink()

    def too_late(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(NotAsked("it was not answered in time"))

    def answered(self, answer: protocol.Answer) -> None:
        self._answered = True
        if self._given_up:
            self._forget()
        elif not self.answer.done():
            self.answer.set_result(answer)

    def failed(self, error: Exception) -> None:
        self._answered = True
        if not self.answer.done():
            self.answer.set_exception(error)
        self._forget()

    def refused(self, error: protocol.Error) -> None:
        text = printable(error.text)
        self.member.over(text)  # there is nobody to be told
        if error.code == protocol.ErrorCode.QUOTA:
            self.failed(RejectedError(text, reason=REJECTED_BY_APPLICATION, event=""))
            return
        if error.code == protocol.ErrorCode.CANCELLED:  # there is no listener any more
            self._family.asks = False
        self.failed(NotAsked(text))

    def _forget(self) -> None:
        self._family.overdue -= self._given_up
        self.member.release()


class Asking:
    """What has been asked for over one connection, until it is answered."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._asks: dict[int, Asked] = {}

    @property
    def able(self) -> bool:
        """Whether it can ask now."""
        return (
            self._messages.can_tell
            and not self._messages.peer_has_left
            and len(self._asks) < protocol.MAX_UNANSWERED
        )

    def ask(self, family: Family, endpoint: bytes, hello: bytes) -> Asked:
        """NotAsked when it cannot be asked now."""
        number = self._messages.request_id()
        asked = self._asks[number] = Asked(family)
        ask = protocol.Ask(number, asked.member.number, endpoint, hello)
        if not self._messages.tell(ask):
            del self._asks[number]
            asked.member.over("it was not asked for")
            asked.member.release()
            raise NotAsked("there is no memory for it")
        return asked

    def control(self, message: protocol.Message) -> bool:
        match message:
            case protocol.Answer():
                asked = self._asks.pop(message.request_id, None)
                if asked is None:
                    raise ProtocolError("the peer answers an ask that was not made")
                asked.answered(message)
            case protocol.Error() if message.request_id in self._asks:
                self._asks.pop(message.request_id).refused(message)
            case _:
                return False
        return True

    def end(self) -> None:
        asks, self._asks = self._asks, {}
        for asked in asks.values():
            asked.failed(NotAsked("the connection that it was asked over has ended"))


def _key(device: verbs.Device, address: Address, source: Address | None, security: Security) -> Key:
    return device.name, address, source, security.auth


def _may_be_asked(member: Member, connection: Connection) -> None:
    """Others over this one; not before both have shown that they have the key."""
    member.belongs_to(connection)
    connection._kin = Asking(connection._messages)


def found(
    member: Member,
    connection: Connection,
    device: verbs.Device,
    address: Address,
    source: Address | None,
    security: Security,
) -> None:
    """A family: further connections may be asked for over its first, if there is no other."""
    _may_be_asked(member, connection)
    families = _families.setdefault(asyncio.get_running_loop(), weakref.WeakValueDictionary())
    key = _key(device, address, source, security)
    known = families.get(key)
    if known is None or not known.alive:
        families[key] = member.family


def _able(family: Family) -> Asking | None:
    for member in islice(family, TRIES):
        connection = member.connection
        if connection is not None and connection._state is ConnectionState.OPEN:
            kin = connection._kin
            if isinstance(kin, Asking) and kin.able:
                return kin
    return None


async def connect(
    device: verbs.Device,
    address: Address,
    source: Address | None,
    config: Config,
    security: Security,
) -> Connection | None:
    """Connects over a connection that is there.  None: a socket is to be used."""
    families = _families.get(asyncio.get_running_loop())
    family = families.get(_key(device, address, source, security)) if families else None
    kin = _able(family) if family is not None and family.usable else None
    if family is None or kin is None:
        return None
    try:
        return await _connect(family, kin, device, config, security)
    except NotAsked as error:
        logger.info("%s port %s is asked on a socket: %s", *address, error)
        return None


async def _connect(
    family: Family, kin: Asking, device: verbs.Device, config: Config, security: Security
) -> Connection:
    driver = Driver.for_device(device, config.pool_limit, config.polling)
    half = Half(driver, config, security, family.local_address)
    try:
        asked = kin.ask(family, half.endpoint.pack(), half.hello.pack())
    except BaseException as error:
        half.give_up(NoLink(), error)
        raise
    loop = asyncio.get_running_loop()
    late = loop.call_later(config.connect_timeout * PATIENCE, asked.too_late)
    try:
        connection = half.make()  # while the other side makes its own
        answer = await asked.answer
        remote, peer = Endpoint.unpack(answer.endpoint), Hello.unpack(answer.hello)
        if remote == half.endpoint:
            raise ProtocolError("the peer sends back what it is told")
        security.agree(peer)
        half.connect(remote)
        asked.member.watched(weakly(connection._disconnected))
        await connection._start(asked.member, peer, client=True)
        if peer.takes_asks:
            _may_be_asked(asked.member, connection)
        if security.auth is None:
            connection._messages.send_control(protocol.Ready(0))
    except BaseException as error:
        half.give_up(asked.give_up(), error)
        raise
    finally:
        late.cancel()
    return connection


# ---- the side that is asked ----------------------------------------------------------------------


class Answering:
    """What is asked for over one connection of a listener, and is made by its `reception`."""

    def __init__(
        self, reception: Reception, family: Family, messages: Messages, *, awaits_ready: bool
    ) -> None:
        self._reception = reception
        self._family = family
        self._messages = messages
        self._awaits_ready = awaits_ready

    def control(self, message: protocol.Message) -> bool:
        match message:
            case protocol.Ask():
                self._asked(message)
            case protocol.Ready() if self._awaits_ready:
                self._awaits_ready = False
            case _:
                return False
        return True

    def end(self) -> None:
        """Those that were answered may be ready all the same."""

    def _asked(self, ask: protocol.Ask) -> None:
        if not ask.number or ask.number in self._family:
            raise ProtocolError(f"the peer asks for a connection {ask.number}, which there is")
        remote, peer = Endpoint.unpack(ask.endpoint), Hello.unpack(ask.hello)
        if self._reception.closed:
            self._refuse(ask, protocol.ErrorCode.CANCELLED, "the listener is closed")
        elif self._reception.full:
            self._refuse(ask, protocol.ErrorCode.BUSY, "too many handshakes are under way")
        else:
            # Not from here, where completions are being handed out.
            member = self._family.join(ask.number)
            serving = self._reception.begin(self._serve(ask, member, remote, peer))
            serving.add_done_callback(partial(self._served, ask, member))

    def _refuse(self, ask: protocol.Ask, code: protocol.ErrorCode, why: str) -> None:
        if not self._messages.ended:
            self._messages.send_control(protocol.Error(ask.request_id, code, why))

    async def _serve(
        self, ask: protocol.Ask, member: Member, remote: Endpoint, peer: Hello
    ) -> None:
        reception = self._reception
        connection: Connection | None = None
        answered = False
        try:
            async with asyncio.timeout(reception.config.handshake_timeout):
                half, connection = reception.take(member.local_address, member.peer_address)
                member.belongs_to(connection)
                half.connect(remote)
                self._answer(ask, half)
                answered = True
                reception.security.agree(peer)
                await _first_arrival(connection, member)
                connection._kin = Answering(
                    reception,
                    self._family,
                    connection._messages,
                    awaits_ready=reception.security.auth is None,
                )
                await connection._start(member, peer, client=False)
        except BaseException as error:
            # The peer, or this machine, failed one handshake: the listener goes on.
            logger.info("an ask of %s failed: %s", member.peer_address, error)
            if not answered:
                member.over("it was refused")
                refused = isinstance(error, NoPlaceError)
                code = protocol.ErrorCode.QUOTA if refused else protocol.ErrorCode.INTERNAL
                self._refuse(ask, code, str(error))
            if connection is not None:
                connection._give_up(member, error)
            if not isinstance(error, (RDMAError, OSError)):
                raise
        else:
            reception.deliver(connection)

    def _served(self, ask: protocol.Ask, member: Member, serving: asyncio.Task[None]) -> None:
        if not member.used:
            if serving.cancelled():  # before it had begun
                self._refuse(ask, protocol.ErrorCode.CANCELLED, "the listener is closed")
            member.over("it was refused")
            member.release()

    def _answer(self, ask: protocol.Ask, half: Half) -> None:
        if self._messages.ended:
            raise NotAsked("the connection that it was asked over has ended")
        self._messages.send_control(
            protocol.Answer(ask.request_id, half.endpoint.pack(), half.hello.pack())
        )


async def _first_arrival(connection: Connection, member: Member) -> None:
    """Until the peer has sent something on the new queue pair, which it does when it is ready."""
    arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def arrive() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def end(reason: str) -> None:
        if not arrived.done():
            arrived.set_exception(ConnectionBrokenError(reason))

    connection._messages.on_early = arrive
    member.watched(end)
    await arrived
    connection._messages.on_early = None
    member.watched(weakly(connection._disconnected))
