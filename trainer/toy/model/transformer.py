"""A small but real mixture-of-experts transformer, cut into stages, heads and expert replicas.

Byte tokens, positions per document, block-diagonal causal attention, top-k routed experts. Shape
suffixes: B rows, L tokens of a row, P = B * L places, T real tokens of the batch, S of them this
rank's slice (all, where it holds all heads), W columns of the heads that are here, D hidden.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.core.layout.replica_spread import NO_DOMAINS, DomainOf
from pacekeeper.core.telemetry.expert_row_features import NO_ROWS_OVER
from pacekeeper.trainer.distributed.collectives import Collectives
from pacekeeper.trainer.toy.model.dataset import NO_TARGET, Batch
from pacekeeper.trainer.toy.model.flop_counter import OpCount, WorkPass, attention_work, head_work
from pacekeeper.trainer.toy.model.moe import MoELayer, drawn
from pacekeeper.trainer.toy.model.split_backward_linear import product
from pacekeeper.trainer.toy.model.stacked_params import StackedParams
from pacekeeper.trainer.toy.parallel.tensor_parallel import TensorGroup
from pacekeeper.trainer.toy.parallel.token_dispatcher import DispatchPlan

VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """Sums over the batch (never means: the caller divides by global counts).

    tokens_SD: what leaves the stage; `loss_sum`: on the last one, 0 elsewhere, and so are
    `head_tokens`, those of the slice that have a target. `expert_counts`
    int64 [layers of the stage, experts]: own tokens' routing. `expert_rows`, `rows_over` and
    `num_active_experts`: what the local experts computed, all layers together.
    """

    tokens_SD: Tensor
    head_tokens: int
    loss_sum: Tensor
    balance_sum: Tensor
    expert_counts: Tensor
    expert_rows: int
    num_active_experts: int
    rows_over: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the real tokens of a batch stand among its rows, and which of them see each other.

    real_T: their places in the flattened rows; `work`: of one layer's attention, all heads.
    """

    rows: int
    length: int
    real_T: Tensor
    mask_B1LL: Tensor
    work: OpCount

    @classmethod
    def of(cls, batch: Batch, hidden_size: int, dtype: torch.dtype) -> "Places":
        rows, length = batch.documents.shape
        return cls(
            rows=rows,
            length=length,
            real_T=(batch.documents >= 0).reshape(-1).nonzero()[:, 0],
            mask_B1LL=attention_mask(batch.documents, dtype),  # once for all layers
            work=attention_work(batch.num_tokens, batch.sum_len_squared, hidden_size),
        )


class AttentionShards(StackedParams):
    """Heads of one layer on this rank, W columns of queries, keys and values in each shard:
    qkv [S, 3 * W, D], out [S, D, W].
    """

    qkv: nn.Parameter
    out: nn.Parameter

    def __init__(
        self, config: TrainConfig, layer: int, num_shards: int, shards: tuple[int, ...]
    ) -> None:
        hidden, width = config.hidden_size, config.hidden_size // num_shards
        qkv = drawn(config, f"{layer}/qkv", 3 * hidden, hidden, scale=hidden**-0.5).data
        out = drawn(config, f"{layer}/out", hidden, hidden, scale=0.5 * hidden**-0.5).data

        def one(shard: int) -> dict[str, Tensor]:
            own = slice(shard * width, (shard + 1) * width)
            rows = qkv.view(3, hidden, hidden)[:, own].reshape(3 * width, hidden)
            return {"qkv": rows, "out": out[:, own]}

        shapes = {"qkv": (3 * width, hidden), "out": (hidden, width)}
        super().__init__(shapes, getattr(torch, config.dtype), shards, one)


class Embedding(StackedParams):
    """Of tokens [S, V, D] and of places in a document [S, L, D]; S is 1 on the first stage's ranks,
    0 on others.
    """

    embedding: nn.Parameter
    places: nn.Parameter

    def __init__(self, config: TrainConfig, held: tuple[int, ...]) -> None:
        hidden = config.hidden_size
        shapes = {"embedding": (VOCABULARY, hidden), "places": (config.row_tokens, hidden)}
        scales = {"embedding": 0.5, "places": 0.1}

        def one(_: int) -> dict[str, Tensor]:
            return {n: drawn(config, n, *shapes[n], scale=scales[n]).data for n in shapes}

        super().__init__(shapes, getattr(torch, config.dtype), held, one)


class Head(StackedParams):
    """The last norm [S, D] and the way to the vocabulary [S, V, D]; S is 1 on the last stage's
    ranks, 0 on others.
    """

    norm: nn.Parameter
    head: nn.Parameter

    def __init__(self, config: TrainConfig, held: tuple[int, ...]) -> None:
        hidden, dtype = config.hidden_size, getattr(torch, config.dtype)

        def one(_: int) -> dict[str, Tensor]:
            head = drawn(config, "head", VOCABULARY, hidden, scale=hidden**-0.5)
            return {"norm": torch.ones(hidden, dtype=dtype), "head": head.data}

        super().__init__({"norm": (hidden,), "head": (VOCABULARY, hidden)}, dtype, held, one)


class Attention(nn.Module):
    """Pre-norm multi-head attention that never looks across documents; the heads that are here."""

    def __init__(
        self, config: TrainConfig, layer: int, num_shards: int, shards: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.config = config
        self.bank = AttentionShards(config, layer, num_shards, shards)

    def forward(
        self, x_SD: Tensor, norm_D: Tensor, places: Places, group: TensorGroup, work: WorkPass
    ) -> Tensor:
        """x plus attention over it, for this rank's slice of the tokens. Raises PeerLost."""
        hidden, num_tokens = self.config.hidden_size, len(places.real_T)
        num_shards, _, width = self.bank.out.shape
        head_size = hidden // self.config.num_heads
        heads = num_shards * width // head_size  # that are here
        normed_TD = group.gather(F.rms_norm(x_SD, (hidden,), norm_D), num_tokens, work)
        work.add(places.work.in_part(group.share))
        mixed_TW = product(normed_TD, self.bank.qkv.reshape(-1, hidden), work)
        rows, length = places.rows, places.length
        mixed_PW = mixed_TW.new_zeros(rows * length, mixed_TW.shape[1])
        mixed_PW = mixed_PW.index_copy(0, places.real_T, mixed_TW)
        q, k, v = (
            part.reshape(rows, length, heads, head_size).transpose(1, 2)
            for part in mixed_PW.view(rows, length, num_shards, 3, width).unbind(3)
        )
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=places.mask_B1LL)
        seen_PW = seen.transpose(1, 2).reshape(rows * length, num_shards * width)
        out = self.bank.out.transpose(0, 1).reshape(hidden, num_shards * width)
        partial_TD = product(seen_PW.index_select(0, places.real_T), out, work)
        return x_SD + group.sum_back(partial_TD, work)


class MoETransformer(nn.Module):
    """What one rank holds of the model, by the layout: some layers, heads and expert replicas."""

    def __init__(self, config: TrainConfig, layout: Layout, rank: int) -> None:
        super().__init__()
        self.config = config
        shards = layout.num_attention_shards
        if config.num_heads % shards:
            raise ValueError(f"{config.num_heads} heads do not make {shards} equal shards")

        def one_if_held(kind: BlockKind, layer: int = 0) -> tuple[int, ...]:
            return (0,) if rank in layout.holders(Block(kind, layer)) else ()

        self.embedding = Embedding(config, one_if_held(BlockKind.EMBEDDING))
        self.attention = nn.ModuleList(
            Attention(config, layer, shards, layout.shards_on(rank, layer, BlockKind.ATTENTION))
            for layer in range(config.num_layers)
        )
        self.moe = nn.ModuleList(
            MoELayer(
                config,
                layer,
                layout.experts_on(rank, layer),
                one_if_held(BlockKind.NORM_ROUTER, layer),
            )
            for layer in range(config.num_layers)
        )
        self.head = Head(config, one_if_held(BlockKind.HEAD))
        self.group: TensorGroup | None = None
        self.fabric: Collectives | None = None  # of this rank's stage

    @property
    def dtype(self) -> torch.dtype:
        """Of all parameters."""
        return self.embedding.embedding.dtype

    def layers(self) -> list[MoELayer]:
        """The MoE layers, in order."""
        return [layer for layer in self.moe if isinstance(layer, MoELayer)]

    def attentions(self) -> list[Attention]:
        """The attention layers, in order."""
        return [layer for layer in self.attention if isinstance(layer, Attention)]

    def set_layout(
        self, layout: Layout, fabric: Collectives, domain_of: DomainOf = NO_DOMAINS
    ) -> None:
        """Compute by this layout from now on: its stages, tensor groups, hosts and speeds.

        Moves no weights. All ranks call it alike; one that stands by computes nothing. Raises
        PeerLost.
        """
        for layer, module in enumerate(self.layers()):
            held, wanted = module.bank.held, layout.experts_on(fabric.rank, layer)
            assert held == wanted, f"layer {layer}: holds {held}, the layout wants {wanted}"
            module.routes = None
        self.own_layers, self.group, self.fabric = range(0), None, None
        if fabric.rank in layout.standing_by:
            return
        number, at = layout.place_of(fabric.rank)
        stages = layout.pipelines[at].stages
        stage = stages[number]
        self.is_first, self.is_last = number == 0, number == len(stages) - 1
        self.own_layers = range(stage.first_layer, stage.end_layer)
        self.fabric = fabric.group(layout.ranks_of_layer(stage.first_layer))
        self.group = TensorGroup.of(stage, self.fabric)
        for layer in self.own_layers:
            self.layers()[layer].routes = DispatchPlan.of(layout, layer, self.fabric, domain_of)

    def dense_parameters(self) -> list[nn.Parameter]:
        """All parameters but the experts', in a fixed order."""
        experts = {id(p) for layer in self.layers() for p in layer.bank.parameters()}
        return [p for p in self.parameters() if id(p) not in experts]

    def new_slice(self, num_tokens: int) -> Tensor:
        """Room for this rank's slice [S, D] of so many tokens."""
        assert self.group is not None, "set_layout() comes first"
        own = self.group.slice_of(num_tokens)
        return self.head.head.new_empty(own.stop - own.start, self.config.hidden_size)

    def forward(
        self, batch: Batch, work: WorkPass, entered_SD: Tensor | None = None
    ) -> ModelOutput:
        """Forward pass of one micro-batch (perhaps without rows) through this rank's stage.

        `entered_SD`: its slice of the tokens as the stage before left them. Raises PeerLost.
        """
        assert self.group is not None and self.fabric is not None, "set_layout() comes first"
        assert self.is_first == (entered_SD is None), "only a first stage begins with tokens"
        config, group = self.config, self.group
        places = Places.of(batch, config.hidden_size, self.dtype)
        # index_select is the cheap way to gather on CPU.
        own_S = places.real_T[group.slice_of(len(places.real_T))]
        x_SD = self._embedded(batch, own_S) if entered_SD is None else entered_SD
        row_S = own_S // config.row_tokens
        balance_sum = loss_sum = x_SD.new_zeros(())
        counts, expert_rows, num_active, head_tokens, over = [], 0, 0, 0, NO_ROWS_OVER
        for layer in self.own_layers:
            attention, moe = self.attentions()[layer], self.layers()[layer]
            x_SD = attention(x_SD, moe.norm_router.attention_norm[0], places, group, work)
            mixed = moe(x_SD, row_S, batch.num_rows, group, self.fabric, work)
            x_SD = mixed.tokens_TD
            balance_sum = balance_sum + mixed.balance_sum
            counts.append(mixed.routed_E)
            expert_rows += mixed.expert_rows
            num_active += mixed.num_active
            over = tuple(map(sum, zip(over, mixed.rows_over, strict=True)))
        if self.is_last:
            targets_S = batch.targets.reshape(-1).index_select(0, own_S)
            answered_A = (targets_S != NO_TARGET).nonzero()[:, 0]
            head_tokens = len(answered_A)
            loss_sum = self._loss(x_SD, targets_S, answered_A, work)
        return ModelOutput(
            tokens_SD=x_SD,
            head_tokens=head_tokens,
            loss_sum=loss_sum,
            balance_sum=balance_sum,
            expert_counts=torch.stack(counts),
            expert_rows=expert_rows,
            num_active_experts=num_active,
            rows_over=over,
        )

    def _embedded(self, batch: Batch, own_S: Tensor) -> Tensor:
        tokens_S = batch.tokens.reshape(-1).index_select(0, own_S)
        positions_S = batch.positions.reshape(-1).index_select(0, own_S)
        places_SD = F.embedding(positions_S, self.embedding.places[0])
        return F.embedding(tokens_S, self.embedding.embedding[0]) + places_SD

    def _loss(self, x_SD: Tensor, targets_S: Tensor, answered_A: Tensor, work: WorkPass) -> Tensor:
        """Cross-entropy summed over this rank's targets, those of the tokens `answered_A`."""
        hidden = self.config.hidden_size
        normed_AD = F.rms_norm(x_SD.index_select(0, answered_A), (hidden,), self.head.norm[0])
        logits = product(normed_AD, self.head.head[0], work)
        work.add(head_work(len(logits), hidden, VOCABULARY))
        return F.cross_entropy(logits, targets_S[answered_A], reduction="sum")


def document_mask(documents_BL: Tensor) -> Tensor:
    """[B, 1, L, L]: true where query and key lie in one document and the key is not later."""
    length = documents_BL.shape[1]
    same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    every_LL = torch.ones(length, length, dtype=torch.bool, device=documents_BL.device)
    earlier_LL = every_LL.tril()
    return (same_BLL & earlier_LL)[:, None]


def attention_mask(documents_BL: Tensor, dtype: torch.dtype) -> Tensor:
    """`document_mask` as what is added to the scores: 0 where a token may look, else -inf."""
    mask_B1LL = document_mask(documents_BL)
    scores_B1LL = torch.zeros(mask_B1LL.shape, dtype=dtype, device=mask_B1LL.device)
    return scores_B1LL.masked_fill_(~mask_B1LL, -torch.inf)
