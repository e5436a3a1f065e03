"""This side's end of a connection: its queue pair and the objects that the queue pair needs.

A queue pair needs a protection domain, completion queue entries, and receives posted before the
peer can send. All of them must be released in the order that verbs require, even if the handshake
fails half-way.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from .. import verbs
from .._core.handshake_layout import Endpoint, Hello
from .._datapath.rail import RESERVED_ENTRIES, SendQueue
from .._event_loop.driver import Driver
from ..cm.address import Address
from ..config import Config
from ..errors import (
    HandshakeBrokenError,
    ProtocolError,
    RDMAError,
    RouteError,
    VerbsError,
    host_port,
)
from ..mr_pool import REMOTE_RIGHTS
from ..verbs._device.route_lookup import NO_ROUTE
from .auth import Security

if TYPE_CHECKING:
    from .._datapath.protocols import Owner

logger = logging.getLogger("aiordma.connection")

NO_RIGHTS = verbs.AccessFlags.NONE

# Maximum number of outstanding reads and atomics per queue pair. The device may support fewer.
RD_ATOMIC = 16

# A frame needs one scatter/gather element for its header, and a second one for a payload that is
# sent in place.
SEND_PIECES = 2

# Cached, because a listener sends the same hello on all its connections.
_hello = lru_cache(maxsize=16)(Hello)


def make_hello(
    config: Config,
    security: Security,
    *,
    in_band: bool = False,
    rails: bool = False,
    max_rd_atomic: int = 0,
    max_dest_rd_atomic: int = 0,
) -> Hello:
    """Create this side's hello. Omit the device limits (`max_...`) if no endpoint exists yet.

    A hello without these limits can be sent before the device is known. The peer can then see
    early in the handshake whether this side has a key.
    """
    return _hello(
        eager_size=config.eager_size,
        data_receives=config.data_receives,
        control_receives=config.control_receives,
        max_message=config.max_message,
        lend_quota=config.lend_quota,
        max_rd_atomic=max_rd_atomic,
        max_dest_rd_atomic=max_dest_rd_atomic,
        authenticates=security.auth is not None,
        encrypts=bool(security.encrypt),
        memory_in_clear=security.memory_in_clear,
        in_band=in_band,
        rails=rails,
        stream=security.stream,
        inspects=security.inspects,
    )


def max_rails(config: Config, devices: tuple[verbs.Device, ...]) -> int:
    """Return the maximum number of rails per connection, by default one for each device."""
    return config.max_rails or len(devices)


# These verbs errors mean that the port is not active, or that the GID has no route to the peer.
_ROUTE_ERRORS = NO_ROUTE | {errno.ENETDOWN}


@contextmanager
def route_errors() -> Iterator[None]:
    """Convert verbs errors about the route to RouteError.

    The error message names the port and its state, or both GIDs and the GID index.
    """
    try:
        yield
    except VerbsError as error:
        if error.errno not in _ROUTE_ERRORS:
            raise
        raise RouteError(error.strerror or "", status=-error.errno) from error


@cache  # logs once per device and level
def log_missing_windows(name: str, level: int) -> None:
    """Log that a device cannot restrict memory keys to one connection."""
    logger.log(
        level,
        "%s does not support memory windows of type 2, so a memory key is valid on every "
        "connection of its event loop (docs/security.md)",
        name,
    )


class ForeignAddressError(ProtocolError):
    """The address in the peer's endpoint is not the peer's address."""


class RailEndpoint:
    """The resources of a rail on this side: the driver, completion queue entries and queue pair.

    `close` releases all of them that exist.
    """

    link_ends_with_qp = True
    """Whether the connection's link belongs to this queue pair and ends with it.

    This is True for a connection-manager id. A TCP socket serves the whole connection instead.
    """

    def __init__(
        self, driver: Driver, config: Config, security: Security, extra_receives: int = 0
    ) -> None:
        """Take over one reference to `driver`.

        `extra_receives` is the number of receives in addition to those that `config` specifies.
        """
        if not driver.pool.has_windows:
            level = logging.INFO if security.auth is None else logging.WARNING
            log_missing_windows(driver.context.name, level)
        self.driver = driver
        self.config = config
        self.security = security
        attributes = driver.context.query_device()
        self.max_rd_atomic: int = min(RD_ATOMIC, attributes.max_qp_init_rd_atom)
        self.max_dest_rd_atomic: int = min(RD_ATOMIC, attributes.max_qp_rd_atom)
        receives = config.data_receives + config.control_receives + extra_receives
        self.capabilities: verbs.QPCapabilities = verbs.QPCapabilities(
            max_send_wr=min(config.send_queue + RESERVED_ENTRIES, attributes.max_qp_wr),
            max_recv_wr=receives,
            max_send_sge=min(SEND_PIECES, attributes.max_sge),
        )
        self._cq_entries = self.capabilities.max_send_wr + receives
        try:
            driver.warn_of_ignored_settings(config)
            self.cq: verbs.CompletionQueue = driver.reserve_cq(self._cq_entries)
        except BaseException:
            driver.release()
            raise
        self.qp: verbs.QueuePair | None = None

    def create_qp(
        self, make: Callable[[verbs.CompletionQueue, verbs.QPCapabilities], verbs.QueuePair]
    ) -> verbs.QueuePair:
        """Create the queue pair by calling `make`.

        `make` must pass `reserved=True`, because the completion queue entries are already reserved.
        """
        self.qp = make(self.cq, self.capabilities)
        # On the embedded device, the queue pair fails when the peer's process ends.
        self.driver.context.library.end_with_peer(self.qp.pointer)
        granted = self.qp.capabilities
        extra_entries = granted.max_send_wr + granted.max_recv_wr - self._cq_entries
        if extra_entries > 0:  # the device has rounded up, so more entries may be used
            self.cq.make_room(extra_entries)
            self._cq_entries += extra_entries
        return self.qp

    def packed(self, hello: Hello) -> bytes:
        """Return what the peer needs to know about this endpoint: the packed hello."""
        return hello.pack()

    def make_queue(self, owner: Owner) -> SendQueue:
        """Create the rail's send queue, which must be closed before this endpoint."""
        assert self.qp is not None
        return SendQueue(self.driver, self.qp, owner)

    def withhold_rights(self) -> None:
        """Disable remote access on a connected queue pair until the peer has been authenticated.

        Until then, the peer cannot access any memory, even with a valid memory key.
        """
        self._set_rights(NO_RIGHTS)

    def grant_rights(self) -> None:
        """Enable remote access on the queue pair after the peer has been authenticated."""
        self._set_rights(REMOTE_RIGHTS)

    def _set_rights(self, rights: verbs.AccessFlags) -> None:
        assert self.qp is not None
        try:
            self.qp.modify(qp_access_flags=rights)
        except (RDMAError, OSError) as error:
            # The queue pair has already failed, and the connection handles that separately.
            logger.debug("rights of %r: %s", self.qp, error)

    def close(self) -> None:
        """Destroy all resources that exist, in the order that verbs require."""
        try:
            if self.qp is not None:
                self.qp.close()  # on failure, keep the entries for later completions
            self.driver.release_cq(self.cq, self._cq_entries)
        finally:
            self.driver.release()


def host_part(address: Address | None) -> str:
    return address[0].partition("%")[0] if address else ""


def local_gid(
    context: verbs.Context,
    config: Config,
    address: Address | None,
    peer_gid: verbs.GID | None = None,
) -> verbs.GIDEntry:
    """Return the entry for `Config.gid_index` or `address`, or the best one to reach `peer_gid`.

    Raises:
        VerbsError: If the GID table has no entry at `Config.gid_index` (ENODATA).
    """
    host = host_part(address)
    try:
        entry = context.find_gid(host) if host else context.choose_gid(to=peer_gid)
    except ValueError:
        entry = context.choose_gid(to=peer_gid)
    if config.gid_index is None:
        return entry
    return context.query_gid(config.gid_index, entry.port_num)


def listener_name(address: Address | None) -> str:
    """Describe the listener at `address` for warnings about devices that it has opened."""
    return f"the listener on {host_port(address)}" if address is not None else "a listener"


def open_driver(
    devices: tuple[verbs.Device, ...], config: Config, address: Address | None, opener: str
) -> Driver:
    """Return the driver of the device that has `address`, or of the first device that opens.

    `opener` describes the connection or listener.
    """
    host = host_part(address)
    # A single device needs no search. It is used even if it does not have the address.
    candidates = devices if host and len(devices) > 1 else ()
    for device in candidates:
        with suppress(RDMAError, OSError, ValueError):
            driver = Driver.for_device(device, config, opener)
            try:
                driver.context.find_gid(host)
            except BaseException:
                driver.release()
                raise
            return driver
    # If no device opens, raise the error of the last one.
    for device in devices[:-1]:
        with suppress(RDMAError, OSError):
            return Driver.for_device(device, config, opener)
    return Driver.for_device(devices[-1], config, opener)


class AddressedEndpoint(RailEndpoint):
    """The endpoint of a rail without the connection manager. `endpoint` is sent to the peer."""

    link_ends_with_qp = False

    def __init__(
        self,
        devices: tuple[verbs.Device, ...],
        config: Config,
        security: Security,
        address: Address | None,
        peer_gid: verbs.GID | None = None,
        *,
        opener: str,
        extra_receives: int = 0,
    ) -> None:
        """Create the queue pair on the device that has `address`, or on the first that opens.

        `local_gid` chooses this side's GID from `address` and `peer_gid`. `opener` describes the
        connection or listener.
        """
        driver = open_driver(devices, config, address, opener)
        super().__init__(driver, config, security, extra_receives)
        context = driver.context
        try:
            qp = self.create_qp(lambda cq, caps: driver.pd.create_qp(cq, cq, caps, reserved=True))
            gid = local_gid(context, config, address, peer_gid)
            self._pkey_index = (
                0 if config.pkey is None else context.find_pkey(config.pkey, gid.port_num)
            )
            with route_errors():
                endpoint = qp.endpoint(
                    gid,
                    max_rd_atomic=self.max_rd_atomic,
                    max_dest_rd_atomic=self.max_dest_rd_atomic,
                )
            if config.path_mtu is not None:
                code = (config.path_mtu // 128).bit_length() - 1  # value of enum ibv_mtu
                endpoint = replace(endpoint, mtu=min(endpoint.mtu, code))
            self.endpoint: Endpoint = endpoint
        except BaseException:
            self.close()
            raise

    def packed(self, hello: Hello) -> bytes:
        """Return the packed endpoint followed by the packed hello, as sent to the peer."""
        return self.endpoint.pack() + hello.pack()

    def connect_qp(
        self, remote: Endpoint, address: Address | None, *, peer_authenticated: bool
    ) -> None:
        """Connect the queue pair. Afterwards, the caller must tell the peer that it may send.

        Args:
            remote: The peer's endpoint.
            address: The peer's address. If it is None, the address in `remote` is not checked.
            peer_authenticated: Whether the peer may access memory: it has proved the key, or no key
                is required.

        Raises:
            ForeignAddressError: If `remote` contains an address other than `address`.
            ProtocolError: If `remote` is invalid or is this side's own endpoint.
            RouteError: If the port is not active or the peer cannot be reached.
            HandshakeBrokenError: If the peer has closed its queue pair during the handshake. The
                embedded device detects this, because it is connected to the peer's process.
        """
        assert self.qp is not None
        if remote == self.endpoint:
            peer = host_port(address) if address is not None else "the peer"
            raise ProtocolError(f"{peer} returned this side's own endpoint: is it an echo server?")
        if address is not None and not self.config.allow_other_addresses:
            self._check_address(remote, address)
        config = self.config
        rights = REMOTE_RIGHTS if peer_authenticated else NO_RIGHTS
        try:
            with route_errors():
                self.qp.connect(
                    self.endpoint,
                    remote,
                    access=rights,
                    pkey_index=self._pkey_index,
                    timeout=config.ack_timeout,
                    retry_cnt=config.retry_count,
                    hop_limit=64 if config.hop_limit is None else config.hop_limit,
                    traffic_class=config.type_of_service,
                    sl=config.service_level or 0,
                )
        except ValueError as error:
            raise ProtocolError(f"the peer's queue pair is incompatible: {error}") from error
        except VerbsError as error:
            # EINVAL and the state ERR mean that the peer has closed its queue pair. If the device
            # has failed, the state is also ERR, but the error is EIO.
            if error.errno != errno.EINVAL or self.qp.query().qp_state is not verbs.QPState.ERR:
                raise
            raise HandshakeBrokenError(
                "the peer's queue pair was closed during the handshake"
            ) from error

    def _check_address(self, remote: Endpoint, address: Address) -> None:
        """Ensure that the peer cannot make the device connect to another host.

        The check does not apply to cards, because they do not open connections to the address in
        `remote`. A card's address may also belong to a different network than the bootstrap's
        address, so the two cannot be compared.
        """
        host = host_part(address)
        # The embedded device looks for an endpoint without a GID on this host.
        gid = remote.gid if remote.is_global else verbs.GID.from_ip("127.0.0.1").raw
        if not self.driver.context.library.may_be_on_same_host(gid, verbs.GID.from_ip(host).raw):
            raise ForeignAddressError(
                f"the queue pair of {host_port(address)} has a different address, "
                f"{verbs.GID(gid)}; to allow it, pass auth= or Config(allow_other_addresses=True)"
            )
