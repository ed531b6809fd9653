"""Balancing of experts in the engine: the same under any layout, and it balances."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.engine.routing import Balance, correction_biases
from pacekeeper.trainer.parallel.layouts import start_layout
from support.engines import adamw, engine_of, micro_batches, rows_of
from support.rank_threads import ThreadGroup, run_ranks

RANKS, STEPS = 3, 3
CUTS = (0, 2, 2, 7)  # the second rank has no rows


def train(family: str, group: ThreadGroup | None, size: int, **given: Any) -> list[float]:
    """Norms of gradients in a few steps: they show the loss, which the reported one leaves out."""
    if group is not None:
        counts = [0 if family == "deepseek_v3" and layer == 0 else 4 for layer in range(2)]
        given["layout"] = start_layout(counts, group.ranks, replicas=2)
    engine = engine_of(family, group, **given)
    adamw(engine)
    norms = []
    for step in range(STEPS):
        rows = rows_of(step)
        if group is not None:
            rows = rows[CUTS[group.rank] : CUTS[group.rank + 1]]
        norms.append(engine.step(micro_batches(rows, size)).grad_norm.item())
    return norms


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(
    ("family", "balance", "size"),
    [
        ("qwen3_moe", Balance.SEQUENCE, 2),
        ("qwen3_moe", Balance.BATCH, 9),
        ("deepseek_v3", Balance.SEQUENCE, 2),
    ],
)
@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_the_loss_is_the_same_on_any_layout(
    family: str, balance: Balance, size: int, checkpoint_activations: bool
) -> None:
    given = {"balance": balance, "balance_weight": 0.3}
    alone = train(family, None, 9, **given)
    assert alone != pytest.approx(train(family, None, 9), rel=1e-4), "the loss does nothing"

    def work(group: ThreadGroup) -> list[float]:
        more = {"checkpoint_activations": checkpoint_activations}
        return train(family, group, size, **given, **more)

    for norms in run_ranks(RANKS, work):
        assert norms == pytest.approx(alone, rel=1e-11)


def test_biases_are_updated_alike_on_all_ranks_and_level_the_load() -> None:
    def work(group: ThreadGroup) -> tuple[torch.Tensor, list[float]]:
        engine = engine_of("deepseek_v3", group, bias_rate=0.02)
        correction_biases(engine.skeleton)[1][2] = 0.3  # too much for the third expert
        engine.add_optimizer(torch.optim.SGD(engine.parameters(), lr=1e-9))
        spreads = []
        for _ in range(12):
            rows = rows_of(0)[CUTS[group.rank] : CUTS[group.rank + 1]]
            routed = engine.step(micro_batches(rows)).routed[1].double()
            spreads.append((routed.std() / routed.mean()).item())
        return correction_biases(engine.skeleton)[1].clone(), spreads

    found = run_ranks(RANKS, work)
    assert all(torch.equal(found[0][0], bias) for bias, _ in found)
    assert found[0][0][2] < 0.3
    assert found[0][1][-1] < 0.8 * found[0][1][0]


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: engine_of("llama", bias_rate=0.1),
        lambda: engine_of("llama", balance_weight=0.1),
        lambda: engine_of("mixtral", bias_rate=0.1),
    ],
)
def test_what_a_family_lacks_is_not_skipped(attempt: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        attempt()
