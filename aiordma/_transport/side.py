"""This side's half of a connection while it is brought up, and its orderly end.

A queue pair is no use alone: it needs a protection domain, completion entries and posted receives
before the peer can send, and all of it must go again in the verbs' order, also when the handshake
fails half way.  That is this object's job; both ways of connecting use it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from .. import verbs
from .._core.handshake import Hello
from .._loop.driver import Driver
from ..config import Config
from .work_queue import CONTROL_ENTRIES

# Reads and atomics under way at once that are asked for, unless the device offers less.
RD_ATOMIC = 16

# Of a frame: its header, and a message where it lies.
SEND_PIECES = 2

# Retransmissions before the peer counts as gone.  Not 7: rdma_rxe takes that for "for ever", which
# it is for rnr_retry only, and would never notice a queue pair that has died in silence.
RETRIES = 6

# The same for all connections of a listener.
_hello = lru_cache(maxsize=16)(Hello)


class Side:
    """Driver, completion entries and queue pair of one side.  `close` gives back what there is."""

    def __init__(
        self, driver: Driver, config: Config, *, authenticates: bool, takes_asks: bool = False
    ) -> None:
        """Takes over one use of `driver`."""
        self._authenticates = authenticates
        self._takes_asks = takes_asks
        self.driver = driver
        self.config = config
        attributes = driver.context.query_device()
        self.max_rd_atomic = min(RD_ATOMIC, attributes.max_qp_init_rd_atom)
        self.max_dest_rd_atomic = min(RD_ATOMIC, attributes.max_qp_rd_atom)
        receives = config.data_receives + config.control_receives
        self.capabilities = verbs.QPCapabilities(
            max_send_wr=min(config.send_queue + CONTROL_ENTRIES, attributes.max_qp_wr),
            max_recv_wr=receives,
            max_send_sge=min(SEND_PIECES, attributes.max_sge),
        )
        self._entries = self.capabilities.max_send_wr + receives
        try:
            self.cq = driver.reserve_cq(self._entries)
        except BaseException:
            driver.release()
            raise
        self.qp: verbs.QueuePair | None = None

    @property
    def hello(self) -> Hello:
        config = self.config
        return _hello(
            eager_size=config.eager_size,
            data_receives=config.data_receives,
            control_receives=config.control_receives,
            max_message=config.max_message,
            lend_quota=config.lend_quota,
            max_rd_atomic=self.max_rd_atomic,
            max_dest_rd_atomic=self.max_dest_rd_atomic,
            authenticates=self._authenticates,
            takes_asks=self._takes_asks,
        )

    def create_qp(
        self,
        make: Callable[[verbs.CompletionQueue, verbs.QPCapabilities], verbs.QueuePair],
    ) -> verbs.QueuePair:
        """`make` makes it with `reserved=True`: its completions have their room already."""
        self.qp = make(self.cq, self.capabilities)
        granted = self.qp.capabilities
        more = granted.max_send_wr + granted.max_recv_wr - self._entries
        if more > 0:  # the device has rounded up, and all of it may be posted
            self.cq.make_room(more)
            self._entries += more
        return self.qp

    def close(self) -> None:
        """Destroys what is left, in the verbs' order."""
        if self.qp is not None:
            self.qp.close()
        self.driver.release_cq(self.cq, self._entries)
        self.driver.release()
