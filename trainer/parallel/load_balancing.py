"""Keeps experts evenly loaded: losses on the router, and the update of its bias.

The loss of a row (a sequence) looks at that row only, so it adds up over rows, micro-batches and
ranks: no layout changes it. The loss over a whole batch, as transformers and the Switch
Transformer compute it, is a product of two sums over all tokens; it needs the counts of all ranks
before the backward pass.

Shape suffixes: N tokens, K experts per token, E experts, R rows of T tokens, L layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def affinities(logits_NE: Tensor, *, is_sigmoid: bool, are_scores: bool) -> Tensor:
    """Return each token's affinity to each expert, normalised to a sum of 1.

    Args:
        logits_NE: Output of the router.
        is_sigmoid: Whether the router scores experts by a sigmoid, not by a softmax.
        are_scores: Whether `logits_NE` are scores already.
    """
    if logits_NE.dtype not in (torch.float32, torch.float64):
        logits_NE = logits_NE.float()
    if not is_sigmoid:
        return logits_NE.softmax(-1)
    scores = logits_NE if are_scores else logits_NE.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def row_counts(chosen_NK: Tensor, like: Tensor, first: int, num_rows: int, length: int) -> Tensor:
    """Return how many of some tokens of each row chose each expert, [R, E].

    Args:
        chosen_NK: Experts of each token.
        like: [N, E], of the type of the result.
        first: Place of the first token in the rows.
        num_rows: Rows of equal length.
        length: Of a row.
    """
    row_N = torch.arange(first, first + len(chosen_NK), device=chosen_NK.device) // length
    place = row_N[:, None] * like.shape[1] + chosen_NK
    counts = like.new_zeros(num_rows * like.shape[1])
    ones = like.new_ones(1).expand(place.numel())
    return counts.scatter_add_(0, place.flatten(), ones).view(num_rows, -1)


def sequence_loss(affinity_NE: Tensor, counts_RE: Tensor, first: int, length: int) -> Tensor:
    """Return the sum over rows of a row's loss times its tokens, or these tokens' part of it.

    A row's loss is E times the sum over experts of the part of its tokens that chose the expert
    (K in sum) times their mean affinity to it: K where both are even. It is the sequence-wise loss
    of DeepSeek-V3 times K, and transformers' `load_balancing_loss_func` of one row and layer.

    Args:
        affinity_NE: Normalised affinities.
        counts_RE: Tokens of each row that chose each expert, all of them (`row_counts`).
        first: Place of the first token in the rows.
        length: Tokens of a row.
    """
    row_N = torch.arange(first, first + len(affinity_NE), device=affinity_NE.device) // length
    sums = (affinity_NE * counts_RE.index_select(0, row_N)).sum()
    return affinity_NE.shape[1] * sums / length


def batch_loss(affinities_LNE: Sequence[Tensor], counts_E: Tensor, num_tokens: int) -> Tensor:
    """Return this rank's part of the loss over the whole batch and all layers; the parts add up.

    Args:
        affinities_LNE: Normalised affinities of this rank's tokens, by layer.
        counts_E: Rows routed to each expert by all ranks, summed over layers.
        num_tokens: Tokens of all ranks.
    """
    seen = num_tokens * len(affinities_LNE)
    sums_E = torch.stack([affinity.sum(0) for affinity in affinities_LNE]).sum(0)
    return len(counts_E) * (counts_E.to(sums_E.dtype) / seen * sums_E / seen).sum()


def update_bias(bias_E: Tensor, routed_E: Tensor, rate: float) -> None:
    """Raise the bias of experts with less than the mean load by `rate`, lower that of the others.

    Auxiliary-loss-free balancing of DeepSeek-V3; equal on all ranks, in place.

    Args:
        bias_E: The router's correction bias.
        routed_E: Rows routed to each expert by all ranks in the last step.
        rate: Size of an update.
    """
    load = routed_E.to(bias_E.dtype)
    bias_E.add_((load.mean() - load).sign(), alpha=rate)
