"""Slices of tokens: every token on one rank of a stage, and on its way to one of the next."""

from itertools import pairwise
from random import Random

import pytest
from benchmarks.random_meshes import random_mesh

from pacekeeper.trainer.parallel.mesh.token_slices import crossing, token_slices


@pytest.mark.parametrize("seed", range(20))
def test_every_token_goes_to_one_rank_of_the_other_stage(seed: int) -> None:
    chosen = Random(seed)
    layout = random_mesh(range(9), [2, 2, 2], 6, 1, chosen)
    tokens = chosen.randint(1, 40)
    for stages in layout.mesh:
        for stage in stages:
            slices = token_slices(stage, tokens)
            assert [t for cut in slices.values() for t in cut] == list(range(tokens))
        for here, there in pairwise(stages):
            sent, taken = token_slices(here, tokens), token_slices(there, tokens)
            for other, wanted in taken.items():
                got = [
                    own.start + t
                    for own in sent.values()
                    for t in crossing(own, taken).get(other, ())
                ]
                assert got == list(wanted)
                back = crossing(wanted, sent)
                assert sum(map(len, back.values())) == len(wanted)
