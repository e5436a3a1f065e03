"""Random programs over seeds, in virtual time: credits, bundles, rendezvous, cancellation, the end.

`AIORDMA_SEEDS=17:18` runs seed 17 alone, again exactly as it was.
"""

from __future__ import annotations

import asyncio
import os

from tests.session.pair import PairFactory, new_loop
from tests.transport.programs import run_seed

FIRST, LAST = map(int, os.environ.get("AIORDMA_SEEDS", "0:2000").split(":"))


def test_whatever_is_done_nothing_is_lost_and_everything_ends() -> None:
    factory = PairFactory("", "", "tcp", 1.0)
    for seed in range(FIRST, LAST):
        with asyncio.Runner(loop_factory=lambda seed=seed: new_loop(seed)) as runner:
            runner.run(run_seed(factory, seed))
