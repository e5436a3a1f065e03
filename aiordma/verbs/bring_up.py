"""Bringing a queue pair up without the connection manager: from two exchanged endpoints."""

from __future__ import annotations

import errno
import secrets
from abc import abstractmethod
from typing import TYPE_CHECKING, Unpack

from aiordma._core.handshake import Endpoint
from aiordma.errors import VerbsError

from .address import GID, AddressVector, GIDEntry
from .enums import MTU, AccessFlags, LinkLayer, PortState, QPState, QPType
from .resource import Resource

if TYPE_CHECKING:
    from aiordma._native import handles as h  # noqa: F401 - named in the base class below

    from .context import Context
    from .qp_attributes import QPChanges

# Reads and atomics under way at once, where the device would take more: beyond this there is no
# gain on any device that we know of. A judgement, not a measurement.
_RD_ATOMIC = 16
_CONNECTED = (QPType.RC, QPType.UC)

# 4.096 us * 2^14 = 67 ms, the value of perftest and of the CM; 0.64 ms is its RNR timer.
ACK_TIMEOUT = 0.067
RNR_TIMER = 0.00064


class BringUp(Resource["h.QPPointer"]):
    """The steps from RESET to RTS; a part of :class:`QueuePair`."""

    context: Context
    qp_num: int
    qp_type: QPType

    @abstractmethod
    def modify(self, **changes: Unpack[QPChanges]) -> None: ...

    def endpoint(
        self,
        gid: GIDEntry | None = None,
        *,
        port_num: int = 1,
        psn: int | None = None,
        max_rd_atomic: int | None = None,
        max_dest_rd_atomic: int | None = None,
    ) -> Endpoint:
        """What the peer has to know to connect to this queue pair; ``pack()`` makes bytes of it.

        ``gid`` is the address to be reached by, ``context.choose_gid(port_num)`` if not given;
        ``psn`` is random if not given, the depths are what the device can do, 16 at most.
        VerbsError (ENETDOWN) when the port is not active.
        """
        port = self.context.query_port(gid.port_num if gid else port_num)
        if port.state is not PortState.ACTIVE:
            raise VerbsError(
                errno.ENETDOWN,
                "ibv_query_port",
                f"port {port.port_num} of {self.context.name} is {port.state.name}, not ACTIVE",
            )
        ethernet = port.link_layer is LinkLayer.ETHERNET
        if gid is None:
            gid = self.context.choose_gid(port_num)
        limits = self.context.query_device()
        reliable = self.qp_type is not QPType.UC
        if max_rd_atomic is None:
            max_rd_atomic = min(limits.max_qp_init_rd_atom, _RD_ATOMIC) if reliable else 0
        if max_dest_rd_atomic is None:
            max_dest_rd_atomic = min(limits.max_qp_rd_atom, _RD_ATOMIC) if reliable else 0
        return Endpoint(
            gid=gid.gid.raw,
            qp_num=self.qp_num,
            psn=secrets.randbits(24) if psn is None else psn,
            lid=port.lid,
            mtu=port.active_mtu,
            qp_type=self.qp_type,
            is_global=ethernet,
            max_rd_atomic=max_rd_atomic,
            max_dest_rd_atomic=max_dest_rd_atomic,
        )

    def connect(
        self,
        local: Endpoint,
        remote: Endpoint,
        *,
        access: AccessFlags = AccessFlags.NONE,
        timeout: float = ACK_TIMEOUT,
        retry_cnt: int = 7,
        rnr_retry: int = 7,
        min_rnr_timer: float = RNR_TIMER,
        max_rd_atomic: int | None = None,
        max_dest_rd_atomic: int | None = None,
        hop_limit: int = 64,
        traffic_class: int = 0,
        pkey_index: int = 0,
    ) -> None:
        """RESET to RTS, from what :meth:`endpoint` gave here and at the peer.

        ``access`` are the rights of the peer to this side's memory, beside those of each region:
        none unless named. ``timeout`` and ``min_rnr_timer`` are seconds; ``rnr_retry`` 7 means
        for ever. The path MTU is the smaller of both. The depths of reads and atomics, here
        (``max_rd_atomic``) and at the peer (``max_dest_rd_atomic``), are what both can do unless
        given. It does not wait for the peer: post receives, then tell it.
        """
        if self.qp_type not in _CONNECTED:
            raise ValueError(f"a {self.qp_type.name} queue pair is not connected to a peer")
        if remote.qp_type != self.qp_type:
            raise ValueError(f"{self!r}: the peer's queue pair is {QPType(remote.qp_type).name}")
        source = self._source(local)
        if max_rd_atomic is None:
            max_rd_atomic = min(local.max_rd_atomic, remote.max_dest_rd_atomic)
        if max_dest_rd_atomic is None:
            max_dest_rd_atomic = min(local.max_dest_rd_atomic, remote.max_rd_atomic)
        self.to_init(port_num=source.port_num, pkey_index=pkey_index, access=access)
        self.to_rtr(
            AddressVector(
                dgid=GID(remote.gid) if remote.is_global else None,
                sgid_index=source.gid_index,
                hop_limit=hop_limit,
                traffic_class=traffic_class,
                dlid=remote.lid,
                port_num=source.port_num,
            ),
            dest_qp_num=remote.qp_num,
            rq_psn=remote.psn,
            path_mtu=MTU(min(local.mtu, remote.mtu)),
            max_dest_rd_atomic=max_dest_rd_atomic,
            min_rnr_timer=min_rnr_timer,
        )
        self.to_rts(
            sq_psn=local.psn,
            timeout=timeout,
            retry_cnt=retry_cnt,
            rnr_retry=rnr_retry,
            max_rd_atomic=max_rd_atomic,
        )

    def _source(self, local: Endpoint) -> GIDEntry:
        """The GID table entry of the local endpoint, looked up: an index may change."""
        if local.qp_num != self.qp_num:
            raise ValueError(f"{self!r}: the local endpoint is that of {local.qp_num:#x}")
        gid = GID(local.gid)
        found = [entry for entry in self.context.query_gid_table() if entry.gid == gid]
        if not found:
            raise ValueError(f"{self.context.name} has no GID {gid} any more")
        return min(found, key=GIDEntry.preference)

    # --- step by step ----------------------------------------------------------------------

    def to_init(
        self,
        *,
        port_num: int = 1,
        pkey_index: int = 0,
        access: AccessFlags = AccessFlags.NONE,
        qkey: int = 0,
    ) -> None:
        """RESET -> INIT: receives may be posted from here on. ``qkey`` is for UD."""
        changes: QPChanges = {
            "qp_state": QPState.INIT,
            "port_num": port_num,
            "pkey_index": pkey_index,
        }
        if self.qp_type is QPType.UD:
            changes["qkey"] = qkey
        else:
            changes["qp_access_flags"] = access
        self.modify(**changes)

    def to_rtr(
        self,
        ah_attr: AddressVector | None = None,
        *,
        dest_qp_num: int = 0,
        rq_psn: int = 0,
        path_mtu: MTU = MTU.MTU_1024,
        max_dest_rd_atomic: int = 1,
        min_rnr_timer: float = RNR_TIMER,
    ) -> None:
        """INIT -> RTR: ready to receive from the peer that is named. UD takes no arguments."""
        changes: QPChanges = {"qp_state": QPState.RTR}
        if self.qp_type in _CONNECTED:
            changes.update({"dest_qp_num": dest_qp_num, "rq_psn": rq_psn, "path_mtu": path_mtu})
            if ah_attr is not None:
                changes["ah_attr"] = ah_attr
        if self.qp_type is QPType.RC:
            changes.update(
                {"max_dest_rd_atomic": max_dest_rd_atomic, "min_rnr_timer": min_rnr_timer}
            )
        self.modify(**changes)

    def to_rts(
        self,
        *,
        sq_psn: int = 0,
        timeout: float = ACK_TIMEOUT,
        retry_cnt: int = 7,
        rnr_retry: int = 7,
        max_rd_atomic: int = 1,
    ) -> None:
        """RTR -> RTS: ready to send."""
        changes: QPChanges = {"qp_state": QPState.RTS, "sq_psn": sq_psn}
        if self.qp_type is QPType.RC:
            changes.update(
                {
                    "timeout": timeout,
                    "retry_cnt": retry_cnt,
                    "rnr_retry": rnr_retry,
                    "max_rd_atomic": max_rd_atomic,
                }
            )
        self.modify(**changes)

    def to_error(self) -> None:
        """To ERR: everything posted is flushed, its completions say WR_FLUSH_ERR."""
        self.modify(qp_state=QPState.ERR)

    def to_reset(self) -> None:
        """To RESET: as newly made. What was posted is forgotten without a completion."""
        self.modify(qp_state=QPState.RESET)
