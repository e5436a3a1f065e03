"""The lifecycle of a connection: its parts, its states, and the error with which it ends.

`_core/connection_states.py` defines the transitions, and this module implements them. When the
connection ends, all waiters fail with the same error as the cause. Messages that had arrived can
still be received. The resources are released in the next iteration of the loop.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from .. import verbs
from .._core import protocol
from .._core.connection_states import (
    CLOSING,
    LIMITED,
    Cause,
    ConnectionState,
    LifecycleEvent,
    transition,
)
from .._core.finalizers import finalizer
from .._core.refusal import REJECTED_BY_APPLICATION
from .._core.region import granter
from .._datapath.controls import Controls
from .._datapath.rail import SendQueue
from .._datapath.session import Session
from .._event_loop import shutdown
from .._event_loop.affinity import LoopAffinity
from .._event_loop.futures import settle
from ..cm.address import Address
from ..errors import (
    AuthenticationError,
    ConnectionBrokenError,
    ConnectionClosedError,
    IntegrityError,
    ProtocolError,
    RDMAError,
    RejectedError,
    WorkCompletionError,
    cause_text,
    host_port,
    short_cause,
)
from .auth import NOT_THE_SAME_KEY
from .endpoint import RailEndpoint
from .failover import Failover, rail_observers
from .handshake import CONTROLS, Action, Direction, Handshake
from .keep_alive import KeepAlive, start_keep_alive
from .memory import Memory
from .rails import AnsweringRails, OfferingRails, Rails
from .sharing import Sharing

logger = logging.getLogger("aiordma.connection")

OPEN = ConnectionState.OPEN
FAILURES = frozenset({LifecycleEvent.BROKEN, LifecycleEvent.ABORTED})


class Link(Protocol):
    """The socket or connection-manager id behind a connection. Closing it notifies the peer."""

    @property
    def local_address(self) -> Address | None: ...

    @property
    def peer_address(self) -> Address | None: ...

    def established(self, on_end: Callable[[str], None]) -> None:
        """Finish the handshake. When the peer disconnects, call `on_end` once with the reason."""

    def close(self) -> None:
        """Disconnect before the queue pair is destroyed. Must not raise or block."""

    def release(self) -> None:
        """Release all resources after the queue pair has been destroyed."""


class NoLink:
    """A placeholder for connections without a socket or connection-manager id.

    Some connections are created without a link. Others close their link when the first rail breaks.
    The addresses are known only in the latter case.
    """

    def __init__(self, local: Address | None = None, peer: Address | None = None) -> None:
        self.local_address, self.peer_address = local, peer

    def established(self, on_end: Callable[[str], None]) -> None:
        """Do nothing, because only a link can report that the peer has disconnected."""

    def close(self) -> None:
        """Do nothing, because without a link only the goodbye message can notify the peer."""

    def release(self) -> None:
        """Do nothing, because there is nothing to release."""


def goodbye_error(goodbye: protocol.Goodbye, max_message: int) -> RDMAError:
    """Convert the peer's goodbye to an error. `max_message` is this side's limit."""
    codes, text = protocol.GoodbyeCode, goodbye.text
    match goodbye.code:
        case codes.NORMAL:
            why = ": its server is shutting down" if goodbye == protocol.GOING_AWAY else ""
            return ConnectionClosedError(f"the peer has closed the connection{why}", by_peer=True)
        case codes.FAILED:
            return ConnectionBrokenError(protocol.describe_failure(goodbye, max_message))
        case codes.NOT_AUTHENTICATED:
            return AuthenticationError(NOT_THE_SAME_KEY)
        case codes.REJECTED:
            why = f"the listener's application refused the connection: {text}"
            reason = REJECTED_BY_APPLICATION
            return RejectedError(why, reason=reason, event="", by_application=True)
    return ConnectionBrokenError(f"the peer aborted the connection (code {goodbye.code}): {text}")


class InbandHandler(Protocol):
    """A handler for the control messages that open further connections (connect_inband.py)."""

    def handle_control(self, message: protocol.Message) -> bool:
        """Process a message. Returns False if it is not for this handler.

        Raises:
            ProtocolError: If the message is invalid.
        """

    def end(self) -> None:
        """Handle the end of the connection. Must not raise."""


class ControlChannel:
    """A connection's interface for opening further connections in-band.

    It refers to the connection only weakly.
    """

    def __init__(self, connection: ConnectionLifecycle) -> None:
        self._connection = weakref.ref(connection)
        self._messages, self.owner = connection._messages, connection._owner
        self.controls: Controls = self._messages.controls

    @property
    def handler(self) -> InbandHandler | None:
        connection = self._connection()
        return connection._inband if connection is not None else None

    def set_handler(self, handler: InbandHandler) -> None:
        """Let `handler` process the control messages that open further connections."""
        connection = self._connection()
        if connection is not None:
            connection._inband = handler

    @property
    def is_open(self) -> bool:
        connection = self._connection()
        return connection is not None and connection._state is OPEN

    @property
    def peer_closed(self) -> bool:
        """Whether the peer has said goodbye."""
        connection = self._connection()
        return connection is not None and connection._peer_close_error is not None

    @property
    def ended(self) -> bool:
        return self._messages.ended

    def send(self, message: protocol.Message) -> None:
        """Send a message as soon as a credit is available, unless the connection has ended."""
        if not self._messages.ended:
            self.controls.send(message)


class ConnectionLifecycle(shutdown.EndsWhenDropped):
    """The parts and state of a connection, from the handshake until its resources are released."""

    def __init__(self, endpoint: RailEndpoint, handshake: Handshake) -> None:
        """Take over `endpoint`, whose queue pair must exist."""
        config = endpoint.config
        self._endpoint = endpoint
        self._handshake = handshake
        self._handshake_progress: asyncio.Future[None] | None = None
        self._keep_alive: KeepAlive | None = None
        self._affinity = LoopAffinity()
        self._loop = self._affinity.loop
        self._loop_shutdown = shutdown.for_running_loop()
        self._link: Link | None = None
        self._inband: InbandHandler | None = None
        self._rails: Rails | None = None
        self._state = ConnectionState.CONNECTING
        self._close_cause: BaseException | None = None
        self._peer_close_error: RDMAError | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._closed = asyncio.Event()
        self._on_closed: Callable[[], None] | None = None
        # The device keeps the parts alive. The parts refer to the connection only weakly, so that a
        # connection that the user drops can be finalized (`__del__`).
        self._owner = ConnectionOwner(self)
        driver = endpoint.driver
        queue = endpoint.make_queue(self._owner)
        self._owner.qp_num = queue.qp.qp_num
        self._memory = Memory(driver, self._owner.error_for)
        self._messages = Session(queue=queue, memory=self._memory, config=config, owner=self._owner)
        self._messages.awaiting_auth = endpoint.security.auth is not None
        if endpoint.security.encrypt:
            from . import encryption  # noqa: PLC0415 - it needs a package

            memory_in_clear = endpoint.security.memory_in_clear
            sealing = encryption.new_sealing(memory_in_clear=memory_in_clear)
            self._messages.outbox.sealing = sealing
            handshake.exchange = encryption.KeyExchange(sealing)
        queue.frame_handler = self._messages
        self._sharing = Sharing(driver, config, self._messages, self._owner)
        self._loop_shutdown.add(self)

    def _advance(self, event: LifecycleEvent, error: BaseException | None = None) -> bool:
        """Apply an event to the state machine. Returns False if the current state ignores it.

        If the event can end the connection, the caller must pass the reason as `error`.
        """
        if event not in FAILURES:  # a failure that was not reported yet comes before the event
            self._detect_failure()
        old_state, row = self._state, transition(self._state, event)
        if row is None:
            return False
        self._state = row.next
        if row.cause is not None:
            if row.cause is Cause.PEER:
                error = self._peer_close_error
            elif row.cause is Cause.CLOSED:
                error = ConnectionClosedError()
            assert error is not None
            self._fail_waiters(error)
        elif row.next in LIMITED and old_state not in LIMITED:
            self._close_timer = self._loop.call_later(
                self._endpoint.config.close_timeout, shutdown.weak_method(self._finish)
            )
        return True

    def _take_link(self, link: Link) -> None:
        """Take over a working link. Raises the error if the queue pair has failed."""
        self._detect_failure()
        self._check_end()
        self._link = link
        self._owner.local, self._owner.peer = link.local_address, link.peer_address

    def _create_peer_parts(self, devices: tuple[verbs.Device, ...]) -> None:
        """Create the parts that depend on the peer. `devices` are those of the rails, if any."""
        assert self._link is not None
        handshake = self._handshake
        config, security = self._endpoint.config, self._endpoint.security
        client = handshake.client
        if handshake.peer.rails and handshake.hello.rails:
            rails_class = OfferingRails if client else AnsweringRails
            self._rails = rails_class(
                self._owner,
                self._messages,
                rail_observers(self._messages, self._memory, self._sharing),
                self._sharing.clock.now,
                config,
                security,
                devices,
                self._link.peer_address,
                self._loop.call_later,
            )
            self._messages.failover = Failover(self._rails, shutdown.weak_method(self._end))
        self._messages.awaiting_admission = handshake.is_inspected and not client
        assert self._endpoint.qp is not None
        qp_num, peer_qp_num = self._endpoint.qp.qp_num, self._endpoint.qp.query().dest_qp_num
        handshake.peer_qp_num = peer_qp_num
        own_granter = granter(qp_num, peer_qp_num, client=client)
        peer_granter = granter(peer_qp_num, qp_num, client=not client)
        if not peer_qp_num:  # iWARP has no QP numbers
            own_granter = peer_granter = 0
        self._sharing.begin(own_granter, peer_granter)
        self._keep_alive = start_keep_alive(self._queue, self._endpoint.driver.timers, config)
        if self._rails is not None:
            self._rails.lead_rail.keep_alive = self._keep_alive

    def _start_messages(self) -> None:
        """Process the frames that have arrived, and continue the handshake on the queue pair."""
        if self._handshake.peer_authenticated:
            self._messages.awaiting_auth = False
            if (sealing := self._messages.outbox.sealing) is not None:
                # The keys were exchanged on the socket, not in frames.
                sealing.encrypt_first_frames()
        self._messages.start(self._handshake.peer, rails=self._rails is not None)
        self._continue_handshake()

    def _continue_handshake(self) -> None:
        """Perform the next steps of the handshake, up to a message from the peer or INSPECT."""
        handshake = self._handshake
        while True:
            step = handshake.next_step
            if step.direction is Direction.SEND:
                message = handshake.send()
                assert not isinstance(message, bytes)
                if not self._messages.ended:
                    self._messages.controls.send(message)
                self._detect_failure()  # detect a failure before the key counts as proved
            elif step.kind is Action.GRANT and self._state is ConnectionState.AUTHENTICATING:
                handshake.done(Action.GRANT)
                self._messages.awaiting_auth = False
                self._endpoint.grant_rights()
                self._advance(LifecycleEvent.PROVED)
            else:
                break
        self._wake_handshake()

    async def _wait_for_handshake(self) -> None:
        """Wait until the peer's next message. Raises the error if the connection ends first."""
        self._check_end()
        self._handshake_progress = self._loop.create_future()
        await self._handshake_progress
        self._handshake_progress = None

    def _wake_handshake(self) -> None:
        if self._handshake_progress is not None:
            settle(self._handshake_progress)

    def _report_end(self) -> None:
        """Report the end to counters and hooks, unless the user never received the connection."""
        raise NotImplementedError

    def _give_up(self, link: Link, error: BaseException) -> None:
        """Release everything, including `link`, after a failed handshake."""
        self._link = link
        if self._state is ConnectionState.CLOSED:  # the queue pair failed before the link was set
            link.release()
        self._end(error)

    def _check(self) -> None:
        if _get_running_loop() is not self._loop:
            self._affinity.check(self)
        if self._state is not OPEN:
            self._check_end()
            if self._state in CLOSING:
                raise ConnectionClosedError("the connection is being closed")

    def _check_end(self) -> None:
        if self._close_cause is not None:
            raise self._owner.error_for(self._close_cause)

    @property
    def _queue(self) -> SendQueue:
        """The send queue of the lead."""
        return self._messages.lead

    @property
    def _is_ending(self) -> bool:
        """Whether the connection has ended, or either side is closing it."""
        return (self._queue.failed and not self._queue.suspended) or self._state in LIMITED

    def _process_control(self, message: protocol.Message) -> None:
        if type(message) in CONTROLS:
            try:
                self._handshake.receive_control(message)
            except AuthenticationError as error:
                self._end_and_report(error)
            else:
                # Continue here, because the peer's next message may be processed before the task
                # that opens the connection resumes.
                self._continue_handshake()
            return
        match message:
            case protocol.Goodbye():
                self._on_peer_goodbye(goodbye_error(message, self._endpoint.config.max_message))
            case protocol.Ping():
                self._messages.controls.send(protocol.Pong(message.request_id))
            case _ if self._inband is not None and self._inband.handle_control(message):
                pass  # even before admission, because further connections are inspected too
            case _ if self._messages.awaiting_admission:
                raise ProtocolError(
                    f"the peer sent a {type(message).__name__} before its connection was accepted"
                )
            case _ if self._rails is not None and self._rails.handle_control(message):
                pass
            case _:
                self._sharing.handle_control(message)

    def _on_peer_goodbye(self, error: RDMAError) -> None:
        """Process the peer's goodbye, which has been converted to `error`.

        Send and receive completions are not ordered. Sends that the peer has received may therefore
        complete after this call. Sends that are still outstanding when the peer disconnects, or
        when `close_timeout` expires, are lost.
        """
        if not self._advance(LifecycleEvent.PEER_GOODBYE):
            return
        self._peer_close_error = error
        self._messages.peer_has_left = True
        self._queue.retire(error)

    def _end_and_report(self, error: ProtocolError | AuthenticationError) -> None:
        """Send the peer a goodbye with the error. End the connection without awaiting delivery."""
        code = protocol.GoodbyeCode.PROTOCOL_ERROR
        if isinstance(error, IntegrityError) and self._messages.awaiting_auth:
            # If the first frames cannot be decrypted, the peer probably has a different key.
            error = AuthenticationError(
                f"the peer does not have the key given as auth=, or {error}"
            )
        if isinstance(error, AuthenticationError):
            code = protocol.GoodbyeCode.NOT_AUTHENTICATED
        logger.warning("%r: %s", self, error)
        self._messages.controls.send(protocol.Goodbye(0, code, str(error)))
        self._end(error.with_traceback(None))  # the frames refer to this connection

    def _on_disconnected(self, reason: str) -> None:
        """Handle a disconnect by the peer, which ends the connection or only its first rail.

        Poll first, because the peer's goodbye may still be in the completion queue.
        """
        if self._close_cause is None:
            self._endpoint.driver.poll()
        error = ConnectionBrokenError(reason)
        # If this side has said goodbye, the disconnect is the peer's response and not a failure of
        # the first rail.
        other_rails_continue = (
            self._rails is not None and self._state is not ConnectionState.GOODBYE_SENT
        )
        # A link that does not belong to the first queue pair serves all rails. Its end means that
        # the peer has ended the connection.
        if self._endpoint.link_ends_with_qp and other_rails_continue:
            self._queue.rail_broke(error)
        else:
            self._end(error)

    def _detect_failure(self) -> None:
        """End the connection if its queue pair has failed. Does nothing if it has already ended."""
        if self._queue.failed and not self._queue.suspended and self._queue.error is not None:
            self._end(self._queue.error)

    def _detect_rail_failures(self) -> None:
        """Handle failed queue pairs on all rails, and replace a broken lead.

        Do not call this from within a drain.
        """
        self._detect_failure()
        if self._rails is not None and self._close_cause is None:
            self._rails.stop_failed()
            if self._queue.suspended:
                self._fail_over()

    def _fail_over(self) -> None:
        """Replace a broken lead with another rail."""
        # A link that belongs to the first queue pair ends with it. The connection continues on
        # another rail without a link.
        link, abandons_link = self._link, self._endpoint.link_ends_with_qp
        assert link is not None
        if abandons_link:
            link.close()
        try:
            self._messages.failover.fail_over(self._queue)
        except ProtocolError as error:
            self._end_and_report(error)
        except (RDMAError, OSError, MemoryError) as error:  # registering memory has failed
            self._end(error)
        finally:
            if abandons_link:
                self._link = NoLink(link.local_address, link.peer_address)
                link.release()

    def _end(self, error: BaseException) -> None:
        """End the connection with `error`, unless it has already ended.

        If the queue pair failed first, its error is used instead, unless the queue pair is
        suspended, which means that another rail takes over its work.
        """
        if self._queue.failed and not self._queue.suspended:
            error = self._queue.error or error
        broken = isinstance(error, ConnectionBrokenError | WorkCompletionError)
        if self._advance(LifecycleEvent.BROKEN if broken else LifecycleEvent.ABORTED, error):
            # Release the resources later, because this may be called within a drain or a post.
            self._loop.call_soon(self._tear_down)

    def _finish(self, *, at_once: bool = False) -> None:
        """Finish closing the connection, unless it has already ended.

        `at_once` releases the resources immediately. Do not use it within a drain.
        """
        if self._state in (ConnectionState.DRAINING, ConnectionState.GOODBYE_SENT):
            # The peer has not said goodbye, so it may still be sending. Refuse further messages,
            # but deliver those that have arrived, because the peer has seen their sends succeed.
            self._queue.stop(ConnectionClosedError())
        if self._advance(LifecycleEvent.FINISHED, ConnectionClosedError()):
            if at_once and not self._queue.table.wakeups.calling_back:
                self._tear_down()
            else:
                self._loop.call_soon(self._tear_down)

    def _fail_waiters(self, root: BaseException) -> None:
        """Fail all waiting operations with `root`, which has ended the connection."""
        self._close_cause = root
        if self._close_timer is not None:
            self._close_timer.cancel()
        if self._keep_alive is not None:
            self._keep_alive.stop()
        self._wake_handshake()
        if self._inband is not None:
            self._inband.end()
        self._queue.fail(root)
        if self._rails is not None:
            self._messages.failover.end()
            self._rails.end(root)
        self._memory.end(root)
        self._sharing.end(root)
        self._messages.end(root)

    async def _end_with_loop(self) -> None:
        if self._state not in CLOSING:
            self._end(ConnectionClosedError("the event loop of the connection has ended"))
        await self._closed.wait()

    def _end_without_loop(self) -> None:
        """End the connection and release its resources after its event loop has been closed."""
        if self._state is ConnectionState.CLOSED:
            return
        if self._close_cause is None:
            self._state = ConnectionState.ENDED  # its waiters have ended with the loop
            self._close_cause = ConnectionClosedError("its event loop has been closed")
        self._tear_down()

    def _tear_down(self) -> None:
        """Release the resources after the connection has ended, and wake `wait_closed`."""
        try:
            self._release_resources()
        finally:  # even if the device cannot destroy an object
            self._advance(LifecycleEvent.RELEASED)
            if self._loop.is_closed():
                self._closed = asyncio.Event()  # its waiters have ended with the loop
            self._closed.set()
            self._loop_shutdown.remove(self)
            self._report_end()

    def _release_resources(self) -> None:
        with ExitStack() as steps:  # runs all steps in reverse order, even if one fails
            if self._link is not None:
                steps.callback(self._link.release)
            steps.callback(self._endpoint.close)
            steps.callback(self._memory.close)
            if self._rails is not None:
                steps.callback(self._rails.close)
            steps.callback(self._messages.close)
            if self._rails is not None:
                steps.callback(self._rails.close_queues)
            steps.callback(self._queue.close)
            steps.callback(self._sharing.end_keys)  # not ended yet if the loop was closed
            steps.callback(self._messages.outbox.offers.end_windows)
            if self._link is not None:
                steps.callback(self._link.close)
            if self._on_closed is not None:
                steps.callback(self._on_closed)

    def _is_open(self) -> bool:
        return self._close_cause is None

    def _drop(self) -> None:
        self._end(ConnectionClosedError("the connection was dropped"))

    @finalizer
    def __del__(self) -> None:
        """Abort a connection that the user dropped without closing it. May run in any thread."""
        super().__del__()
        ended = getattr(self, "_close_cause", None) is not None
        if ended and self._loop.is_closed() and not self._affinity.is_after_fork:
            self._end_without_loop()  # the loop was closed before the scheduled tear-down


class ConnectionOwner:
    """The interface that a connection provides to its parts (`Owner` in protocols.pyi)."""

    __slots__ = ("_connection", "local", "on_early", "peer", "qp_num")

    def __init__(self, connection: ConnectionLifecycle) -> None:
        self._connection = weakref.ref(connection)
        self.on_early: Callable[[], object] | None = None
        """Called when a frame arrives before this side has finished the handshake."""
        self.local: Address | None = None
        self.peer: Address | None = None
        self.qp_num = 0
        """The number of the first queue pair, which identifies the connection in logs."""

    @property
    def peer_name(self) -> str:
        return "the peer" if self.peer is None else host_port(self.peer)

    @property
    def name(self) -> str:
        peer = "a peer" if self.peer is None else host_port(self.peer)
        local = "" if self.local is None else f" from {host_port(self.local)}"
        return f"{peer}{local} (QP {self.qp_num})"

    def control(self, message: protocol.Message) -> None:
        if (connection := self._connection()) is not None:
            connection._process_control(message)

    def violated(self, error: ProtocolError) -> None:
        if (connection := self._connection()) is not None:
            connection._end_and_report(error)

    def broken(self, error: BaseException) -> None:
        connection = self._connection()
        # If the loop is closed, the loop's shutdown releases the connection.
        if connection is not None and not connection._loop.is_closed():
            connection._loop.call_soon(connection._detect_rail_failures)

    def early(self) -> None:
        if self.on_early is not None:
            self.on_early()

    def emptied(self) -> None:
        if (connection := self._connection()) is not None:
            connection._finish()

    def check(self) -> None:
        if (connection := self._connection()) is not None:
            connection._check()

    def check_loop(self) -> None:
        if (connection := self._connection()) is not None:
            connection._affinity.check(connection)

    def error_for(self, root: BaseException, operation: str = "") -> BaseException:
        """Return a new exception for one waiter after the connection has ended with `root`.

        `operation` describes the operation that the waiter awaits, if it is known.
        """
        prefix = f"{operation}: " if operation else ""
        if isinstance(root, ConnectionClosedError):
            return ConnectionClosedError(f"{prefix}{root}", by_peer=root.by_peer)
        error: Exception
        address = host_port(self.peer) if self.peer is not None else ""
        with_peer = f" with {address}" if address not in operation else ""
        if isinstance(root, RejectedError):
            error = copy.copy(root)
        elif isinstance(root, ProtocolError | AuthenticationError):
            error = type(root)(f"{prefix}{cause_text(root)}")
        else:
            error = ConnectionBrokenError(
                f"{prefix}the connection{with_peer} broke: {short_cause(root)}"
            )
        # Omit a cause whose text this error already contains, because a traceback would print the
        # text twice.
        repeats_root = isinstance(root, ConnectionError | ProtocolError)
        error.__cause__ = root.__cause__ if repeats_root else root
        return error
