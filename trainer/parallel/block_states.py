"""The blocks of a store with the state that optimizers keep of them, for checkpoints.

Implements `BlockStates` (trainer/checkpoint/block_states.py) for every model and optimizer that the
engine trains. It decides nothing and communicates with nobody.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint.block_states import WEIGHTS, BlockState, Part, StateSpec
from pacekeeper.trainer.model.blocks import BlockStore, Holding, Replaced
from pacekeeper.trainer.model.blocks import Part as HeldPart
from pacekeeper.trainer.parallel.moves import assign_slots, change_slots
from pacekeeper.trainer.parallel.optimizers import NewState, new_state

OPTIMIZER = "optimizer"
"""The kind of pieces of optimizer state: of all that any optimizer keeps of a block."""


class TrainedBlocks:
    """Blocks held here, with their optimizer state.

    What an optimizer keeps per element of a stacked parameter belongs to the experts in its slots;
    what it keeps per parameter (the number of steps, say) is the same for all experts of a layer.
    It is saved with each of them and with the layer's routers, so that it can be loaded with the
    first of them; that of the routers counts where experts are of several steps. Likewise, what an
    optimizer keeps per parameter that is divided is saved with each shard.

    Args:
        store: Weights and buffers.
        optimizers: Of its parameters; the list may grow.

    Attributes:
        num_updates: Updates that the optimizers have made; their owner counts.
    """

    kinds = (WEIGHTS, OPTIMIZER)

    def __init__(self, store: BlockStore, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._store = store
        self._optimizers = optimizers
        self.num_updates = 0
        self._owners: dict[str, _Owner] = {}
        self._num_known = 0  # of the optimizers

    @property
    def device(self) -> torch.device:
        return self._store.device

    @property
    def num_experts(self) -> Sequence[int]:
        return [one.num_experts if one else 0 for one in self._store.skeleton.experts]

    def specs(self, block: Block) -> Sequence[StateSpec]:
        found = []
        for name, spec in self._store.skeleton.blocks[block].items():
            found.append(StateSpec(name, WEIGHTS, spec.shape, spec.dtype))
            tensor = self._store.tensor(name)
            for key, zero in self._zeros(name).items():
                shape = spec.shape if zero.shape == tensor.shape else tuple(zero.shape)
                found.append(StateSpec(f"{name}.{key}", OPTIMIZER, shape, zero.dtype))
        for name, stack in self._stacks(block).items():
            for key, zero in self._zeros(name).items():
                if zero.shape != stack.shape:
                    found.append(
                        StateSpec(f"{name}.{key}", OPTIMIZER, tuple(zero.shape), zero.dtype)
                    )
        return sorted(found, key=lambda spec: spec.name)

    def parts(self, block: Block, kind: str) -> Mapping[str, Part]:
        parts = self._store.parts(block)
        if kind == WEIGHTS:
            return {n: _part(parts[n], parts[n].tensor.detach()) for n in sorted(parts)}
        found: dict[str, Part] = {}
        for name, part in parts.items():
            for key, value in self._state(name).items():
                is_whole = value.shape != part.tensor.shape
                found[f"{name}.{key}"] = Part(value) if is_whole else _part(part, value)
        for name, stack in self._stacks(block).items():
            for key, value in self._state(name).items():
                if value.shape != stack.shape:
                    found[f"{name}.{key}"] = Part(value)
        return dict(sorted(found.items()))

    def load(
        self, held: Collection[Block], state: Mapping[Block, BlockState], num_updates: int
    ) -> None:
        self._rehold(Holding.of_blocks(held))
        wanted: list[list[int]] = [[] for _ in self._store.slots]
        for block in held:
            if block.kind is BlockKind.EXPERT:
                wanted[block.layer].append(block.index)
        slots = [
            assign_slots(old, new, self._store.num_slots)
            for old, new in zip(self._store.slots, wanted, strict=True)
        ]
        change_slots(self._store, self._optimizers, slots)
        self.num_updates = num_updates
        self._forget(state)
        # What a router's block says of the stacks of its layer counts more than the experts.
        for block in sorted(state, key=lambda one: one.kind is BlockKind.NORM_ROUTER):
            names = self._store.skeleton.blocks[block]
            self._store.write(block, {name: state[block][name] for name in names})
            if len(state[block]) > len(names):
                is_alone = Block(BlockKind.NORM_ROUTER, block.layer) not in state
                self._load_state(block, state[block], is_alone=is_alone)

    def _rehold(self, holding: Holding) -> None:
        """Change what is held beside experts, and let the optimizers have the new parameters."""
        self._owners_by_name()  # while they have the old ones
        replaced = self._store.rehold(holding)
        by_old = {id(one.old): one for one in replaced.values()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [
                    by_old[id(p)].new if id(p) in by_old else p for p in group["params"]
                ]
            for one in replaced.values():
                kept = optimizer.state.pop(one.old, None)
                if kept is not None and one.keeps_some:
                    optimizer.state[one.new] = {key: _cut(one, v) for key, v in kept.items()}

    def _forget(self, state: Mapping[Block, BlockState]) -> None:
        """Drop optimizer state that nothing of is left: of no update, or of all that is loaded."""
        for name, owner in self._owners_by_name().items():
            parameter = self._store.tensor(name)
            shards = self._store.shard_blocks(name)
            if not self.num_updates or (
                shards is not None
                and all(len(state.get(one, ())) > len(self._store.shapes(one)) for one in shards)
            ):
                owner.forget(parameter)

    def _load_state(self, block: Block, tensors: BlockState, *, is_alone: bool) -> None:
        """Load optimizer state; `is_alone`: of experts, while their routers stay as they are."""
        for name, part in self._store.parts(block).items():
            owner = self._owners_by_name().get(name)
            if owner is None:
                continue
            is_whole = part.slot is None and part.cut is None
            saved = {key: tensors[f"{name}.{key}"] for key in owner.zeros(part.tensor)}
            if owner.is_new(part.tensor, saved):  # unless others of the parameter are not
                if is_whole:
                    owner.forget(part.tensor)
                if not owner.has(part.tensor):
                    continue
            is_stack_there = part.slot is not None and is_alone and owner.has(part.tensor)
            for key, value in owner.keep(part.tensor).items():
                if value.shape == part.tensor.shape:
                    part.of(value).copy_(saved[key])
                elif not is_stack_there:
                    value.copy_(saved[key])
        for name, stack in self._stacks(block).items():
            owner = self._owners_by_name().get(name) if self.num_updates else None
            if owner:  # also where no expert of the layer is held
                for key, value in owner.keep(stack).items():
                    if value.shape != stack.shape:
                        value.copy_(tensors[f"{name}.{key}"])

    def _stacks(self, block: Block) -> Mapping[str, nn.Parameter]:
        """The stacks of experts whose shared state a block has: those of its layer's routers."""
        is_router = block.kind is BlockKind.NORM_ROUTER
        return self._store.stacked(block.layer) if is_router else {}

    def _zeros(self, name: str) -> Mapping[str, Tensor]:
        owner = self._owners_by_name().get(name)
        return {} if owner is None else owner.zeros(self._store.tensor(name))

    def _state(self, name: str) -> Mapping[str, Tensor]:
        owner = self._owners_by_name().get(name)
        return {} if owner is None else owner.state(self._store.tensor(name))

    def _owners_by_name(self) -> "Mapping[str, _Owner]":
        if len(self._optimizers) != self._num_known:
            self._num_known = len(self._optimizers)
            names = {id(self._store.tensor(name)): name for name in self._store.skeleton.specs}
            self._owners = {
                names[id(parameter)]: owner
                for optimizer in self._optimizers
                for group in optimizer.param_groups
                for owner in [_Owner(optimizer, group, self._store.device)]
                for parameter in group["params"]
                if id(parameter) in names
            }
        return self._owners


def _part(part: HeldPart, tensor: Tensor) -> Part:
    """A block's part of a tensor in the parameter's shape, for a checkpoint."""
    return Part(part.of(tensor)) if part.cut is not None else Part(tensor, part.slot)


def _cut(replaced: Replaced, value: object) -> object:
    """What an optimizer keeps of a parameter, for the one in its place."""
    if not isinstance(value, Tensor) or value.shape != replaced.old.shape:
        return value
    target = value.new_zeros(replaced.new.shape)
    replaced.copy_kept(value, target)
    return target


class _Owner:
    """A group of an optimizer, and what it keeps of each parameter."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, object],
        device: torch.device,
    ) -> None:
        self._optimizer = optimizer
        self._group = group
        self._device = device
        self._new: dict[tuple[torch.Size, torch.dtype], NewState] = {}

    def zeros(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """What it will keep, by key: zeros."""
        return self._new_state(parameter).zeros

    def state(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """What it keeps, by key; zeros of what it does not keep yet."""
        kept = self._optimizer.state.get(parameter, {})
        return {key: kept.get(key, zero) for key, zero in self.zeros(parameter).items()}

    def has(self, parameter: Tensor) -> bool:
        """Whether it keeps anything."""
        return parameter in self._optimizer.state

    def is_new(self, parameter: Tensor, saved: Mapping[str, Tensor]) -> bool:
        """Whether this was saved of a parameter that it had not updated."""
        is_there = self._new_state(parameter).is_made_at_once
        return not is_there and not any(bool(value.any()) for value in saved.values())

    def forget(self, parameter: Tensor) -> None:
        """Keep what it keeps of a parameter that it has not updated."""
        if not self._new_state(parameter).is_made_at_once:
            self._optimizer.state.pop(parameter, None)

    def keep(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """Keep zeros of what it does not keep yet; what it keeps."""
        kept = self._optimizer.state[parameter]
        for key, zero in self.zeros(parameter).items():
            if key not in kept:
                kept[key] = zero.clone(memory_format=torch.contiguous_format)
        return {key: kept[key] for key in self.zeros(parameter)}

    def _new_state(self, parameter: Tensor) -> NewState:
        assert isinstance(parameter, nn.Parameter), "buffers have no optimizer"
        form = parameter.shape, parameter.dtype
        if form not in self._new:
            self._new[form] = new_state(self._optimizer, self._group, parameter, self._device)
        return self._new[form]
