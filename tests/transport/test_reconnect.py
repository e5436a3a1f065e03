"""Test after which errors `reconnect` tries again.

tests/simulation tests servers that die at any moment.
"""

from __future__ import annotations

import errno
import itertools

import pytest

from aiordma import RDMAError
from aiordma.errors import (
    AddressError,
    AuthenticationError,
    ConnectionBrokenError,
    ConnectionClosedError,
    ConnectionManagerError,
    DeviceNotFoundError,
    HandshakeBrokenError,
    ProtocolError,
    RejectedError,
    RouteError,
    UnreachableError,
    UnsupportedError,
    VerbsError,
)
from aiordma.reconnecting import is_temporary
from aiordma.verbs import QPState, QueuePair
from aiordma.verbs._qp.qp_attributes import QPChanges

from .connection_factory import ConnectionFactory
from .marks import by_tcp, one_loop


@pytest.mark.parametrize(
    ("error", "temporary"),
    [
        (RejectedError(reason=8), True),
        (AddressError("no such host"), True),
        (RouteError("no route"), True),
        (UnreachableError("no answer"), True),
        (ConnectionManagerError("removed", event="RDMA_CM_EVENT_DEVICE_REMOVAL"), True),
        (HandshakeBrokenError("after 3 bytes"), True),
        (ConnectionBrokenError(), True),
        (ConnectionClosedError(by_peer=True), True),
        (ConnectionResetError(), True),
        (ConnectionManagerError("through another device than the one that was named"), False),
        (AuthenticationError("another key"), False),
        (ProtocolError("not aiordma"), False),
        (DeviceNotFoundError("mlx5_9"), False),
        (UnsupportedError("RC"), False),
        (ValueError("port 70000"), False),
        (TypeError("a port as a string"), False),
        (MemoryError(), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_reconnect_retries_only_after_temporary_errors(error: Exception, temporary: bool) -> None:
    assert is_temporary(error) is temporary


@by_tcp  # librdmacm brings up its queue pairs itself
@one_loop
@pytest.mark.parametrize("dies", ["the peer", "the device"])
async def test_handshake_error_is_temporary_only_when_the_peer_died(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """A device that is connected to the peer's process notices its death, and refuses the next
    step.
    """
    bring_up = QueuePair._bring_up
    count = itertools.count()

    def interrupted(self: QueuePair, changes: QPChanges) -> None:
        bring_up(self, changes)
        if next(count) == 0:
            return  # the listener's
        self.modify(qp_state=QPState.ERR)
        if dies == "the device":
            raise VerbsError(errno.EIO, "the device has failed")
        self.modify(cur_qp_state=QPState.RTR, qp_state=QPState.RTS)

    async with await factory.listen() as listener:
        monkeypatch.setattr(QueuePair, "_bring_up", interrupted)
        with pytest.raises(RDMAError) as caught:
            await factory.connect(listener.port)
    if dies == "the peer":
        assert type(caught.value) is HandshakeBrokenError
        assert "closed during the handshake" in str(caught.value)
    else:
        assert type(caught.value) is VerbsError
    assert is_temporary(caught.value) is (dies == "the peer")
