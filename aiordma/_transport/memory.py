"""One connection's way to the pool: at once, or in line, until the connection ends.

Whoever must keep its order with others of its kind (messages to send, messages to fetch, receives)
takes its blocks from a `Supply`, which waits for one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .. import verbs
from ..config import Config
from ..errors import QuotaError
from ..mr_pool import Block, Buffer, MemoryPool, Region
from ..registration_cache import KeptMemory, RegistrationCache

Turn = asyncio.Future[Block]


class Memory:
    """Blocks and buffers of the pool, and registrations of the user's own memory."""

    def __init__(
        self,
        pool: MemoryPool,
        registrations: RegistrationCache,
        config: Config,
        waiter_error: Callable[[BaseException], BaseException],
    ) -> None:
        self.pool = pool
        self.registrations = registrations
        registrations.set_up(config.cached_registrations, config.cached_bytes)
        self._waiter_error = waiter_error
        self._turns: set[Turn] = set()
        self._supplies: list[Supply] = []
        self._ended: BaseException | None = None

    @property
    def pd(self) -> verbs.ProtectionDomain:
        return self.pool.pd

    async def block(self, size: int, *, brief: bool = True) -> Block:
        """Waits for a block; the connection's error when that ends first.

        QuotaError at once for what the pool can never hold.
        """
        if self._ended is not None:
            raise self._waiter_error(self._ended)
        block = self.pool.block_in_turn(size)
        if block is not None:
            return block
        turn = self.pool.line.join(size, brief=brief)
        self._turns.add(turn)
        try:
            return await turn
        except BaseException:
            self.pool.line.leave(turn)
            raise
        finally:
            self._turns.discard(turn)

    async def lease(self, size: int, *, brief: bool) -> Buffer:
        """As `block`, for as many bytes as they are."""
        return Buffer(await self.block(size, brief=brief), size)

    def register(self, data: object, view: memoryview) -> Region | KeptMemory:
        """The user's `data`, whose bytes are `view`, for one operation: to be closed after it."""
        kept = self.registrations.find(data)
        return Region(self.pd.reg_mr(view)) if kept is None else kept

    def supply(self, on_memory: Callable[[], None], *, brief: bool, kept: bool = False) -> Supply:
        supply = Supply(self.pool, on_memory, brief=brief, kept=kept)
        self._supplies.append(supply)
        return supply

    def end(self, error: BaseException) -> None:
        """The connection is over: who waits for memory gets `error` instead."""
        self._ended = error
        for supply in self._supplies:
            supply.close()
        for turn in list(self._turns):
            if not turn.done():
                turn.set_exception(self._waiter_error(error))


class Supply:
    """Blocks for things in a row.  While there is none, the whole row waits.

    `on_memory` is called when it need wait no more, and asks for what is first in the row then.
    """

    def __init__(
        self,
        pool: MemoryPool,
        on_memory: Callable[[], None],
        *,
        brief: bool,
        kept: bool = False,
    ) -> None:
        self.pool = pool
        self._on_memory = on_memory
        self._brief = brief
        self._kept = kept
        self._turn: Turn | None = None
        self._came: Block | None = None

    @property
    def waiting(self) -> bool:
        return self._turn is not None

    def block(self, size: int) -> Block | None:
        """A block, or None: then `on_memory` will be called.

        QuotaError for what the pool can never hold.
        """
        if self._turn is not None:
            return None
        block, self._came = self._came, None
        if block is not None:
            if block.size >= size:
                return block
            block.release()
        block = self.pool.block_in_turn(size)
        if block is None:
            self._turn = self.pool.line.join(size, brief=self._brief, kept=self._kept)
            self._turn.add_done_callback(self._done)
        return block

    def _done(self, turn: Turn) -> None:
        if turn is not self._turn:
            return  # closed meanwhile
        self._turn = None
        # An error of the device is met again, and reported, by who asks again.
        self._came = turn.result() if turn.exception() is None else None
        self._on_memory()
        if self._came is not None:  # who wanted it has gone
            self._came.release()
            self._came = None

    def close(self) -> None:
        """Nothing is wanted any more."""
        self._on_memory = nobody
        turn, self._turn = self._turn, None
        if turn is not None:
            self.pool.line.leave(turn)


def nobody() -> None:
    """Who has gone needs no memory."""


def never(pool: MemoryPool, size: int) -> QuotaError | None:
    """Why a block of that size can never come, if so."""
    try:
        pool.require_possible(size)
    except QuotaError as error:
        return error
    return None
