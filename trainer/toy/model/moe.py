"""One mixture-of-experts layer: router, balance loss, and the expert replicas this rank holds.

Shape suffixes: T tokens, E experts, K experts per token, S local slots, D hidden, H expert hidden,
R rows. Weights of an expert are drawn from (seed, layer, expert): any rank builds the same ones.
"""

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.telemetry.expert_row_features import rows_over
from pacekeeper.trainer.distributed.collectives import Collectives
from pacekeeper.trainer.toy.model.flop_counter import (
    WorkPass,
    combine_work,
    expert_work,
    router_work,
)
from pacekeeper.trainer.toy.model.split_backward_linear import product
from pacekeeper.trainer.toy.model.stacked_params import StackedParams
from pacekeeper.trainer.toy.parallel.tensor_parallel import TensorGroup
from pacekeeper.trainer.toy.parallel.token_dispatcher import DispatchPlan, combine, dispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEOutput:
    """What one layer gives: tokens_TD, the balance loss summed over rows, and its loads."""

    tokens_TD: Tensor
    balance_sum: Tensor
    routed_E: Tensor  # own tokens routed to each expert
    expert_rows: int  # rows the local experts computed
    num_active: int
    rows_over: tuple[int, ...]  # of them, beyond each of KNOTS at their expert


def drawn(config: TrainConfig, name: str, *shape: int, scale: float) -> nn.Parameter:
    """A normal parameter that depends on the seed and its name only."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), config.seed))
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return nn.Parameter(values.to(getattr(torch, config.dtype)))


def _can_group(weights: Tensor) -> bool:
    """True where one grouped product serves all experts: on CPU, float32, rows of whole 16 bytes.

    Newer than the oldest torch we take; without it the experts are walked one by one.
    """
    aligned = all(size % 4 == 0 for size in weights.shape[1:])
    is_known = weights.device.type == "cpu" and weights.dtype == torch.float32
    return is_known and aligned and hasattr(F, "grouped_mm")


class NormRouter(StackedParams):
    """What a layer has once and every rank of its stage holds: attention_norm [S, D], norm [S, D],
    router [S, E, D]; S is 1 there, and 0 on other stages.
    """

    attention_norm: nn.Parameter
    norm: nn.Parameter
    router: nn.Parameter

    def __init__(self, config: TrainConfig, layer: int, held: tuple[int, ...]) -> None:
        hidden, dtype = config.hidden_size, getattr(torch, config.dtype)
        shape = (config.num_experts, hidden)

        def one(_: int) -> dict[str, Tensor]:
            router = drawn(config, f"{layer}/router", *shape, scale=hidden**-0.5)
            ones = torch.ones(hidden, dtype=dtype)
            return {"attention_norm": ones, "norm": ones, "router": router.data}

        shapes = {"attention_norm": (hidden,), "norm": (hidden,), "router": shape}
        super().__init__(shapes, dtype, held, one)


class ExpertBank(StackedParams):
    """The expert replicas of one layer on this rank: w1 [S, D, H], w2 [S, H, D]."""

    w1: nn.Parameter
    w2: nn.Parameter

    def __init__(self, config: TrainConfig, layer: int, experts: tuple[int, ...]) -> None:
        hidden, wide = config.hidden_size, config.expert_hidden_size

        def one(expert: int) -> dict[str, Tensor]:
            name = f"{layer}/{expert}"
            w1 = drawn(config, f"{name}/w1", hidden, wide, scale=hidden**-0.5)
            w2 = drawn(config, f"{name}/w2", wide, hidden, scale=wide**-0.5)
            return {"w1": w1.data, "w2": w2.data}

        shapes = {"w1": (hidden, wide), "w2": (wide, hidden)}
        super().__init__(shapes, getattr(torch, config.dtype), experts, one)

    def forward(self, rows_RD: Tensor, counts_S: Tensor, work: WorkPass) -> Tensor:
        """The experts' answers; rows are grouped by slot, counts_S rows each."""
        if not self.held or rows_RD.shape[0] == 0:
            # Nothing to compute, but the backward collectives still need their way through.
            return rows_RD * 1.0
        if work.later is None and _can_group(self.w1):
            ends_S = torch.cumsum(counts_S, 0).to(torch.int32)
            hidden = F.silu(F.grouped_mm(rows_RD, self.w1, offs=ends_S))
            return F.grouped_mm(hidden, self.w2, offs=ends_S)
        answers = [
            product(F.silu(product(part, self.w1[slot].T, work)), self.w2[slot].T, work)
            for slot, part in enumerate(torch.split(rows_RD, counts_S.tolist()))
        ]
        return torch.cat(answers)


class MoELayer(nn.Module):
    """Pre-norm router over E experts, top-K, dropless; experts on any ranks."""

    def __init__(
        self,
        config: TrainConfig,
        layer: int,
        experts: tuple[int, ...],
        norm_router: tuple[int, ...] = (0,),
    ) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.norm_router = NormRouter(config, layer, norm_router)
        self.bank = ExpertBank(config, layer, experts)
        self.routes: DispatchPlan | None = None

    def forward(
        self,
        tokens_TD: Tensor,
        row_T: Tensor,
        num_rows: int,
        group: TensorGroup,
        fabric: Collectives,
        work: WorkPass,
    ) -> MoEOutput:
        """`row_T` tells which row of the batch a token lies in (the balance loss is per row);
        others of the `group` have the other tokens of these rows.
        """
        assert self.routes is not None, "set_layout() comes before forward()"
        config = self.config
        num_experts, chosen = config.num_experts, config.experts_per_token
        own = self.norm_router
        normed_TD = F.rms_norm(tokens_TD, (config.hidden_size,), own.norm[0])
        probabilities_TE = torch.softmax(product(normed_TD, own.router[0], work), dim=-1)
        weights_TK, experts_TK = torch.topk(probabilities_TE, chosen, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        balance_sum = _balance(probabilities_TE, experts_TK, row_T, num_rows, group)
        work.add(router_work(len(tokens_TD), config.hidden_size, num_experts))
        dispatched = dispatch(normed_TD, experts_TK, self.routes, num_experts, fabric, work)
        work.meter.add_routed(self.layer, dispatched.routed_E.tolist())
        counts_S = dispatched.counts_E[list(self.bank.held)]
        answers_RD = self.bank(dispatched.rows_RD, counts_S, work)
        counts = counts_S.tolist()
        num_rows_here, num_active = len(answers_RD), sum(count > 0 for count in counts)
        work.add(
            expert_work(num_rows_here, num_active, config.hidden_size, config.expert_hidden_size)
        )
        mixed_TD = combine(answers_RD, dispatched, weights_TK, fabric, work)
        work.add(combine_work(len(tokens_TD), chosen, config.hidden_size))
        return MoEOutput(
            tokens_TD=tokens_TD + mixed_TD,
            balance_sum=balance_sum,
            routed_E=torch.bincount(experts_TK.reshape(-1), minlength=num_experts),
            expert_rows=num_rows_here,
            num_active=num_active,
            rows_over=rows_over(counts),
        )


def _balance(
    probabilities_TE: Tensor,
    experts_TK: Tensor,
    row_T: Tensor,
    num_rows: int,
    group: TensorGroup,
) -> Tensor:
    """Load-balancing loss E * sum_e f_e P_e (Switch Transformer, eq. 4), per row, summed.

    Per row rather than per batch, so that it does not depend on who computes which rows; of a row
    that the group shares, each rank has the part of its tokens.
    """
    num_experts, chosen = probabilities_TE.shape[1], experts_TK.shape[1]
    flat_A = (row_T[:, None] * num_experts + experts_TK).reshape(-1)
    routed = group.total(torch.bincount(flat_A, minlength=num_rows * num_experts))
    routed_RE = routed.view(num_rows, num_experts)
    assigned_R = routed_RE.sum(1, keepdim=True).clamp(min=chosen)  # tokens * K
    mean_RE = probabilities_TE.new_zeros(num_rows, num_experts)
    mean_RE = mean_RE.index_add(0, row_T, probabilities_TE) / (assigned_R / chosen)
    fraction_RE = routed_RE / assigned_R
    return num_experts * (fraction_RE * mean_RE).sum()
