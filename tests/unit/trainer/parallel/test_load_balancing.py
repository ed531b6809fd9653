"""Load-balancing losses against transformers' own, and the update of a bias."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pacekeeper.trainer.parallel.load_balancing import (
    affinities,
    batch_loss,
    row_counts,
    sequence_loss,
    update_bias,
)

EXPERTS, CHOSEN, LAYERS, TOKENS = 5, 2, 3, 12


def layer_logits(layer: int, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(layer)
    made = torch.randn(tokens, EXPERTS, generator=generator, dtype=torch.float64)
    return made.requires_grad_()


def library_loss(logits: tuple[Tensor, ...]) -> Tensor:
    pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    found: Tensor = load_balancing_loss_func(logits, EXPERTS, CHOSEN)
    return found


def chosen_of(logits: Tensor) -> Tensor:
    return logits.topk(CHOSEN, -1).indices


def loss_of(affinity: Tensor, chosen: Tensor, rows: int, cuts: tuple[int, ...] = ()) -> Tensor:
    """The loss of rows whose tokens lie on one rank, or in slices on several."""
    length = len(affinity) // rows
    ends = [0, *cuts, len(affinity)]
    slices = [slice(first, end) for first, end in pairwise(ends)]
    counts = sum(row_counts(chosen[s], affinity, s.start, rows, length) for s in slices)
    parts = [sequence_loss(affinity[s], torch.as_tensor(counts), s.start, length) for s in slices]
    return torch.stack(parts).sum()


@pytest.mark.usefixtures("wide")
def test_a_row_alone_has_the_loss_of_the_library() -> None:
    logits = layer_logits(0)
    affinity = affinities(logits, is_sigmoid=False, are_scores=False)
    own = loss_of(affinity, chosen_of(logits), 1) / TOKENS
    expected = library_loss((logits,))
    assert torch.allclose(own, expected, rtol=1e-12)
    (mine,) = torch.autograd.grad(own, logits)
    (theirs,) = torch.autograd.grad(expected, logits)
    assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-14)


def test_losses_of_rows_add_up_however_they_are_divided() -> None:
    logits = layer_logits(1)
    affinity, chosen = affinities(logits, is_sigmoid=False, are_scores=False), chosen_of(logits)
    whole = loss_of(affinity, chosen, 4)
    parts = [loss_of(affinity[n : n + 3], chosen[n : n + 3], 1) for n in range(0, TOKENS, 3)]
    assert torch.allclose(whole, torch.stack(parts).sum(), rtol=1e-12)
    assert not torch.allclose(whole, loss_of(affinity, chosen, 2), rtol=1e-6)
    assert torch.allclose(whole, loss_of(affinity, chosen, 4, cuts=(2, 2, 7)), rtol=1e-12)


@pytest.mark.usefixtures("wide")
def test_parts_of_the_ranks_add_up_to_the_librarys_loss_over_the_batch() -> None:
    layers = [layer_logits(layer) for layer in range(LAYERS)]
    counts = torch.stack(
        [torch.bincount(chosen_of(x).flatten(), minlength=EXPERTS) for x in layers]
    )
    expected = library_loss(tuple(layers))
    own = [
        batch_loss(
            [affinities(x[part], is_sigmoid=False, are_scores=False) for x in layers],
            counts.sum(0),
            TOKENS,
        )
        for part in (slice(0, 5), slice(5, TOKENS))
    ]
    assert torch.allclose(torch.stack(own).sum(), expected, rtol=1e-12)
    mine = torch.autograd.grad(torch.stack(own).sum(), layers)
    theirs = torch.autograd.grad(expected, layers)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-14)


def test_affinities_of_a_sigmoid_add_up_to_one() -> None:
    logits = layer_logits(2)
    scores = logits.sigmoid()
    from_logits = affinities(logits, is_sigmoid=True, are_scores=False)
    assert torch.allclose(from_logits.sum(-1), torch.ones(TOKENS, dtype=torch.float64))
    assert torch.equal(from_logits, affinities(scores, is_sigmoid=True, are_scores=True))


def test_the_bias_rises_for_experts_below_the_mean_load() -> None:
    bias = torch.zeros(4)
    update_bias(bias, torch.tensor([10, 0, 4, 6]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.5, -0.5]
    update_bias(bias, torch.tensor([5, 5, 5, 5]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.5, -0.5]
