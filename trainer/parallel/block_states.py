"""The blocks of a store with the state that optimizers keep of them, for checkpoints.

Implements `BlockStates` (trainer/checkpoint/block_states.py) for every model and optimizer that the
engine trains. It decides nothing and communicates with nobody.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint.block_states import WEIGHTS, BlockState, Part, StateSpec
from pacekeeper.trainer.model.blocks import BlockStore, Holding
from pacekeeper.trainer.model.blocks import Part as HeldPart
from pacekeeper.trainer.model.cuts import Cut
from pacekeeper.trainer.parallel.moves import assign_slots, change_slots
from pacekeeper.trainer.parallel.optimizers import NewState, new_state

OPTIMIZER = "optimizer"
"""The kind of pieces of optimizer state: of all that any optimizer keeps of a block."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Updated:
    """What an optimizer has of a tensor: the parameter, or a copy of some of its shards.

    `shards`: those with optimizer state here, ascending; (0,) of a tensor that is not divided.
    """

    tensor: nn.Parameter
    shards: tuple[int, ...]


class TrainedBlocks:
    """Blocks held here, with their optimizer state, or without it where other ranks own it.

    Of a parameter without optimizer state here, optimizers keep nothing, as it gets no gradient. In
    place of one of which some shards have state they get a tensor of these shards alone:
    `store_updates` copies them back after each update.

    What an optimizer keeps per element of a stacked parameter belongs to the experts in its slots;
    what it keeps per parameter (the number of steps, say) is the same for all experts of a layer.
    It is saved with each of them and with the layer's routers, so that it can be loaded with the
    first of them; that of the routers counts where experts are of several steps. Likewise, what an
    optimizer keeps per parameter that is divided is saved with each shard.

    Args:
        store: Weights and buffers.
        optimizers: Of its parameters; the list may grow.

    Attributes:
        store: Weights and buffers.
        num_updates: Updates that the optimizers have made; their owner counts.
    """

    kinds = (WEIGHTS, OPTIMIZER)

    def __init__(self, store: BlockStore, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.store = store
        self._optimizers = optimizers
        self.num_updates = 0
        self._owners: dict[str, _Owner] = {}
        self._num_known = 0  # of the optimizers
        self._held: Mapping[Block, bool] = {}
        self._updated: dict[str, _Updated] = {}

    @property
    def device(self) -> torch.device:
        return self.store.device

    @property
    def num_experts(self) -> Sequence[int]:
        return [one.num_experts if one else 0 for one in self.store.skeleton.experts]

    def specs(self, block: Block) -> Sequence[StateSpec]:
        found = []
        for name, spec in self.store.skeleton.blocks[block].items():
            found.append(StateSpec(name, WEIGHTS, spec.shape, spec.dtype))
            tensor = self.store.tensor(name)
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
        parts = self.store.parts(block)
        if kind == WEIGHTS:
            return {n: _part(parts[n], parts[n].tensor.detach()) for n in sorted(parts)}
        found: dict[str, Part] = {}
        for name, held in parts.items():
            part = self.updated_part(name, held)
            for key, value in self._state(name).items() if part else ():
                assert part is not None
                is_whole = value.shape != part.tensor.shape
                found[f"{name}.{key}"] = Part(value) if is_whole else _part(part, value)
        for name, stack in self._stacks(block).items():
            for key, value in self._state(name).items():
                if value.shape != stack.shape:
                    found[f"{name}.{key}"] = Part(value)
        return dict(sorted(found.items()))

    def updated_part(self, name: str, part: HeldPart) -> HeldPart | None:
        """Return where optimizers update a part; None where other ranks do.

        Args:
            name: Of the tensor.
            part: The part in the store.
        """
        one = self._updated.get(name)
        if one is None:
            return part
        if part.cut is None:
            return part if one.shards else None
        if part.shard not in one.shards:
            return None
        if one.tensor is part.tensor:
            return part
        # Shards that do not follow each other: the part counts by its place among them.
        place = one.shards.index(part.shard)
        return HeldPart(one.tensor, None, part.cut, range(len(one.shards)), place)

    def is_trained(self, name: str) -> bool:
        """Whether an optimizer has the parameter of this name, or will have its shards."""
        return name in self._owners_by_name()

    def store_updates(self) -> None:
        """Copy shards that optimizers updated apart into the parameters."""
        for own, held in self._copied_shards():
            held.copy_(own)

    def load(
        self, held: Mapping[Block, bool], state: Mapping[Block, BlockState], num_updates: int
    ) -> None:
        self._rehold(held)
        wanted: list[list[int]] = [[] for _ in self.store.slots]
        for block in held:
            if block.kind is BlockKind.EXPERT:
                wanted[block.layer].append(block.index)
        slots = [
            assign_slots(old, new, self.store.num_slots)
            for old, new in zip(self.store.slots, wanted, strict=True)
        ]
        change_slots(self.store, self._optimizers, slots)
        self.num_updates = num_updates
        with_state = {
            block
            for block, tensors in state.items()
            if held[block] and tensors.keys() - self.store.skeleton.blocks[block].keys()
        }
        self._forget(with_state)
        # What a router's block says of the stacks of its layer counts more than the experts.
        for block in sorted(state, key=lambda one: one.kind is BlockKind.NORM_ROUTER):
            names = self.store.skeleton.blocks[block]
            if weights := {name: state[block][name] for name in names if name in state[block]}:
                self.store.write(block, weights)
            if block in with_state:
                is_alone = Block(BlockKind.NORM_ROUTER, block.layer) not in state
                self._load_state(block, state[block], is_alone=is_alone)
        for own, weight in self._copied_shards():
            own.copy_(weight)

    def _copied_shards(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(shard in a tensor of its own, the same in the parameter), without gradient."""
        for name, one in self._updated.items():
            if one.tensor is not self.store.tensor(name):
                for block in self.store.blocks_of(name):
                    part = self.store.parts(block)[name]
                    own = self.updated_part(name, part)
                    if own is not None:
                        yield own.of(own.tensor.detach()), part.of(part.tensor.detach())

    def _rehold(self, held: Mapping[Block, bool]) -> None:
        """Change what is held, and let the optimizers have what they are to update."""
        before = {name: self._updated_of(name) for name in self._owners_by_name()}
        self.store.rehold(Holding.of_blocks(held))
        self._held = held
        new_of: dict[int, nn.Parameter] = {}
        for name, owner in self._owners.items():
            old, new = before[name], self._next_updated(name, before[name])
            self._updated[name] = new
            if old.tensor is new.tensor and old.shards == new.shards:
                continue
            new_of[id(old.tensor)] = new.tensor
            owner.hand_over(old, new, self.store.skeleton.cuts.get(name))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [new_of.get(id(p), p) for p in group["params"]]

    def _updated_of(self, name: str) -> _Updated:
        """What an optimizer has of a tensor, at first the parameter."""
        if name in self._updated:
            return self._updated[name]
        parameter, cut = self.store.tensor(name), self.store.skeleton.cuts.get(name)
        assert isinstance(parameter, nn.Parameter), "buffers have no optimizer"
        shards = [block.index for block in self.store.blocks_of(name)] if cut else [0]
        return _Updated(tensor=parameter, shards=tuple(shards))

    def _next_updated(self, name: str, old: _Updated) -> _Updated:
        """What an optimizer is to have of a tensor from now on."""
        parameter, cut = self.store.tensor(name), self.store.skeleton.cuts.get(name)
        assert isinstance(parameter, nn.Parameter), "buffers have no optimizer"
        blocks = self.store.blocks_of(name)
        if cut is None:
            is_here = not blocks or self._held[blocks[0]]
            return _Updated(tensor=parameter, shards=(0,) if is_here else ())
        shards = tuple(block.index for block in blocks if self._held[block])
        if len(shards) in (0, len(blocks)):
            return _Updated(tensor=parameter, shards=shards)
        if old.shards == shards:
            return old
        shape = cut.run_shape(self.store.skeleton.specs[name].shape, len(shards))
        return _Updated(tensor=nn.Parameter(parameter.new_empty(shape)), shards=shards)

    def _forget(self, with_state: Collection[Block]) -> None:
        """Drop optimizer state that nothing of is left: of no update, or of all that is loaded."""
        for name, owner in self._owners_by_name().items():
            own = [block for block in self.store.blocks_of(name) if self._held[block]]
            if not self.num_updates or (own and all(block in with_state for block in own)):
                owner.forget(self._updated[name].tensor)

    def _load_state(self, block: Block, tensors: BlockState, *, is_alone: bool) -> None:
        """Load optimizer state; `is_alone`: of experts, while their routers stay as they are."""
        for name, held in self.store.parts(block).items():
            owner, part = self._owners_by_name().get(name), self.updated_part(name, held)
            if owner is None or part is None:
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
        return self.store.stacked(block.layer) if is_router else {}

    def _zeros(self, name: str) -> Mapping[str, Tensor]:
        owner = self._owners_by_name().get(name)
        return {} if owner is None else owner.zeros(self.store.tensor(name))

    def _state(self, name: str) -> Mapping[str, Tensor]:
        owner = self._owners_by_name().get(name)
        return {} if owner is None else owner.state(self._updated_of(name).tensor)

    def _owners_by_name(self) -> "Mapping[str, _Owner]":
        if len(self._optimizers) != self._num_known:
            self._num_known = len(self._optimizers)
            names = {id(self.store.tensor(name)): name for name in self.store.skeleton.specs}
            names |= {id(one.tensor): name for name, one in self._updated.items()}
            self._owners = {
                names[id(parameter)]: owner
                for optimizer in self._optimizers
                for group in optimizer.param_groups
                for owner in [_Owner(optimizer, group, self.store.device)]
                for parameter in group["params"]
                if id(parameter) in names
            }
        return self._owners


def _part(part: HeldPart, tensor: Tensor) -> Part:
    """A block's part of a tensor in the parameter's shape, for a checkpoint."""
    return Part(part.of(tensor)) if part.cut is not None else Part(tensor, part.slot)


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

    def hand_over(self, old: _Updated, new: _Updated, cut: Cut | None) -> None:
        """Keep for another tensor what is kept of the shards that both have; else nothing."""
        kept = self._optimizer.state.pop(old.tensor, None)
        both = [shard for shard in old.shards if shard in new.shards] if cut else []
        if kept is None or cut is None or not both:
            return
        self._optimizer.state[new.tensor] = found = {}
        for key, value in kept.items():
            found[key] = value
            if isinstance(value, Tensor) and value.shape == old.tensor.shape:
                found[key] = target = value.new_zeros(new.tensor.shape)
                for shard in both:
                    part = cut.piece(value, old.shards.index(shard), len(old.shards))
                    cut.piece(target, new.shards.index(shard), len(new.shards)).copy_(part)

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
