"""Random programs over seeds, in virtual time: credits, bundles, rendezvous, cancellation, the end.

`AIORDMA_SEEDS=17:18` runs seed 17 alone, again exactly as it was.
"""

from __future__ import annotations

import asyncio
import os
import random
from functools import partial

import pytest

from tests.session.pair import PairFactory, new_loop
from tests.transport.programs import run_seed

FIRST, LAST = map(int, os.environ.get("AIORDMA_SEEDS", "0:2000").split(":"))
BLOCKS = 8


@pytest.mark.parametrize("block", range(BLOCKS))
def test_whatever_is_done_nothing_is_lost_and_everything_ends(block: int) -> None:
    factory = PairFactory("", "", "tcp", 1.0)
    for seed in range(FIRST + block, LAST, BLOCKS):
        step = random.Random(seed).choice((1e-6, 1e-6, 1e-3))
        try:
            with asyncio.Runner(loop_factory=partial(new_loop, seed, step)) as runner:
                runner.run(run_seed(factory, seed))
        except BaseException as error:
            error.add_note(f"seed {seed}: AIORDMA_SEEDS={seed}:{seed + 1} runs it again")
            raise
