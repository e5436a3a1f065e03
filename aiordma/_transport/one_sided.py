"""The user's own memory in operations on the peer's memory."""

from __future__ import annotations

from ..mr_pool import Buffer, LocalMemory, OwnMemory
from ..verbs._memory.buffers import AnyMemory, bytes_of, keeper_of
from .memory import STAGING_LIMIT, Memory


class UserMemory:
    """Memory that is registered for the time of an operation, or copied through the pool.

    `async with` waits for memory of the pool, `with` raises QuotaError.
    """

    def __init__(self, memory: Memory, data: AnyMemory, *, target: bool) -> None:
        self._memory = memory
        self._data = data
        self._target = target
        self._view = bytes_of(data)
        if target and self._view.readonly:
            self._view.release()
            raise ValueError(f"cannot read into {type(data).__name__}: it is read-only")
        self._keeper = keeper_of(self._view)
        self._short = len(self._view) <= STAGING_LIMIT
        self._local: OwnMemory | None = None

    def __enter__(self) -> LocalMemory:
        try:
            return self._begin(self._memory.pool.alloc(len(self._view)) if self._short else None)
        except BaseException:
            self._view.release()
            raise

    async def __aenter__(self) -> LocalMemory:
        try:
            size = len(self._view)
            return self._begin(
                await self._memory.lease(size, internal=True) if self._short else None
            )
        except BaseException:
            self._view.release()
            raise

    def _begin(self, staging: Buffer | None) -> LocalMemory:
        if staging is None:
            self._local = self._memory.register(self._data, self._view)
        else:
            self._local = staging
            if not self._target:
                staging.view[:] = self._view
                self._view.release()
        return self._local

    def land(self) -> None:
        """Brings what was read to where it is wanted."""
        if isinstance(self._local, Buffer):
            self._view[:] = self._local.view

    def __exit__(self, *_: object) -> None:
        assert self._local is not None
        self._local._give_back()
        self._view.release()
        self._keeper = None

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()
