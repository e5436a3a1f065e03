"""Memory whose lease ends while the other end uses it.

Whatever is under way then is done with the right bytes, or fails, which breaks the connection, as
verbs have it.  From then on nothing of the memory changes but by its owner, and nothing beside it
ever did.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import ClassVar

from aiordma import ConnectionBrokenError, RemoteRegion
from aiordma.errors import RemoteAccessError
from aiordma.mr_pool import LocalMemory
from tests.transport.connection_factory import lease_over

from .memory import ALL, COUNTER, LANES, LENT, Lane, Memory, parts, some_memory
from .pattern import Wrong
from .plan import Plan

# What ends: the lease of a share, a revoked share, or the lease of a loan.
LEASE, REVOKED, LOAN = "lease", "revoked", "loan"
HOW = (LEASE, REVOKED, LOAN)
LONGEST = 0.05  # seconds
FAR = 60.0  # a lease that has not ended by then counts as hung

# Unshared bytes on both sides of the shared ones, less than a page.
BESIDE = 1016


def how_it_ends(plan: Plan) -> str:
    return plan.chance("how it ends").choice(HOW)


def disobey(remote: RemoteRegion) -> None:
    """From now on its user takes no notice of the lease: the owner's device has to."""
    remote._deadline, remote._usable = 0.0, True
    for told in ("_take_back", "_lease_from"):
        setattr(remote, told, lambda *_: None)


class Leases(Memory):
    """The part of one end."""

    breaks: ClassVar[bool] = True

    async def run(self) -> None:
        self._how = how_it_ends(self.plan)
        self._seconds = self.plan.chance("lease").uniform(1e-3, LONGEST)
        if self._how == LOAN:
            self.plan = replace(self.plan, largest=min(self.plan.largest, LENT // 2))
        await super().run()

    # ---- the owner of the memory ------------------------------------------------------------

    async def _own(self) -> None:
        if self._how == LOAN:
            await self._until_broken()
            return
        conn, plan = self.conn, self.plan
        _, _, size = parts(plan)
        with some_memory(conn, plan.chance("memory"), BESIDE + size + BESIDE) as memory:
            view = memory.view
            before, middle, behind = view[:BESIDE], view[BESIDE:-BESIDE], view[-BESIDE:]
            number = plan.number("beside")
            before[:] = self.patterns.of(number, BESIDE)
            behind[:] = self.patterns.of(number + 1, BESIDE)
            middle[: LANES * COUNTER] = bytes(LANES * COUNTER)
            await self._share_for_a_while(memory[BESIDE:-BESIDE])
            middle[:] = self.patterns.of(number + 2, size)
            await self._until_broken()
            self.patterns.check("memory before what was shared", number, before)
            self.patterns.check("memory behind what was shared", number + 1, behind)
            self.patterns.check("memory that is shared no more", number + 2, middle)
            del view, before, middle, behind

    async def _share_for_a_while(self, memory: LocalMemory) -> None:
        lease = self._seconds if self._how == LEASE else None
        share = await self.conn.send_region(memory, access=ALL, lease=lease)
        assert share is not None
        with share:
            if self._how == REVOKED:
                await asyncio.sleep(self._seconds)
            else:
                await lease_over(share, FAR)

    async def _until_broken(self) -> None:
        try:
            with await self.conn.recv() as message:
                raise Wrong(f"{message!r} from the side that only uses memory")
        except ConnectionBrokenError:
            self.tally.count(f"ended during use: {self._how}")

    # ---- the user of the memory ------------------------------------------------------------

    async def _use(self) -> None:
        conn, plan = self.conn, self.plan
        lanes, _, size = parts(plan)
        if self._how == LOAN:
            remote = await conn.request_region(size, access=ALL, lease=self._seconds)
        else:
            remote = await conn.recv_region()
            if len(remote) != size:
                raise Wrong(f"{size} bytes were to be shared, not {remote!r}")
        disobey(remote)
        ends = await asyncio.gather(
            *(
                Lane(self, remote, lane, plan.chance("lane", lane)).until_refused()
                for lane in range(lanes)
            ),
            return_exceptions=True,
        )
        for end in ends:
            assert isinstance(end, BaseException)
            if not isinstance(end, RemoteAccessError | ConnectionBrokenError):
                raise end
            self.tally.count(f"refused as {type(end).__name__}")
