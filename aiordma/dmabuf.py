"""Memory of another device, such as a GPU, exported by its driver as a dma-buf."""

from __future__ import annotations

import os
import warnings

from . import verbs
from ._core.finalizers import finalizer
from .errors import BufferStateError
from .mr_pool import OwnMemory, Registration


class DmabufRegistration(Registration):
    """A registration that keeps the dma-buf's file descriptor open.

    The file descriptor is needed to register the dma-buf again. Internal to the library.
    """

    __slots__ = ("fd",)

    def __init__(self, mr: verbs.MemoryRegion, fd: int) -> None:
        self.fd: int = os.dup(fd)
        super().__init__(mr, mapped=False)

    @finalizer  # called by finalizers too
    def _retire(self) -> None:
        os.close(self.fd)
        super()._retire()


class DmabufRegion(OwnMemory):
    """Registered dma-buf memory for use with `read`, `write` and `send_region`.

    The region starts at `offset` in the dma-buf and is `length` bytes long. This process cannot
    access the memory, so you cannot use the region to send or receive messages.

    The memory stays registered until you call `close` or the `with` block ends. If an operation is
    still using the memory, the memory is deregistered when the operation ends.

    A key to the region works on every connection that uses the same event loop and device. A memory
    window would limit the key to a single connection, but the kernel does not support memory
    windows on dma-bufs.
    """

    __slots__ = ("_offset", "_registration")

    def __init__(
        self, pd: verbs.ProtectionDomain, fd: int, length: int, offset: int, writable: bool
    ) -> None:
        access = verbs.AccessFlags.LOCAL_WRITE if writable else verbs.AccessFlags.NONE
        mr = pd.reg_dmabuf_mr(fd, length, access, offset=offset)
        self._registration = DmabufRegistration(mr, fd)
        self.pinned: Registration = self._registration
        self._offset = offset
        self.address: int = mr.addr
        self.length = length
        self.lkey: int = mr.lkey
        self.writable = writable

    def __repr__(self) -> str:
        state = " closed" if self.gone else ""
        return f"<DmabufRegion of {self.length} bytes from {self._offset}{state}>"

    @property
    def view(self) -> memoryview:
        self._check()
        raise BufferStateError(
            f"cannot use {self!r} to send or receive messages, because this process cannot access "
            f"its memory; use read, write or send_region instead"
        )

    def _expose(
        self, pd: verbs.ProtectionDomain, access: verbs.AccessFlags, offset: int, length: int
    ) -> verbs.MemoryRegion:
        fd = self._registration.fd
        return pd.reg_dmabuf_mr(fd, length, access, offset=self._offset + offset)

    def close(self) -> None:
        """Deregister the memory. A second call has no effect."""
        self._release_memory()

    @finalizer
    def __del__(self) -> None:
        if not self.gone and hasattr(self, "_registration"):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=1)
            self.close()
