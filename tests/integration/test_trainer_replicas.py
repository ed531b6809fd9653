"""A job spread over ranks and expert replicas computes what one rank alone computes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pacekeeper.core.layout import Layout
from support.training import CONFIG, RANKS, Run, alone, even, random_layout, skewed, train
from support.worlds import run_processes, run_world

FLOAT32 = replace(CONFIG, dtype="float32")


def spread(run: Run) -> dict[int, dict[str, Tensor]]:
    """The run on four ranks that are threads."""
    return run_world(RANKS, lambda fabric: train(fabric, run))


def assert_same(
    states: dict[int, dict[str, Tensor]], reference: dict[str, Tensor], rtol: float, atol: float
) -> None:
    seen: set[str] = set()
    for rank, state in states.items():
        for name, ours in state.items():
            where = f"{name} on rank {rank}"
            torch.testing.assert_close(ours, reference[name], rtol=rtol, atol=atol, msg=where)
        seen |= set(state)
    assert seen == set(reference), "every part of the model lives somewhere"


def assert_holders_agree(layout: Layout, states: dict[int, dict[str, Tensor]]) -> None:
    """Bit-equal: dense parameters on all ranks, an expert's on all its hosts, and nowhere else."""
    for rank, state in states.items():
        held = {name.rsplit("/", 1)[0] for name in state if name[0].isdigit()}
        wanted = {
            f"{layer}/{expert}"
            for layer in range(layout.num_layers)
            for expert in layout.experts_on(rank, layer)
        }
        assert held == wanted
    names = {name for state in states.values() for name in state}
    for name in names:
        copies = [state[name] for state in states.values() if name in state]
        assert all(torch.equal(copies[0], copy) for copy in copies[1:]), name


@pytest.mark.parametrize(
    "layout", [even(), skewed(), random_layout(5)], ids=["even", "skewed", "random"]
)
def test_any_layout_trains_as_one_rank_does_in_float64(layout: Layout) -> None:
    states = spread(Run(config=CONFIG, layouts=(layout,), steps=20))
    assert_same(states, alone(CONFIG, 20), rtol=1e-9, atol=1e-11)
    assert_holders_agree(layout, states)


def test_another_layout_every_step_changes_nothing() -> None:
    layouts = tuple(random_layout(seed, seed) for seed in range(1, 21))
    states = spread(Run(config=CONFIG, layouts=layouts, steps=20))
    assert_same(states, alone(CONFIG, 20), rtol=1e-9, atol=1e-11)
    assert_holders_agree(layouts[-1], states)


def test_micro_batches_change_nothing_even_where_some_are_empty() -> None:
    # 9 rows over ranks with 3, 0, 3, 3 rows in 3 parts: one rank walks empty parts throughout.
    config = replace(CONFIG, num_microbatches=3)
    states = spread(Run(config=config, layouts=(skewed(),), steps=5))
    assert_same(states, alone(CONFIG, 5), rtol=1e-9, atol=1e-11)


def test_in_float32_losses_stay_within_rounding_and_holders_bit_equal() -> None:
    layout = skewed()
    states = spread(Run(config=FLOAT32, layouts=(layout,), steps=10))
    reference = alone(FLOAT32, 10)["losses"]
    for state in states.values():
        torch.testing.assert_close(state["losses"], reference, rtol=1e-6, atol=0.0)
    assert_holders_agree(layout, states)


def test_real_processes_over_gloo_train_as_one_rank_does(tmp_path: Path) -> None:
    layouts = (skewed(), random_layout(3, 2))
    run = Run(config=CONFIG, layouts=layouts, steps=20)
    states = run_processes(RANKS, train, run, tmp_path)
    assert_same(states, alone(CONFIG, 20), rtol=1e-9, atol=1e-11)
    assert_holders_agree(layouts[-1], states)


def test_real_processes_in_float32_keep_holders_bit_equal(tmp_path: Path) -> None:
    states = run_processes(RANKS, train, Run(config=FLOAT32, layouts=(even(),), steps=10), tmp_path)
    reference = alone(FLOAT32, 10)["losses"]
    torch.testing.assert_close(states[7]["losses"], reference, rtol=1e-6, atol=0.0)
    assert_holders_agree(even(), states)


def test_the_loss_falls() -> None:
    losses = alone(CONFIG, 30)["losses"]
    assert losses[-3:].mean() < losses[:3].mean() - 1.0
