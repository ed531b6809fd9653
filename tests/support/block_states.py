"""The state of a rank without any model: tensors of several types, stacks, values, empty pieces."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.block_states import BlockState, Part, StateSpec

NUM_EXPERTS = 3
_DENSE: Mapping[str, tuple[str, tuple[int, ...], torch.dtype]] = {
    "in.weight": ("", (5, 3), torch.bfloat16),
    "in.weight.mean": ("moments", (5, 3), torch.float32),
    "in.weight.step": ("moments", (), torch.float32),
    "count": ("", (), torch.int64),
    "mask": ("", (7,), torch.bool),
}
_EXPERT: Mapping[str, tuple[str, tuple[int, ...], torch.dtype]] = {
    "up.weight": ("", (4, 2), torch.float64),
    "up.weight.mean": ("moments", (4, 2), torch.float32),
}


def layout_of(ranks: Sequence[int], replicas: int = 1) -> Layout:
    """One layer of three experts."""
    return even_layout(ranks=ranks, num_layers=1, num_experts=NUM_EXPERTS, replicas=replicas)


class MixedStates:
    """Holds all dense blocks, and the experts `held` in a stack; the head has nothing at all."""

    device = torch.device("cpu")
    num_experts = (NUM_EXPERTS,)
    kinds = ("", "moments", "other")

    def __init__(self, held: Sequence[int] = range(NUM_EXPERTS), seed: int = 0) -> None:
        self.num_updates = 1
        self.held = list(held)
        self._generator = torch.Generator().manual_seed(seed)
        self._dense: dict[Block, dict[str, Tensor]] = {}
        self._stacks = {
            name: self._drawn((len(held), *shape), dtype)
            for name, (_, shape, dtype) in _EXPERT.items()
        }

    def specs(self, block: Block) -> Sequence[StateSpec]:
        named = self._named(block)
        return [StateSpec(name, *named[name]) for name in sorted(named)]

    def parts(self, block: Block, kind: str) -> Mapping[str, Part]:
        own = {spec.name: spec for spec in self.specs(block) if spec.kind == kind}
        if block.kind is BlockKind.EXPERT:
            row = self.held.index(block.index)
            return {name: Part(self._stacks[name], row) for name in own}
        dense = self._dense.setdefault(block, {})
        for name, spec in own.items():
            if name not in dense:
                dense[name] = self._drawn(spec.shape, spec.dtype)
        return {name: Part(dense[name]) for name in own}

    def load(
        self, held: Collection[Block], state: Mapping[Block, BlockState], num_updates: int
    ) -> None:
        self.num_updates = num_updates
        self.held = [block.index for block in held if block.kind is BlockKind.EXPERT]
        self._stacks = {
            name: torch.zeros(len(self.held), *shape, dtype=dtype)
            for name, (_, shape, dtype) in _EXPERT.items()
        }
        for block, tensors in state.items():
            for kind in self.kinds:
                for name, part in self.parts(block, kind).items():
                    if name in tensors:
                        part.view.copy_(tensors[name])

    def _named(self, block: Block) -> Mapping[str, tuple[str, tuple[int, ...], torch.dtype]]:
        match block.kind:
            case BlockKind.EXPERT:
                return _EXPERT
            case BlockKind.HEAD:
                return {}
        return _DENSE

    def _drawn(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randint(0, 2, shape, generator=self._generator).to(dtype)
