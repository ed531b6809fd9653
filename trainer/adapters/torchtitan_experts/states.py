"""Weights and optimizer state of the experts on this rank, as blocks that move between ranks."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.adapters.torchtitan_experts.slots import ExpertSlots, local_of
from pacekeeper.trainer.checkpoint.block_states import WEIGHTS, BlockState, Part, StateSpec
from pacekeeper.trainer.parallel.moves import assign_slots
from pacekeeper.trainer.parallel.optimizers import states_of


def stacks_of(
    experts: ExpertSlots, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Return what a layer's slots hold, [slots, ...] each: weights, and optimizer state by
    `NAME.KEY`; views.
    """
    found = experts.stacks()
    for name, parameter in experts.named_parameters(recurse=False):
        for key, state in states_of(parameter, optimizers).items():
            found[f"{name}.{key}"] = local_of(state)
    return found


class Stacks:
    """Experts in slots of named tensors; implements `BlockStates` for them alone.

    Args:
        slots: By layer, the slot of each expert held here.
        stacks: By layer, tensors [slots, ...] by name.
        num_slots: Slots of a layer.
        num_experts: Experts of each layer; 0: a dense layer.
    """

    kinds = (WEIGHTS,)  # optimizer state is not told apart
    num_updates = 0  # it is there on all ranks or on none

    def __init__(
        self,
        slots: Mapping[int, Mapping[int, int]],
        stacks: Mapping[int, Mapping[str, Tensor]],
        *,
        num_slots: int,
        num_experts: Sequence[int] = (),
    ) -> None:
        self.slots, self._stacks = dict(slots), stacks
        self._num_slots, self.num_experts = num_slots, num_experts
        self.device = next(t.device for named in stacks.values() for t in named.values())

    def specs(self, block: Block) -> Sequence[StateSpec]:
        if block.kind is not BlockKind.EXPERT:
            return ()
        named = sorted(self._stacks[block.layer].items())
        return [StateSpec(name, WEIGHTS, tuple(t.shape[1:]), t.dtype) for name, t in named]

    def parts(self, block: Block, kind: str) -> Mapping[str, Part]:
        slot = self.slots[block.layer][block.index]
        named = sorted(self._stacks[block.layer].items())
        return {name: Part(tensor, slot) for name, tensor in named}

    def load(
        self, held: Collection[Block], state: Mapping[Block, BlockState], num_updates: int
    ) -> None:
        for layer, stacks in self._stacks.items():
            experts = [b.index for b in held if b.kind is BlockKind.EXPERT and b.layer == layer]
            new = assign_slots(self.slots[layer], experts, self._num_slots)
            left = set(range(self._num_slots)) - set(new.values())
            for tensor in stacks.values():
                tensor[sorted(left)] = 0.0
            self.slots[layer] = new
        for block, named in state.items():
            slot = self.slots[block.layer][block.index]
            for name, value in named.items():
                self._stacks[block.layer][name][slot] = value
