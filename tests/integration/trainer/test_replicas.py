"""A job spread over ranks that are processes, over gloo, computes what one rank alone computes.

Any layout, with ranks that are threads: tests/property/trainer/test_spread_exact.py.
"""

from pathlib import Path

import torch

from support.training import (
    FLOAT32,
    HEADS,
    PAIRS,
    RANKS,
    Run,
    alone,
    assert_holders_agree,
    assert_same,
    even,
    in_groups,
    random_layout,
    skewed,
    train,
)
from support.worlds import run_processes


def test_real_processes_over_gloo_train_as_one_rank_does(tmp_path: Path) -> None:
    apart = [[(rank, 4)] for rank in RANKS]
    layouts = (in_groups(skewed(), *apart), in_groups(random_layout(3, 2), *PAIRS))
    run = Run(config=HEADS, layouts=layouts, steps=12)
    states = run_processes(RANKS, train, run, tmp_path)
    assert_same(states, alone(HEADS, 12, num_shards=4), rtol=1e-9, atol=1e-11)
    assert_holders_agree(layouts[-1], states)


def test_real_processes_in_float32_keep_holders_bit_equal(tmp_path: Path) -> None:
    states = run_processes(RANKS, train, Run(config=FLOAT32, layouts=(even(),), steps=10), tmp_path)
    reference = alone(FLOAT32, 10)["losses"]
    torch.testing.assert_close(states[7]["losses"], reference, rtol=1e-6, atol=0.0)
    assert_holders_agree(even(), states)
