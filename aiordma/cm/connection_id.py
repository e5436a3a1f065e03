"""Connection IDs, the connection manager's counterpart to TCP sockets."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

from aiordma import cm, verbs
from aiordma._core.arguments import I32_MAX, instance, integer, seconds
from aiordma._native import Library, explained, ffi
from aiordma._native import handles as h
from aiordma.errors import AddressError, ConnectionManagerError, RouteError, VerbsError, host_port
from aiordma.verbs import ECE, CompletionQueue, Context, ProtectionDomain, QPCapabilities, QueuePair
from aiordma.verbs._device.enums import QPCreateFlags, QPType
from aiordma.verbs._device.resource import Node
from aiordma.verbs._qp.qp_creation import QPFactory, QPOptions, create_qp
from aiordma.verbs._qp.transport_rules import SendOps

from .address import Address, as_sockaddr, from_storage
from .options import Options
from .parameters import ConnectionParameters, PortSpace, check_private_data

# All open IDs, keyed by library name and by the address of the C structure. Events refer to their
# ID by this address. All channels share the table, because an ID can migrate between channels.
_ids: weakref.WeakValueDictionary[tuple[str, int], ConnectionId] = weakref.WeakValueDictionary()

_ADDRESS_AND_FLAGS = 3  # RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS
_FULL_MEMBER, _SEND_ONLY = 0, 1  # enum rdma_cm_mc_join_flags

# The context passed to rdma_join_multicast identifies the join in its events. Contexts are never
# reused, so that a late event of an earlier join is not attributed to a later join.
_join_numbers = itertools.count(1)

_UNSPECIFIED = (("0.0.0.0", 0), ("::", 0))
_DEFAULT_PARAMETERS = ConnectionParameters()


def _key(library: Library, pointer: h.rdma_cm_id) -> tuple[str, int]:
    return library.name, int(ffi.cast("uintptr_t", pointer))


class _CMFactory(QPFactory):
    """A factory that creates and destroys an ID's queue pair through the connection manager."""

    def __init__(self, id: ConnectionId) -> None:
        self._calls = id.library.calls
        self._pointer = id.pointer
        self._node = id.node
        self._leave_groups = id._group_leaver()

    def create(self, pd: ProtectionDomain, attr: h.ibv_qp_init_attr) -> h.ibv_qp:
        self._calls.rdma_create_qp(self._pointer, pd.pointer, attr)
        return self._pointer.qp

    def create_ex(self, pd: ProtectionDomain, attr: h.ibv_qp_init_attr_ex) -> h.ibv_qp:
        self._calls.rdma_create_qp_ex(self._pointer, attr)
        return self._pointer.qp

    def destroy(self, pd: ProtectionDomain) -> Callable[[h.ibv_qp], object]:
        """Return a function that leaves all multicast groups and destroys the queue pair."""

        def destroy(_: h.ibv_qp) -> None:
            self._leave_groups()  # ibv_destroy_qp(3) fails for attached queue pairs
            self._calls.rdma_destroy_qp(self._pointer)

        return destroy

    def parents(self) -> list[Node[Any]]:
        return [self._node]


class ConnectionId(Options):
    """One end of a connection, or a listener, created by :meth:`EventChannel.create_id`.

    ``channel`` is the channel that delivers the ID's events. ``qp`` is the ID's queue pair, or
    None. Most methods start an operation and return immediately; an event on the channel reports
    the result. An ID must not be used by more than one thread at a time.
    """

    def __init__(self, channel: cm.EventChannel, pointer: h.rdma_cm_id) -> None:
        self.library: Library = channel.library
        self.channel: cm.EventChannel = channel
        self.qp: QueuePair | None = None
        self.port_space: PortSpace = PortSpace(pointer.ps)
        self._context: Context | None = None
        self._peer: Address | None = None
        self._groups: dict[int, Address] = {}
        destroy = self.library.calls.rdma_destroy_id
        super().__init__(Node("ConnectionId", pointer, destroy, [channel.node]))
        _ids[_key(self.library, pointer)] = self

    @classmethod
    def of(cls, library: Library, pointer: h.rdma_cm_id) -> ConnectionId | None:
        """Return the object for an event's C pointer, or None if it has been closed or deleted."""
        id = _ids.get(_key(library, pointer))
        return id if id is not None and not id.closed else None

    # --- properties ------------------------------------------------------------------------

    @property
    def context(self) -> Context | None:
        """The context of the ID's device, borrowed from the connection manager.

        The context is None if the ID is not bound to a device. For example, an ID is not bound
        before address resolution, or while listening on all addresses.
        """
        if self._context is None and (device := self.pointer.verbs):
            self._context = Context.borrow(self.library, device)
        return self._context

    @property
    def port_num(self) -> int:
        """The number of the device port used by the ID, or 0 if the ID is not bound to a device."""
        return self.pointer.port_num

    @property
    def _withdrawn(self) -> bool:
        """Whether the peer is known to have withdrawn this connection request.

        Only the embedded device reports withdrawn requests before ``accept()`` fails.
        """
        library = self.library
        return library.offers("withdrawn") and bool(library.table.device.withdrawn(self.pointer))

    @property
    def local_address(self) -> Address | None:
        """The address the ID is bound to, or None if it is not bound."""
        return from_storage(ffi.addressof(self.pointer.route.addr, "src_storage"))

    @property
    def peer_address(self) -> Address | None:
        """The peer's address, or None if there is no peer.

        After the ID is closed, the last known address remains available.
        """
        if not self.closed:
            peer = from_storage(ffi.addressof(self.pointer.route.addr, "dst_storage"))
            # librdmacm sets the address family before it knows the address.
            self._peer = None if peer in _UNSPECIFIED else peer
        return self._peer

    # --- addresses -------------------------------------------------------------------------

    def bind_addr(self, address: Address) -> None:
        """Bind the ID to a local address. Port 0 selects a free port.

        Raises:
            AddressError: If binding fails. EADDRINUSE means that the port is already in use.
                EADDRNOTAVAIL means that the address does not belong to this machine. If this
                address or the address of a conflicting socket is the wildcard address,
                EADDRNOTAVAIL can also mean that the port is already in use.
        """
        sockaddr, _keep = as_sockaddr(address)
        try:
            self.library.calls.rdma_bind_addr(self.pointer, sockaddr)
        except VerbsError as error:
            summary = f"cannot bind to {host_port(address)}"
            raise self._connection_error(AddressError, summary, error) from error
        self._note("bind_addr")

    def resolve_addr(
        self, address: Address, source: Address | None = None, timeout: float = 2.0
    ) -> None:
        """Start looking for a device that has a route to the peer's address.

        An ADDR_RESOLVED or ADDR_ERROR event reports the result.

        Args:
            address: The peer's address.
            source: The local address to use, or None to use the address selected by the route.
            timeout: The maximum duration of the search, in seconds.

        Raises:
            AddressError: If no device has a route to the address.
        """
        sockaddr, _keep = as_sockaddr(address)
        source_sockaddr, _keep_source = as_sockaddr(source) if source else (ffi.NULL, None)
        try:
            self.library.calls.rdma_resolve_addr(
                self.pointer, source_sockaddr, sockaddr, _milliseconds(timeout)
            )
        except VerbsError as error:
            from_source = f" from {source[0]}" if source else ""
            summary = f"no RDMA device has a route{from_source} to {host_port(address)}"
            raise self._connection_error(AddressError, summary, error) from error
        self._note("resolve_addr")

    def resolve_route(self, timeout: float = 2.0) -> None:
        """Start resolving the route to the peer.

        A ROUTE_RESOLVED or ROUTE_ERROR event reports the result within ``timeout`` seconds.
        """
        try:
            self._check_bound("rdma_resolve_route")
            self.library.calls.rdma_resolve_route(self.pointer, _milliseconds(timeout))
        except VerbsError as error:
            peer = self.peer_address
            summary = f"no route to {host_port(peer)}" if peer else "cannot resolve a route"
            raise self._connection_error(RouteError, summary, error) from error
        self._note("resolve_route")

    # --- queue pair ------------------------------------------------------------------------

    def create_qp(
        self,
        pd: ProtectionDomain,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue | None = None,
        capabilities: QPCapabilities | None = None,
        *,
        qp_type: QPType | None = None,
        sq_sig_all: bool = False,
        send_ops: SendOps = SendOps.NONE,
        create_flags: QPCreateFlags = QPCreateFlags.NONE,
        max_tso_header: int = 0,
        srq: verbs.SharedReceiveQueue | None = None,
        reserved: bool = False,
    ) -> QueuePair:
        """Create the ID's queue pair.

        The connection manager handles the queue pair's state transitions. The protection domain
        must belong to the ID's :attr:`context`. ``qp_type`` defaults to RC, or to UD in a datagram
        port space. You can post receives immediately. A UD queue pair uses the port space's Q_Key,
        and can also send immediately. See :meth:`ProtectionDomain.create_qp`, rdma_create_qp(3) and
        rdma_create_qp_ex(3).
        """
        if pd.context is not self.context:
            raise ValueError(
                f"pd must belong to the context of {self!r} ({self.context!r}), not to "
                f"{pd.context!r}"
            )
        if self.qp is not None and not self.qp.closed:
            raise ValueError(f"{self!r} already has a queue pair; close {self.qp!r} first")
        if qp_type is None:
            qp_type = QPType.UD if self.port_space.datagrams else QPType.RC
        self.qp = create_qp(
            pd,
            send_cq,
            recv_cq or send_cq,
            capabilities or QPCapabilities(),
            qp_type,
            sq_sig_all,
            srq,
            QPOptions(send_ops=send_ops, create_flags=create_flags, max_tso_header=max_tso_header),
            reserved,
            _CMFactory(self),
        )
        return self.qp

    def destroy_qp(self) -> None:
        """Close the ID's queue pair, if any. The ID stays open."""
        if self.qp is not None:
            self.qp.close()
            self.qp = None

    # --- connections -----------------------------------------------------------------------

    def connect(self, parameters: ConnectionParameters = _DEFAULT_PARAMETERS) -> None:
        """Send a connection request, or ask a datagram service for its address.

        Call this method after ROUTE_RESOLVED. An ESTABLISHED, REJECTED, UNREACHABLE or
        CONNECT_ERROR event reports the result. If the peer does not respond, the connection manager
        reports UNREACHABLE after about a minute.

        When a datagram service accepts, the ESTABLISHED event's ``datagrams`` attribute contains
        the service's address. UNREACHABLE can also mean that the service rejected the request.

        Raises:
            LimitError: If the private data is too long (the maximum is 56 bytes for PortSpace.TCP
                and 180 bytes for PortSpace.UDP). No request is sent in this case.
        """
        self._call_with_parameters("connect", self.library.calls.rdma_connect, parameters)

    def accept(self, parameters: ConnectionParameters = _DEFAULT_PARAMETERS) -> None:
        """Accept a connection request.

        Call this method on the ID from the CONNECT_REQUEST event. For a connection, an ESTABLISHED
        event reports the result. For a datagram service, no event follows, and the peer can start
        sending as soon as the request is accepted.

        Raises:
            LimitError: If the private data is too long (the maximum is 196 bytes for PortSpace.TCP
                and 136 bytes for PortSpace.UDP).
        """
        self._call_with_parameters("accept", self.library.calls.rdma_accept, parameters)

    def _call_with_parameters(
        self, step: str, call: Callable[..., object], parameters: ConnectionParameters
    ) -> None:
        """Check the parameters of `connect` or `accept`, and call the function with them."""
        hint = "write ConnectionParameters(private_data)" if isinstance(parameters, bytes) else ""
        instance("parameters", parameters, ConnectionParameters, "a ConnectionParameters", hint)
        check_private_data(self.port_space, step, parameters.private_data)
        self._check_bound(f"rdma_{step}")
        param, _keep = parameters.packed()
        self._call(call, param, step=step)

    def reject(self, private_data: bytes = b"", *, for_ece: bool = False) -> None:
        """Reject a connection request.

        Call this method on the ID from the CONNECT_REQUEST event, and then close the ID. The peer
        gets a REJECTED event with reason 28 (rejected by the application). If ``for_ece`` is true,
        the reason is 35 (unacceptable ECE options).

        Raises:
            LimitError: If the private data is too long (the maximum is 148 bytes for PortSpace.TCP
                and 136 bytes for PortSpace.UDP).
        """
        check_private_data(self.port_space, "reject", private_data)
        data = bytes(private_data)
        calls = self.library.calls
        call = calls.rdma_reject_ece if for_ece else calls.rdma_reject
        self._call(call, data or ffi.NULL, len(data), step="reject")

    def listen(self, backlog: int = 128) -> None:
        """Listen for connection requests.

        Each request arrives as a CONNECT_REQUEST event with a new ID. An ID that is not bound to an
        address listens on a free port on all IPv4 addresses.

        Args:
            backlog: The maximum number of unread CONNECT_REQUEST events. 0 means the system's
                maximum. Additional requests are delayed or rejected.

        Raises:
            AddressError: If the port is already in use. :meth:`bind_addr` lists the error codes.
        """
        backlog = integer("backlog", backlog, None)
        try:
            self._call(self.library.calls.rdma_listen, backlog, step="listen")
        except VerbsError as error:
            address = self.local_address
            if error.errno not in {errno.EADDRINUSE, errno.EADDRNOTAVAIL} or address is None:
                raise
            summary = f"cannot listen on {host_port(address)}"
            raise self._connection_error(AddressError, summary, error) from error

    def establish(self) -> None:
        """Finish connecting after a CONNECT_RESPONSE event.

        Call this method only on an ID that does not own a queue pair.
        """
        self._call(self.library.calls.rdma_establish)

    def disconnect(self) -> None:
        """End the connection.

        The queue pair enters the error state, which flushes posted work requests. The peer gets a
        DISCONNECTED event and must also call this method. After the peer's call, this side gets a
        DISCONNECTED event, followed by TIMEWAIT_EXIT.

        Raises:
            VerbsError: With EINVAL, if the ID is not connected.
        """
        self._check_bound("rdma_disconnect")
        self._call(self.library.calls.rdma_disconnect, step="disconnect")

    # --- multicast: of a datagram id that is bound to a device -----------------------------

    def join_multicast(self, address: Address, *, send_only: bool = False) -> None:
        """Join the multicast group at ``address``. The port in the address is ignored.

        A MULTICAST_JOIN or MULTICAST_ERROR event reports the result. The MULTICAST_JOIN event's
        ``datagrams`` attribute contains the destination for sending to the group. After this event,
        the ID's queue pair also receives messages sent to the group. If ``send_only`` is true, the
        queue pair can only send.

        Raises:
            VerbsError: With EINVAL, if the ID is not bound to a device, or if its port space does
                not support datagrams.
            UnsupportedError: If the device does not support multicast groups of this address
                family.
        """
        sockaddr, _keep = as_sockaddr(address)
        attr = ffi.new("struct rdma_cm_join_mc_attr_ex *")
        attr.comp_mask = _ADDRESS_AND_FLAGS
        attr.join_flags = _SEND_ONLY if send_only else _FULL_MEMBER
        attr.addr = sockaddr
        join_number = next(_join_numbers)
        context = ffi.cast("void *", join_number)
        self._groups[join_number] = address
        try:
            self._call(self.library.calls.rdma_join_multicast_ex, attr, context)
        except VerbsError:
            del self._groups[join_number]
            raise

    def leave_multicast(self, address: Address) -> None:
        """Leave a multicast group joined with :meth:`join_multicast`.

        Raises:
            VerbsError: With EADDRNOTAVAIL, if the ID has not joined this group.
        """
        sockaddr, _keep = as_sockaddr(address)
        self._call(self.library.calls.rdma_leave_multicast, sockaddr)
        for join_number in [n for n, group in self._groups.items() if group == address]:
            del self._groups[join_number]

    def _group_leaver(self) -> Callable[[], None]:
        """Return a function that leaves all groups and does not keep this object alive."""
        calls, pointer, groups = self.library.calls, self.pointer, self._groups

        def leave() -> None:
            while groups:
                _, address = groups.popitem()
                sockaddr, _keep = as_sockaddr(address)
                with contextlib.suppress(VerbsError):  # the join had failed
                    calls.rdma_leave_multicast(pointer, sockaddr)

        return leave

    def group_of(self, context: h.Characters | h.VoidPointer) -> Address | None:
        """Return an event's multicast group, or None if the ID has left the group."""
        return self._groups.get(int(ffi.cast("uintptr_t", context)))

    # --- enhanced connection establishment -------------------------------------------------

    def set_local_ece(self, ece: ECE) -> None:
        """Set this side's options for enhanced connection establishment (ECE).

        Call this method before ``connect`` to offer options, or before ``accept`` to select
        options. The ID must not own a queue pair. If an ID owns a queue pair, the devices negotiate
        the options. See rdma_set_local_ece(3).

        Raises:
            VerbsError: With EINVAL, if the ID owns a queue pair, or if ``vendor_id`` is 0.
        """
        self._call(self.library.calls.rdma_set_local_ece, ece.packed())

    def get_remote_ece(self) -> ECE:
        """Return the peer's options for enhanced connection establishment (ECE).

        The options are available after a CONNECT_REQUEST or CONNECT_RESPONSE event. A ``vendor_id``
        of 0 means that the peer did not send any options.

        Raises:
            VerbsError: With EINVAL, if the ID owns a queue pair.
        """
        ece = ffi.new("struct ibv_ece *")
        self._call(self.library.calls.rdma_get_remote_ece, ece)
        return ECE.read(ece)

    # --- channels --------------------------------------------------------------------------

    def migrate(self, channel: cm.EventChannel) -> None:
        """Move the ID and its events to another event channel of the same library."""
        instance("channel", channel, type(self.channel), "an EventChannel")
        if channel.library is not self.library:
            raise ValueError(
                f"cannot move {self!r} to {channel!r}, because the channel uses another library"
            )
        self._call(self.library.calls.rdma_migrate_id, channel.pointer)
        self.node.move(self.channel.node, channel.node)
        self.channel = channel

    def _check_bound(self, verb: str) -> None:
        # If the ID is not bound to a device, librdmacm 44 dereferences a NULL pointer instead of
        # failing with EINVAL.
        if self.context is None:
            error = VerbsError(errno.EINVAL, verb)
            raise explained(error, f"{self._describe(error)}; the ID is not bound to a device")

    def _connection_error(
        self, error_class: type[ConnectionManagerError], summary: str, error: VerbsError
    ) -> ConnectionManagerError:
        """Return an error with the call's preconditions, if it may have failed because of them."""
        preconditions, text = self._preconditions(error), f"{summary}: {error.strerror}"
        if preconditions and preconditions not in text:
            text += f"; {preconditions}"
        return error_class(text, status=-(error.errno or 0))

    def _details(self) -> str:
        local, peer = self.local_address, self.peer_address
        parts = [self.port_space.name]
        if local:
            parts.append(host_port(local))
        if peer:
            parts.append(f"to {host_port(peer)}")
        if self.qp is not None and not self.qp.closed:
            parts.append(f"qp {self.qp.qp_num:#x} {self.qp.state.name}")
        return " ".join(parts)


def _milliseconds(timeout: float) -> int:
    duration = seconds("timeout", timeout)
    if duration > I32_MAX / 1000:
        raise ValueError(f"timeout must be at most {I32_MAX // 1000} seconds, not {duration}")
    return math.ceil(duration * 1000)
