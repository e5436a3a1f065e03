"""Memory windows, which give peers access to part of a memory region.

Each window has its own key, which can be created and revoked without registering memory again.
"""

from __future__ import annotations

from aiordma import verbs
from aiordma._core.arguments import choice, integer
from aiordma._native import ffi
from aiordma._native import handles as h
from aiordma.errors import UnsupportedError, VerbsError

from .._device.attributes import is_rxe
from .._device.enums import AccessFlags, DeviceCapability, MWType, SendFlags, WROpcode
from .._device.resource import Node, Resource
from .._qp.queue_pair import QueuePair
from .._qp.transport_rules import supports
from .._qp.work_request import BindInfo, SendWorkRequest
from .memory_region import MemoryRegion

# The rights that a memory window can grant (ibv_bind_mw(3)).
_WRITE_RIGHTS = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
_ALLOWED_RIGHTS = _WRITE_RIGHTS | AccessFlags.REMOTE_READ | AccessFlags.ZERO_BASED


def inc_rkey(rkey: int) -> int:
    """Return the next key, which differs only in its lowest 8 bits. See ibv_inc_rkey(3)."""
    return (rkey & ~0xFF) | ((rkey + 1) & 0xFF)


class MemoryWindow(Resource[h.ibv_mw]):
    """A window into a memory region, with a separate key for peers (``rkey``).

    ``mw_type`` is the window's type, and ``pd`` is its protection domain. A window gives no access
    to memory until it is bound. Binding and unbinding are work requests, which take effect in order
    on the queue pair's send queue. A message posted after the bind arrives after the bind has taken
    effect, so it can carry the key to the peer. If you send the key some other way, wait for the
    bind's completion first.

    A type 1 window can be used through every queue pair in the protection domain. Binding it again
    revokes the previous key. A type 2 window can only be used through the queue pair that bound it.
    You must unbind it before binding it again, and the peer can revoke it with SEND_WITH_INV. Once
    a window is unbound, the peer's requests fail immediately, even in the middle of a message.

    A region cannot be closed while a window is bound to it. Closing the window unbinds it. See
    ibv_alloc_mw(3), ibv_bind_mw(3), and IBTA volume 1, clauses 10.6.6 and 10.6.7.
    """

    def __init__(self, pd: verbs.ProtectionDomain, pointer: h.ibv_mw, mw_type: MWType) -> None:
        destroy = pd.context.library.calls.ibv_dealloc_mw
        super().__init__(Node("MemoryWindow", pointer, destroy, [pd.node]))
        self.pd = pd
        self.context: verbs.Context = pd.context
        self.mw_type = mw_type
        self._region: MemoryRegion | None = None

    @property
    def rkey(self) -> int:
        """The key from the latest bind. As with a region, anyone who knows the key can use it.

        Before the first bind, or after a failed bind, the key gives no access.
        """
        return self.pointer.rkey

    def bind(
        self,
        qp: QueuePair,
        mr: MemoryRegion,
        access: AccessFlags,
        addr: int | None = None,
        length: int | None = None,
        *,
        wr_id: int = 0,
        send_flags: SendFlags = SendFlags.SIGNALED,
        rkey: int | None = None,
    ) -> int:
        """Post a request that binds the window to a range of a memory region.

        Some mistakes are only detected when the device executes the request, for example binding a
        type 2 window that is already bound. The completion then fails with MW_BIND_ERR, and the
        queue pair enters the error state.

        Args:
            qp: The queue pair to post the request to.
            mr: The memory region. It must be registered with MW_BIND, and also with LOCAL_WRITE if
                the peer may write. It does not need any remote rights.
            access: The peer's rights: REMOTE_READ, REMOTE_WRITE and REMOTE_ATOMIC. With ZERO_BASED,
                the peer uses addresses relative to the start of the window.
            addr: The start of the range. Defaults to the start of the region.
            length: The number of bytes. By default, the range extends to the end of the region.
            wr_id: The work request's number, which is repeated in its completion.
            send_flags: The work request's flags.
            rkey: The new key for a type 2 window. It may differ from the current key only in its
                lowest 8 bits.

        Returns:
            The new key.

        Raises:
            ValueError: If the rights or the range are invalid. Nothing is posted in this case.
            PostError: If the device rejects the request. The error is a QueueFullError if the send
                queue is full.
            UnsupportedError: If the transport does not support memory windows.
        """
        access = choice("access", access, AccessFlags)
        addr = mr.addr if addr is None else integer("addr", addr)
        if length is None:
            length = mr.addr + mr.length - addr
        length = integer("length", length, None)
        wr_id, rkey = integer("wr_id", wr_id), None if rkey is None else integer("rkey", rkey)
        self._check_bind(mr, access, addr, length)
        new_rkey = inc_rkey(self.rkey)
        if self.mw_type is MWType.TYPE_1:
            if rkey not in (None, new_rkey):
                raise ValueError(f"rkey can be chosen only for type 2 windows, not for {self!r}")
            self._post_bind(qp, mr, access, addr, length, wr_id, send_flags)
            new_rkey = self.rkey
        else:
            new_rkey = new_rkey if rkey is None else rkey
            if (new_rkey ^ self.rkey) >> 8:
                raise ValueError(
                    f"invalid rkey {new_rkey:#x} for {self!r}: only the lowest 8 bits may differ"
                    " from the current key"
                )
            bind = BindInfo(self, mr, new_rkey, addr, length, access)
            qp.post_send([SendWorkRequest(wr_id, WROpcode.BIND_MW, (), send_flags, bind=bind)])
        self._region = mr
        # A protection domain closes its children in reverse order. Move the window to the end, so
        # that it is closed before its region and its queue pair.
        self.pd.node.children[self.node] = self.pd.node.children.pop(self.node)
        return new_rkey

    def unbind(
        self, qp: QueuePair, *, wr_id: int = 0, send_flags: SendFlags = SendFlags.SIGNALED
    ) -> None:
        """Post a request that revokes the window's key.

        For type 1, the request binds the window to an empty range. For type 2, it is a LOCAL_INV
        request. This requires that the window is still bound, and that ``qp`` is the queue pair
        that bound it. Otherwise, the completion fails, and the queue pair enters the error state.
        This method also raises the exceptions of :meth:`bind`.

        Raises:
            ValueError: If the window has never been bound.
        """
        if (mr := self._region) is None:
            raise ValueError(f"{self!r} has not been bound; call bind() first")
        if self.mw_type is MWType.TYPE_1:
            # ibv_bind_mw(3) does not require a region, but rdma_rxe's library crashes without one.
            self._post_bind(qp, mr, AccessFlags.NONE, mr.addr, 0, wr_id, send_flags)
        else:
            wr = SendWorkRequest(
                wr_id, WROpcode.LOCAL_INV, (), send_flags, invalidate_rkey=self.rkey
            )
            qp.post_send([wr])

    def _post_bind(
        self,
        qp: QueuePair,
        mr: MemoryRegion,
        access: AccessFlags,
        addr: int,
        length: int,
        wr_id: int,
        send_flags: SendFlags,
    ) -> None:
        """Bind a type 1 window with ibv_bind_mw(), which also sets the window's new key."""
        if not supports(qp.qp_type, WROpcode.BIND_MW):
            raise self.context._unsupported_error(
                f"BIND_MW on a {qp.qp_type.name} queue pair", "ibv_bind_mw"
            )
        bind = ffi.new("struct ibv_mw_bind *")
        bind.wr_id = wr_id
        bind.bind_info.mr = mr.pointer
        bind.bind_info.addr, bind.bind_info.length = addr, length
        bind.bind_info.mw_access_flags = int(access)
        pointers = qp.pointer, self.pointer
        posted = qp._posted
        if posted is not None:
            signaled = qp.sq_sig_all or bool(send_flags & SendFlags.SIGNALED)
            qp._check_room((signaled,))
            posted.add_send(wr_id, WROpcode.BIND_MW, signaled)
        bind.send_flags = int(send_flags)
        try:
            self.context.library.calls.ibv_bind_mw(*pointers, bind)
        except VerbsError as error:
            if posted is not None:
                posted.withdraw_sends(1)
            if isinstance(error, UnsupportedError):
                raise
            raise qp._post_error("ibv_bind_mw", error.errno or 0, 0) from None

    def _check_bind(self, mr: MemoryRegion, access: AccessFlags, addr: int, length: int) -> None:
        if access & ~_ALLOWED_RIGHTS:
            raise ValueError(
                f"invalid access {access!r} for a memory window: the allowed rights are"
                f" {_ALLOWED_RIGHTS!r}"
            )
        if length <= 0 or addr < mr.addr or addr + length > mr.addr + mr.length:
            raise ValueError(f"invalid range: {length} bytes at {addr:#x} are not within {mr!r}")
        if not mr.access & AccessFlags.MW_BIND:
            raise ValueError(f"{mr!r} must be registered with AccessFlags.MW_BIND")
        if access & _WRITE_RIGHTS and not mr.access & AccessFlags.LOCAL_WRITE:
            raise ValueError(
                f"access {access & _WRITE_RIGHTS!r} requires a region with LOCAL_WRITE, which"
                f" {mr!r} lacks"
            )

    def _label(self) -> str:
        return f"MemoryWindow of type {int(self.mw_type)}"

    def _details(self) -> str:
        return f"rkey {self.rkey:#x}"


_REQUIRED_CAPABILITY = {
    MWType.TYPE_1: DeviceCapability.MEM_WINDOW,
    MWType.TYPE_2: DeviceCapability.MEM_WINDOW_TYPE_2A | DeviceCapability.MEM_WINDOW_TYPE_2B,
}


def offers_windows(context: verbs.Context, mw_type: MWType) -> bool:
    return bool(context.query_device().device_cap_flags & _REQUIRED_CAPABILITY[mw_type])


def enforces_window_bounds(context: verbs.Context) -> bool:
    """Return whether a window gives access to nothing beside its memory.

    rdma_rxe compares an access with the bounds of the window's region instead. See check_rkey() in
    Linux.
    """
    return not is_rxe(context.query_device())
