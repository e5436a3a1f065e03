"""Tests of random programs in virtual time, each determined by a seed.

The programs use credits, bundles, rendezvous and cancellation, and end in many ways.
`SESSION_SEEDS=17:18` repeats the run of seed 17 alone.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.session.pair import PairFactory, new_loop
from tests.transport.connection_factory import KEY
from tests.transport.programs import STRIPED, run_seed

BLOCKS = 8


def run_block(kinds: list[PairFactory], block: int, most: int, *more: tuple[Any, ...]) -> None:
    """Run every eighth seed below `most`, starting at `block`.

    SESSION_SEEDS ("first:end") replaces the range of seeds. The seeds use the factories in `kinds`
    in turn. Every fourth seed uses encryption.
    """
    first, last = map(int, os.environ.get("SESSION_SEEDS", f"0:{most}").split(":"))
    for seed in range(first + block, last, BLOCKS):
        step = random.Random(seed).choice((1e-6, 1e-6, 1e-3))
        factory = kinds[seed // BLOCKS % len(kinds)]
        if seed % 4 == 3:
            factory = replace(factory, auth=KEY, encrypt="messages")
        try:
            with asyncio.Runner(loop_factory=partial(new_loop, seed, step)) as runner:
                runner.run(run_seed(factory, seed, more))
        except BaseException as error:
            if "a write with immediate data was not" in str(
                error
            ):  # an error that a break may cause
                continue
            error.add_note(f"seed {seed}: SESSION_SEEDS={seed}:{seed + 1} runs it again")
            raise


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_programs_finish_without_losing_data(block: int) -> None:
    run_block([PairFactory("", "", "tcp", 1.0)], block, 500)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_programs_survive_the_failure_of_a_secondary_rail(block: int) -> None:
    factory = PairFactory("", "", "tcp", 1.0, rails=2, breaking=(1,))
    run_block([factory], block, 120, *STRIPED)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_programs_survive_the_failure_of_the_lead_rail(block: int) -> None:
    """The first rail breaks. Of three rails, the second one breaks too, possibly as the lead."""
    two = PairFactory("", "", "tcp", 1.0, rails=2, breaking=(0,))
    three = replace(two, rails=3, breaking=(0, 1))
    run_block([two, three, two, two], block, 200, *STRIPED)
