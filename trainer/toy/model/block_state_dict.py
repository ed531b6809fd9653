"""A model and its optimizer as blocks: every tensor of a block by a name that no layout changes.

A parameter `w1` comes with its moments `w1.exp_avg` and `w1.exp_avg_sq`; before the first update
these are zero.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.block_states import BlockState, Part, StateSpec
from pacekeeper.trainer.toy.model.stacked_params import StackedParams
from pacekeeper.trainer.toy.model.transformer import MoETransformer

MOMENTS = ("exp_avg", "exp_avg_sq")
ENDINGS = ("", *(f".{moment}" for moment in MOMENTS))


@dataclass(frozen=True, slots=True, eq=False)
class ModelStates:
    """Model and optimizer of a rank, as checkpoints see them (trainer/checkpoint/block_states.py).

    Each kind of moments has pieces of its own.
    """

    model: MoETransformer
    optimizer: torch.optim.Optimizer
    kinds: ClassVar[tuple[str, ...]] = ("", *MOMENTS)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def num_experts(self) -> Sequence[int]:
        return (self.model.config.num_experts,) * self.model.config.num_layers

    @property
    def num_updates(self) -> int:
        return num_updates(self.optimizer)

    def specs(self, block: Block) -> Sequence[StateSpec]:
        shapes, dtype = shapes_of(self.model, block), self.model.dtype
        specs = (
            StateSpec(f"{name}{ending}", ending[1:], shape, dtype)
            for name, shape in shapes.items()
            for ending in ENDINGS
        )
        return sorted(specs, key=lambda spec: spec.name)

    def parts(self, block: Block, kind: str) -> Mapping[str, Part]:
        found = {}
        for name, part in sorted(parts_of(self.model, block).items()):
            whole = whole_of(self.optimizer, part.parameter, kind)
            found[f"{name}.{kind}" if kind else name] = Part(whole, part.slot)
        return found

    def load(
        self, held: Collection[Block], state: Mapping[Block, BlockState], num_updates: int
    ) -> None:
        load_blocks(self.model, self.optimizer, held, state, num_updates)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor of a block: a row of a bank's parameter."""

    parameter: nn.Parameter
    slot: int

    def of(self, whole: Tensor) -> Tensor:
        """This part of a tensor that is shaped as the parameter."""
        return whole[self.slot]


def parts_of(model: MoETransformer, block: Block) -> dict[str, TensorRef]:
    """The tensors of a block that the model holds, by name. Raises ValueError for another."""
    bank = bank_of(model, block)
    slot = bank.held.index(block.index)
    return {name: TensorRef(bank.get_parameter(name), slot) for name in bank.shapes}


def shapes_of(model: MoETransformer, block: Block) -> dict[str, tuple[int, ...]]:
    """Of the block's tensors, wherever they live; the moments' are the same."""
    return bank_of(model, block).shapes


def num_values(model: MoETransformer, block: Block) -> int:
    """Numbers in the state of a block: weights and both moments."""
    sizes = (torch.Size(shape).numel() for shape in shapes_of(model, block).values())
    return len(ENDINGS) * sum(sizes)


def num_dense_parameters(model: MoETransformer, layout: Layout) -> int:
    """Of the whole model, wherever they live: all but the experts'."""
    dense = (block for block in layout.blocks() if block.kind is not BlockKind.EXPERT)
    return sum(num_values(model, block) for block in dense) // len(ENDINGS)


def read_block(
    model: MoETransformer, optimizer: torch.optim.Optimizer, block: Block
) -> dict[str, Tensor]:
    """The state of a block that this rank holds, as it is: no copies; names ascend."""
    found: dict[str, Tensor] = {}
    for name, part in parts_of(model, block).items():
        for ending in ENDINGS:
            found[f"{name}{ending}"] = part.of(whole_of(optimizer, part.parameter, ending[1:]))
    return dict(sorted(found.items()))


def whole_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, moment: str) -> Tensor:
    """A parameter (no `moment`), or one of its moments: as it is, of all rows."""
    if not moment:
        return parameter.detach()
    found: Tensor | None = optimizer.state.get(parameter, {}).get(moment)
    return torch.zeros_like(parameter).detach() if found is None else found


def num_updates(optimizer: torch.optim.Optimizer) -> int:
    """How many the optimizer has made, the same of all parameters."""
    steps = [float(state.get("step", 0.0)) for state in optimizer.state.values()]
    return int(max(steps, default=0.0))


def load_blocks(
    model: MoETransformer,
    optimizer: torch.optim.Optimizer,
    wanted: Collection[Block],
    state: Mapping[Block, BlockState],
    updates: int,
) -> None:
    """Hold the blocks `wanted` from now on: those in `state` as it says, the others as they are.

    `updates`: how many the optimizer had made. Moments that `state` lacks are zero. What stays and
    where it stays changes no bit.
    """
    for bank, kind, layer in banks_of(model):
        blocks = [b for b in wanted if b.kind is kind and b.layer == layer]
        if tuple(b.index for b in blocks) != bank.held or any(b in state for b in blocks):
            _fill(model, optimizer, bank, blocks, state, updates)
    optimizer.param_groups[0]["params"] = ordered_parameters(model)


def ordered_parameters(model: MoETransformer) -> list[nn.Parameter]:
    """All parameters in the order the optimizer walks them: dense first, then experts by layer."""
    experts = [p for layer in model.layers() for p in layer.bank.parameters()]
    return model.dense_parameters() + experts


def banks_of(model: MoETransformer) -> Iterator[tuple[StackedParams, BlockKind, int]]:
    """Every bank with the kind and the layer of its blocks."""
    yield model.embedding, BlockKind.EMBEDDING, 0
    for layer, (attention, moe) in enumerate(zip(model.attentions(), model.layers(), strict=True)):
        yield moe.norm_router, BlockKind.NORM_ROUTER, layer
        yield attention.bank, BlockKind.ATTENTION, layer
        yield moe.bank, BlockKind.EXPERT, layer
    yield model.head, BlockKind.HEAD, 0


def bank_of(model: MoETransformer, block: Block) -> StackedParams:
    """The bank that a block is a row of where it is held. Raises ValueError for another model's."""
    match block.kind:
        case BlockKind.EMBEDDING:
            return model.embedding
        case BlockKind.HEAD:
            return model.head
        case BlockKind.NORM_ROUTER:
            return model.layers()[block.layer].norm_router
        case BlockKind.ATTENTION:
            return model.attentions()[block.layer].bank
        case BlockKind.EXPERT:
            return model.layers()[block.layer].bank
        case BlockKind.DENSE_MLP:
            raise ValueError(f"{block}: every layer of this model has experts")


def _fill(
    model: MoETransformer,
    optimizer: torch.optim.Optimizer,
    bank: StackedParams,
    blocks: Sequence[Block],
    state: Mapping[Block, BlockState],
    updates: int,
) -> None:
    held = [state[b] if b in state else read_block(model, optimizer, b) for b in blocks]
    fresh: dict[str, Tensor] = {}
    for name, shape in bank.shapes.items():
        old = bank.get_parameter(name)
        for ending in ENDINGS:
            rows = old.detach().new_zeros((len(held), *shape))
            for slot, one in enumerate(held):
                if not ending or f"{name}{ending}" in one:
                    rows[slot] = one[f"{name}{ending}"]
            fresh[f"{name}{ending}"] = rows
        optimizer.state.pop(old, None)
    bank.replace(tuple(block.index for block in blocks), fresh)
    for name in bank.shapes:
        moments = {moment: fresh[f"{name}.{moment}"] for moment in MOMENTS}
        _remember(optimizer, bank.get_parameter(name), moments, updates)


def _remember(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    moments: Mapping[str, Tensor],
    updates: int,
) -> None:
    optimizer.state.pop(parameter, None)
    if updates:
        optimizer.state[parameter] = {"step": torch.tensor(float(updates)), **moments}
