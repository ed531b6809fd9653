"""One MoE layer: experts by one grouped product or one by one, and a loss no layout can change."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.trainer.distributed.collectives import LocalFabric
from pacekeeper.trainer.toy.model.flop_counter import WorkMeter, WorkPass
from pacekeeper.trainer.toy.model.moe import ExpertBank, MoELayer, MoEOutput, drawn
from pacekeeper.trainer.toy.parallel.tensor_parallel import TensorGroup
from pacekeeper.trainer.toy.parallel.token_dispatcher import DispatchPlan

CONFIG = TrainConfig(
    num_layers=1, hidden_size=16, num_heads=2, expert_hidden_size=24, num_experts=4
)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Whatever tests of other files drew before."""
    torch.manual_seed(0)


def one_by_one(bank: ExpertBank, rows_RD: Tensor, counts: list[int]) -> Tensor:
    """What the experts should answer, in double precision."""
    parts = torch.split(rows_RD.double(), counts)
    return torch.cat(
        [
            torch.nn.functional.silu(part @ bank.w1[slot].double()) @ bank.w2[slot].double()
            for slot, part in enumerate(parts)
        ]
    )


@pytest.mark.parametrize("counts", [[5, 0, 7, 1], [0, 0, 13, 0], [1, 1, 1, 1], [0, 3, 0, 0]])
@pytest.mark.parametrize("wide", [24, 30], ids=["grouped", "unaligned"])
def test_experts_answer_their_own_rows(counts: list[int], wide: int) -> None:
    """30 columns are no multiple of 16 bytes, which the grouped product refuses."""
    bank = ExpertBank(replace(CONFIG, expert_hidden_size=wide), 0, (0, 1, 2, 3))
    rows_RD = torch.randn(sum(counts), 16, requires_grad=True)
    weight_RD = torch.randn(sum(counts), 16)
    answers = bank(rows_RD, torch.tensor(counts), WorkPass(WorkMeter()))
    expected = one_by_one(bank, rows_RD, counts)
    torch.testing.assert_close(answers, expected.float(), rtol=1e-4, atol=1e-5)
    parameters = [rows_RD, bank.w1, bank.w2]
    got = torch.autograd.grad((answers * weight_RD).sum(), parameters)
    wanted = torch.autograd.grad((expected * weight_RD).sum(), parameters)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-5)


def test_without_a_grouped_product_in_torch_the_answers_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bank = ExpertBank(CONFIG, 0, (0, 2, 3))
    rows_RD, counts_S = torch.randn(9, 16), torch.tensor([4, 0, 5])
    with_it = bank(rows_RD, counts_S, WorkPass(WorkMeter()))
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    torch.testing.assert_close(bank(rows_RD, counts_S, WorkPass(WorkMeter())), with_it)


@pytest.mark.parametrize("experts", [(), (1, 2)], ids=["no experts", "no rows"])
def test_a_bank_with_nothing_to_do_keeps_the_way_back_open(experts: tuple[int, ...]) -> None:
    bank = ExpertBank(CONFIG, 0, experts)
    rows_RD = torch.randn(0, 16, requires_grad=True)
    answers = bank(rows_RD, torch.zeros(len(experts), dtype=torch.int64), WorkPass(WorkMeter()))
    assert answers.shape == (0, 16)
    answers.sum().backward()
    assert rows_RD.grad is not None


def test_an_expert_starts_alike_on_every_rank_and_unlike_any_other() -> None:
    few, all_of_them = ExpertBank(CONFIG, 0, (2,)), ExpertBank(CONFIG, 0, (0, 1, 2, 3))
    assert torch.equal(few.w1[0], all_of_them.w1[2])
    assert torch.equal(few.w2[0], all_of_them.w2[2])
    others = [ExpertBank(CONFIG, 1, (2,)), ExpertBank(replace(CONFIG, seed=1), 0, (2,))]
    for other in [*all_of_them.w1[:2], *(bank.w1[0] for bank in others)]:
        assert not torch.equal(few.w1[0], other)


def test_a_drawn_parameter_is_rounded_from_the_same_double() -> None:
    double = drawn(replace(CONFIG, dtype="float64"), "x", 5, scale=0.1)
    assert torch.equal(drawn(CONFIG, "x", 5, scale=0.1), double.float())


def test_replacing_the_replicas_replaces_the_parameters() -> None:
    bank = ExpertBank(CONFIG, 0, (0, 1))
    before = bank.w1
    bank.replace((3,), {"w1": torch.ones(1, 16, 24), "w2": torch.ones(1, 24, 16)})
    assert bank.held == (3,)
    assert bank.w1 is not before
    assert [tuple(p.shape) for p in bank.parameters()] == [(1, 16, 24), (1, 24, 16)]
    assert all(p.requires_grad for p in bank.parameters())


def layer_output(
    config: TrainConfig, tokens_TD: Tensor, rows: list[int], router: Tensor | None
) -> MoEOutput:
    fabric = LocalFabric()
    layout = even_layout(ranks=[0], num_layers=1, num_experts=4, replicas=1)
    layer = MoELayer(config, 0, (0, 1, 2, 3))
    layer.routes = DispatchPlan.of(layout, 0, fabric)
    if router is not None:
        layer.norm_router.router.data = router[None]
    group = TensorGroup.of(layout.pipelines[0].stages[0], fabric)
    output = layer(
        tokens_TD, torch.tensor(rows), max(rows) + 1, group, fabric, WorkPass(WorkMeter())
    )
    assert isinstance(output, MoEOutput)
    return output


DOUBLE = replace(CONFIG, dtype="float64", experts_per_token=1)


def test_the_balance_loss_is_one_per_row_where_the_router_has_no_opinion() -> None:
    tokens_TD = torch.randn(9, 16, dtype=torch.float64)
    output = layer_output(DOUBLE, tokens_TD, [0] * 5 + [1] * 4, torch.zeros(4, 16).double())
    torch.testing.assert_close(output.balance_sum.item(), 2.0)


def test_the_balance_loss_is_the_number_of_experts_where_one_gets_all() -> None:
    tokens_TD = torch.ones(6, 16, dtype=torch.float64)
    router = torch.zeros(4, 16).double()
    router[2] = 100.0
    output = layer_output(DOUBLE, tokens_TD, [0] * 6, router)
    torch.testing.assert_close(output.balance_sum.item(), 4.0)
    assert output.routed_E.tolist() == [0, 0, 6, 0]


def test_the_balance_loss_of_rows_is_the_sum_of_each_alone() -> None:
    tokens_TD = torch.randn(12, 16, dtype=torch.float64)
    together = layer_output(DOUBLE, tokens_TD, [0] * 5 + [1] * 7, None)
    apart = [
        layer_output(DOUBLE, tokens_TD[:5], [0] * 5, None),
        layer_output(DOUBLE, tokens_TD[5:], [0] * 7, None),
    ]
    torch.testing.assert_close(together.balance_sum, apart[0].balance_sum + apart[1].balance_sum)


@pytest.mark.parametrize("chosen", [1, 2, 4])
def test_a_token_is_the_mixture_of_its_best_experts_by_renormalised_weights(chosen: int) -> None:
    config = replace(DOUBLE, experts_per_token=chosen)
    tokens_TD = torch.randn(6, 16, dtype=torch.float64)
    output = layer_output(config, tokens_TD, [0] * 6, None)
    normed = torch.nn.functional.rms_norm(tokens_TD, (16,))
    scores_TE = normed @ MoELayer(config, 0, (0, 1, 2, 3)).norm_router.router[0].T
    best_TK = scores_TE.topk(chosen, dim=-1).indices
    # Softmax over the chosen scores alone is the renormalised softmax over all of them.
    weights_TK = torch.softmax(scores_TE.gather(1, best_TK), dim=-1)
    weights_TE = torch.zeros_like(scores_TE).scatter(1, best_TK, weights_TK)
    expected = tokens_TD.clone()
    for expert in range(4):
        answer = one_by_one(ExpertBank(config, 0, (expert,)), normed, [6])
        expected = expected + weights_TE[:, expert, None] * answer
    torch.testing.assert_close(output.tokens_TD, expected)
    assert output.expert_rows == 6 * chosen
    assert output.num_active == len(set(best_TK.flatten().tolist()))
    assert output.rows_over == (0, 0, 0, 0)


def test_rows_beyond_a_knot_are_told_expert_by_expert() -> None:
    tokens_TD = torch.randn(90, 16, dtype=torch.float64)
    output = layer_output(replace(DOUBLE, experts_per_token=2), tokens_TD, [0] * 90, None)
    counts = output.routed_E.tolist()  # alone, a rank computes what it routes
    assert output.rows_over[:2] == (
        sum(max(0, n - 16) for n in counts),
        sum(max(0, n - 64) for n in counts),
    )
