"""This side's end of a connection: its queue pair, and what that needs.

A queue pair is no use alone: it needs a protection domain, completion entries and posted receives
before the peer can send, and all of it must go again in the verbs' order, also when the handshake
fails half way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from .. import verbs
from .._core.handshake import Endpoint, Hello
from .._datapath.work_queue import RESERVED_ENTRIES
from .._loop.driver import Driver
from ..config import Config
from ..errors import ProtocolError, host_port
from ..mr_pool import REMOTE_RIGHTS
from .auth import Security
from .lifecycle import Address

# Reads and atomics under way at once that are asked for, unless the device offers less.
RD_ATOMIC = 16

# Scatter/gather elements of a frame: its header, and a message where it lies.
SEND_PIECES = 2

# Retransmissions before the peer counts as gone.  Not 7: rdma_rxe takes that for "for ever", which
# it is for rnr_retry only, and would never notice a queue pair that has died in silence.
RETRIES = 6

# The same for all connections of a listener.
_hello = lru_cache(maxsize=16)(Hello)


class LocalEndpoint:
    """Driver, completion entries and queue pair.  `close` gives back what there is."""

    def __init__(
        self, driver: Driver, config: Config, security: Security, *, in_band: bool = False
    ) -> None:
        """Takes over one use of `driver`.  `in_band`: it accepts further connections in-band."""
        self.driver = driver
        self.config = config
        self.security = security
        self._in_band = in_band
        attributes = driver.context.query_device()
        self.max_rd_atomic = min(RD_ATOMIC, attributes.max_qp_init_rd_atom)
        self.max_dest_rd_atomic = min(RD_ATOMIC, attributes.max_qp_rd_atom)
        receives = config.data_receives + config.control_receives
        self.capabilities = verbs.QPCapabilities(
            max_send_wr=min(config.send_queue + RESERVED_ENTRIES, attributes.max_qp_wr),
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
            authenticates=self.security.auth is not None,
            in_band=self._in_band,
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


class AddressedEndpoint(LocalEndpoint):
    """One whose address the peer is told without the connection manager: `endpoint`."""

    def __init__(
        self,
        device: verbs.Device,
        config: Config,
        security: Security,
        address: Address | None,
        *,
        in_band: bool = False,
    ) -> None:
        """Uses the GID of `address`, or the best one if there is none of it."""
        driver = Driver.for_device(device, config.pool_limit, config.polling)
        super().__init__(driver, config, security, in_band=in_band)
        context = driver.context
        try:
            qp = self.create_qp(lambda cq, caps: driver.pd.create_qp(cq, cq, caps, reserved=True))
            try:
                host = address[0].partition("%")[0] if address else ""
                gid = context.find_gid(host) if host else context.choose_gid()
            except ValueError:
                gid = context.choose_gid()
            self.endpoint: Endpoint = qp.endpoint(
                gid, max_rd_atomic=self.max_rd_atomic, max_dest_rd_atomic=self.max_dest_rd_atomic
            )
        except BaseException:
            self.close()
            raise

    def packed(self) -> bytes:
        """What the peer is told: the endpoint and the hello."""
        return self.endpoint.pack() + self.hello.pack()

    def connect(self, remote: Endpoint, address: Address | None) -> None:
        """Brings the queue pair up; the peer must not send before it has been told.

        `address` is the peer's, for errors.
        """
        assert self.qp is not None
        if remote == self.endpoint:
            peer = host_port(address) if address is not None else "the peer"
            raise ProtocolError(f"{peer} sends back this side's own endpoint: an echo server?")
        try:
            self.qp.connect(self.endpoint, remote, access=REMOTE_RIGHTS, retry_cnt=RETRIES)
        except ValueError as error:
            raise ProtocolError(f"the peer's queue pair does not fit: {error}") from error
