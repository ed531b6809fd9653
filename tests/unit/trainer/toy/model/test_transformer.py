"""The model: what a document's loss depends on, what it does not, and how its work is counted."""

from dataclasses import replace

import pytest
import torch

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.telemetry.expert_row_features import rows_over
from pacekeeper.trainer.distributed.collectives import LocalFabric
from pacekeeper.trainer.toy.model.dataset import NO_TARGET, Batch, Corpus
from pacekeeper.trainer.toy.model.flop_counter import OpCount, WorkMeter, WorkPass
from pacekeeper.trainer.toy.model.transformer import ModelOutput, MoETransformer, document_mask
from support.training import CONFIG as SMALL
from support.training import RANKS, Run, even, rows_of, skewed
from support.worlds import ThreadFabric, run_world

CONFIG = TrainConfig(
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    expert_hidden_size=16,
    num_experts=4,
    row_tokens=40,
    dtype="float64",
)
LAYOUT = even_layout(ranks=[0], num_layers=2, num_experts=4, replicas=1)
A, B, C = b"def first(): pass", b"x = [1, 2, 3]", b"import sys, os"


def model() -> MoETransformer:
    made = MoETransformer(CONFIG, LAYOUT, 0)
    made.set_layout(LAYOUT, LocalFabric())
    return made


MODEL = model()


def batch_of(*rows: tuple[bytes, ...]) -> Batch:
    corpus = Corpus(rows=rows, row_tokens=40, rows_per_step=len(rows), seed=0)
    return corpus.batch(0, range(len(rows)))


def forward(batch: Batch) -> ModelOutput:
    output = MODEL(batch, WorkPass(WorkMeter()))
    assert isinstance(output, ModelOutput)
    return output


def loss(*rows: tuple[bytes, ...]) -> float:
    return forward(batch_of(*rows)).loss_sum.item()


def test_each_token_but_a_documents_last_comes_to_the_head() -> None:
    assert forward(batch_of((A, B), (C,))).head_tokens == len(A) + len(B) + len(C) - 3


def test_a_document_costs_the_same_in_any_company_and_at_any_place() -> None:
    """So attention stays within documents, positions begin anew, and padding does nothing."""
    alone = loss((A,)), loss((B,)), loss((C,))
    assert loss((A, B)) == pytest.approx(alone[0] + alone[1], rel=1e-12)
    assert loss((B, A)) == pytest.approx(alone[0] + alone[1], rel=1e-12)
    assert loss((A,), (C, B)) == pytest.approx(sum(alone), rel=1e-12)


def test_a_changed_document_changes_its_own_loss_only() -> None:
    changed = A.replace(b"first", b"other")
    only_b = batch_of((A, B)), batch_of((changed, B))
    for batch in only_b:
        batch.targets[batch.documents == 0] = NO_TARGET
    before, after = (forward(batch).loss_sum.item() for batch in only_b)
    assert before == pytest.approx(after, rel=1e-12)
    assert abs(loss((A, B)) - loss((changed, B))) > 0.01


def test_a_token_knows_the_past_of_its_document_and_not_the_future() -> None:
    def loss_of_target(place: int, document: bytes) -> float:
        batch = batch_of((document,))
        kept = batch.targets[0, place].item()
        batch.targets[:] = NO_TARGET
        batch.targets[0, place] = kept
        return forward(batch).loss_sum.item()

    here = loss_of_target(5, A)
    assert loss_of_target(5, A[:7] + b"??????????") == pytest.approx(here, rel=1e-12)
    assert abs(loss_of_target(5, b"D" + A[1:]) - here) > 1e-6


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_attention_is_the_same_however_many_shards_its_heads_make(num_shards: int) -> None:
    config = replace(CONFIG, num_heads=4)
    batch, losses, gradients = batch_of((A, B), (C, A)), [], []
    for count in (1, num_shards):
        layout = even_layout(
            ranks=[0], num_layers=2, num_experts=4, replicas=1, num_virtual_shards=count
        )
        made = MoETransformer(config, layout, 0)
        made.set_layout(layout, LocalFabric())
        output = made(batch, WorkPass(WorkMeter()))
        output.loss_sum.backward()
        losses.append(output.loss_sum.item())
        banks = (made.embedding, made.layers()[0].norm_router)
        gradients.append([p.grad for bank in banks for p in bank.parameters()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_heads_that_do_not_make_equal_shards_are_refused() -> None:
    three = even_layout(ranks=[0], num_layers=2, num_experts=4, replicas=1, num_virtual_shards=3)
    with pytest.raises(ValueError, match="2 heads do not make 3 equal shards"):
        MoETransformer(CONFIG, three, 0)


def test_the_mask_is_causal_within_documents() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1, 1, -1]]))[0, 0].int()
    assert mask.tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def test_an_untrained_model_is_about_as_wise_as_a_die_of_256_sides() -> None:
    per_token = loss((A, B), (C,)) / (len(A + B + C) - 3)
    assert 5.0 < per_token < 7.0


def test_no_rows_cost_nothing_and_can_be_walked_back() -> None:
    output = forward(Corpus(rows=((A,),), row_tokens=40, rows_per_step=1, seed=0).batch(0, []))
    assert output.loss_sum.item() == 0.0
    assert output.balance_sum.item() == 0.0
    assert output.expert_counts.tolist() == [[0] * 4] * 2
    (output.loss_sum + output.balance_sum).backward()


def test_the_balance_loss_is_the_sum_over_layers_and_rows() -> None:
    undecided = model()
    for layer in undecided.layers():
        layer.norm_router.router.data.zero_()
    output = undecided(batch_of((A, B), (C,), (B,)), WorkPass(WorkMeter()))
    assert output.balance_sum.item() == pytest.approx(2 * 3)


def test_every_parameter_learns() -> None:
    MODEL.zero_grad()
    output = forward(batch_of((A, B), (C, A)))
    (output.loss_sum + output.balance_sum).backward()
    for name, parameter in MODEL.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0.0, name


def test_counts_are_of_real_tokens() -> None:
    output = forward(batch_of((A, B), (C,)))
    tokens = len(A + B + C)
    assert output.expert_counts.shape == (2, 4)
    assert output.expert_counts.sum(1).tolist() == [tokens * CONFIG.experts_per_token] * 2
    assert output.expert_rows == 2 * tokens * CONFIG.experts_per_token
    assert output.num_active_experts == int((output.expert_counts > 0).sum())
    assert output.rows_over == rows_over(output.expert_counts.flatten().tolist())


def test_dense_parameters_are_the_same_whatever_the_layout() -> None:
    everything = MoETransformer(SMALL, even(), 0)
    for rank in RANKS:
        other = MoETransformer(SMALL, skewed(), rank)
        pairs = zip(everything.dense_parameters(), other.dense_parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        banks = sum(len(list(layer.bank.parameters())) for layer in other.layers())
        assert len(list(other.parameters())) == len(other.dense_parameters()) + banks


def test_backward_work_is_twice_the_forward_work_on_every_rank() -> None:
    """Each forward segment is booked once more, twofold, by the walk back - none lost or double."""
    run = Run(config=SMALL, layouts=(skewed(),), steps=1)
    corpus = Corpus.from_stdlib(SMALL)

    def body(fabric: ThreadFabric) -> tuple[OpCount, OpCount, int]:
        layout, meter = run.layouts[0], WorkMeter()
        worker = MoETransformer(SMALL, layout, fabric.rank)
        worker.set_layout(layout, fabric)
        batch = corpus.batch(0, rows_of(layout, SMALL, fabric.rank))
        work = WorkPass(meter)
        output = worker(batch, work)
        there = meter.take()
        (output.loss_sum + output.balance_sum).backward()
        work.finish_backward()
        return there, meter.take(), output.expert_rows

    results = run_world(RANKS, body)
    for there, back, _ in results.values():
        assert back.flops == pytest.approx(2.0 * there.flops)
        assert back.bytes == pytest.approx(2.0 * there.bytes)
        assert back.kernels == pytest.approx(2.0 * there.kernels)
    rows = sum(rows for _, _, rows in results.values())
    assert rows == corpus.num_tokens(0) * SMALL.experts_per_token * SMALL.num_layers
