"""Pairs of queue pairs that rest between two connections.

    one side -> the other   Rest         its user has closed, all of it is done, nothing follows
    the other -> one side   Rest         the same; both go on with new connections, at rest
    asking side -> other    Open
    other -> asking side    Opened       or Error, when there is no place for it

To make a connection is mostly to make its queue pair, to bring it up and to post its receives; to
end it, to undo that.  So where two processes have other connections, one that was closed in order
leaves its pair to the next one, which finds it as it would find a new one.

Some facts, and what they mean here:

- A connection of its user's has ended when it has: its objects, its keys, its place at the listener
  and its messages are its own, and the next one has others.  Only the queue pair and the receives
  that are posted there stay.
- Rest is the last frame of a side, and what has been sent is received in its order.  So whatever
  comes after the peer's Rest is for the next connection, and what comes before it is not.
- Both say it, or the pair goes: who cannot rest ends, and tells the number on the socket that they
  share (family.py).
- The credits of both begin anew, so all receives are posted before the side says Rest, or, where it
  said so first, before it hears it.
- A pair at rest holds memory for nobody.  It is not there for longer than a moment, not without a
  connection beside it, and not where the pool is used by more than half.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .._core import protocol
from .._core.refusal import printable
from ..config import Config
from ..errors import ConnectionClosedError, ProtocolError, QuotaError, RDMAError, RejectedError
from ..home import Home
from .connection import Connection
from .family import Family, Member
from .life import Kin, Life, weakly
from .reception import NoPlaceError, Reception
from .tcp_link import REJECTED_BY_APPLICATION
from .work_queue import nothing

# Pairs of one family that may rest at a time.
MOST_RESTING = 16


class NotAsked(RDMAError):
    """Nothing comes of an ask, for no fault of who asks: another way is to be used."""


def may_rest(connection: Life) -> bool:
    """Whether nothing is left to do on its queue pair, and it would not be in the way."""
    link = connection._link
    if not isinstance(link, Member) or link.gone or not link.family.may_rest:
        return False
    if link.family.resting >= MOST_RESTING:
        return False
    if not connection._messages.can_rest:
        return False
    try:
        connection._memory.pool.require_spare(0)
    except QuotaError:
        return False
    return True


class Rest:
    """What becomes of the queue pair of `before`, which has ended.

    First what is still under way there, which is Rest at most, is waited for; then `connection`
    goes on with it.  `kin` is what that does about further ones once it is opened.
    """

    def __init__(self, before: Life, kin: Callable[[Connection], Kin]) -> None:
        link = before._link
        assert isinstance(link, Member)
        self.member = link
        self.family: Family = link.family
        self.config = before._config
        self.connection: Connection | None = None
        self._kin = kin
        self._before: Life | None = before
        self._loop = before._loop
        self._both = False
        self._told: asyncio.Future[None] | None = None  # while somebody waits
        before._queue.watch_room(self._look)
        before._queue.on_failure = self.gone
        self.family.lie_down(self)
        self._last = self._crowded  # others have come to rest since it might
        self._look()
        self.family.settle()

    @property
    def _crowded(self) -> bool:
        return self.family.resting > MOST_RESTING

    def _look(self) -> None:
        before = self._before
        if before is not None and (before._queue.failed or not before._queue.outstanding):
            before._queue.on_room = nothing
            self._tell()
            self._loop.call_soon(self._go_on)  # what the user does next is first

    def _tell(self) -> None:
        if self._told is not None and not self._told.done():
            self._told.set_result(None)

    async def told(self) -> None:
        """Until the peer's device has the last word of the connection that has ended."""
        if self._before is not None and self._before._queue.outstanding:
            if self._told is None:
                self._told = self._loop.create_future()
            await asyncio.wait((self._told,))

    def gone(self, reason: object) -> None:
        """The queue pair, or the other side of it, is no more."""
        self._loop.call_soon(self.give_up)  # not from here, as with all ends

    def finish(self) -> None:
        """There will be no connection, but what has been said is to arrive."""
        before = self._before
        if before is not None and before._queue.outstanding and not self._loop.is_closed():
            self._last = True
        else:
            self.give_up()

    def give_up(self) -> None:
        """There will be no connection."""
        self._tell()
        before, self._before = self._before, None
        connection = self.connection
        if before is not None:
            before._queue.on_failure = nothing
            before._give_all_back()
        elif connection is None:
            return
        elif self._loop.is_closed():
            connection._end_without_loop()
        else:
            error = ConnectionClosedError("it was not opened again")
            connection._end_at_once(error)
            connection._end(error)

    def _go_on(self) -> None:
        before = self._before
        if before is None:
            return
        if self._last or not before._messages.can_rest:
            self.give_up()
            return
        self._before = None
        connection = Connection(before._side, before._config, before._security, before=before)
        self.connection = connection
        self.member.belongs_to(connection)
        self.member.watched(weakly(connection._disconnected))
        try:
            connection._go_on_after(before, self.member, self, stale=not before._peer_rests)
            if not (before._messages.said_rest or connection._messages.say_rest()):
                raise ConnectionClosedError("it could not say that it rests")
        except Exception as error:
            # Without the traceback, whose frames would keep both for as long as the error is there.
            connection._give_up(self.member, error.with_traceback(None))
            if not isinstance(error, RDMAError | OSError):
                raise
        else:
            if before._peer_rests and connection._root is None:
                self._rested()

    def _rested(self) -> None:
        """The peer's side does, too."""
        self._both = True

    def control(self, message: protocol.Message) -> None:
        """What the peer says meanwhile.  ProtocolError for what is wrong."""
        match message:
            case protocol.Rest() if not self._both:
                self._rested()
            case protocol.Goodbye():
                self.gone(message)
            case _:
                raise ProtocolError(f"the peer sent a {type(message).__name__} while it rests")

    def get_up(self) -> Connection:
        connection = self.connection
        assert connection is not None
        self.family.get_up(self.member)
        connection._get_up(self._kin(connection))
        return connection

    def end(self) -> None:
        """It will be no connection any more."""


class AskersRest(Rest):
    """Of the side that may open it."""

    _opened: asyncio.Future[None] | None = None

    def _rested(self) -> None:
        super()._rested()
        self.family.ready(self.member)

    def open(self, connection: Connection) -> asyncio.Future[None]:
        """Ends with a connection, or with NotAsked, or RejectedError: then it rests on."""
        self._opened = self._loop.create_future()
        connection._messages.send_control(protocol.OPEN)
        return self._opened

    def late(self) -> None:
        """It has not been opened in time."""
        if self._opened is not None:
            self.give_up()

    def control(self, message: protocol.Message) -> None:
        opened = self._opened
        match message:
            case protocol.Opened() if opened is not None:
                self._opened = None
                self.get_up()
                if not opened.done():
                    opened.set_result(None)
            case protocol.Error() if opened is not None:
                self._opened = None
                self.family.ready(self.member)
                if not opened.done():
                    opened.set_exception(refusal(message))
            case _:
                super().control(message)

    def end(self) -> None:
        self.family.not_ready(self.member)
        opened, self._opened = self._opened, None
        if opened is not None and not opened.done():
            opened.set_exception(NotAsked("the pair that was to be opened is no more"))
            opened.exception()  # seen, also if nobody waits any more


def refusal(error: protocol.Error) -> RDMAError:
    """What who asked, or opened, is told: RejectedError, or NotAsked where another way may do."""
    text = printable(error.text)
    if error.code == protocol.ErrorCode.QUOTA:
        return RejectedError(text, reason=REJECTED_BY_APPLICATION, event="")
    return NotAsked(text)


class ListenersRest(Rest):
    """Of the side that is asked."""

    def __init__(
        self, before: Life, kin: Callable[[Connection], Kin], reception: Reception
    ) -> None:
        self._reception = reception
        reception.resting.add(self)
        super().__init__(before, kin)

    @property
    def _crowded(self) -> bool:
        reception = self._reception
        return (
            reception.closed or len(reception.resting) > reception.most_resting or super()._crowded
        )

    def control(self, message: protocol.Message) -> None:
        if not isinstance(message, protocol.Open):
            super().control(message)
            return
        connection = self.connection
        assert connection is not None
        try:
            self._reception.admit(connection, self.member.peer_address)
        except NoPlaceError as error:
            answer = protocol.Error(message.request_id, protocol.ErrorCode.QUOTA, str(error))
            connection._messages.send_control(answer)
        else:
            connection._messages.send_control(protocol.OPENED)
            self._reception.deliver(self.get_up())


async def open_again(family: Family, config: Config, patience: float) -> Connection | None:
    """A connection by a pair of the family that rests.  None: there is none, or it is no more."""
    rest = family.wake(config)
    if rest is None:
        return None
    assert isinstance(rest, AskersRest)
    connection = rest.connection
    assert connection is not None
    opened = rest.open(connection)
    connection._home = Home()  # whose it is now
    late = connection._loop.call_later(patience, rest.late)
    try:
        await opened
    except RejectedError:
        raise
    except NotAsked:
        return None
    except BaseException as error:
        connection._end(error)
        raise
    finally:
        late.cancel()
    return connection
