"""The state of one rank's model as typed blocks: the layers, shards and experts that it holds.

The names of a block's tensors are those of the library's modules, without the expert or the shard:
they never depend on the layout. Only what the rank holds is ever allocated.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.cuts import Cut
from pacekeeper.trainer.model.skeleton import Skeleton


class BlockSource(Protocol):
    """Where the tensors of blocks come from: an initialization or a checkpoint."""

    @property
    def fingerprint(self) -> str:
        """What tells this source from another; equal on all ranks of a job."""

    def tensors(self, block: Block) -> Mapping[str, torch.Tensor]:
        """The tensors of `block` by name, in the shapes of `Skeleton.blocks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a rank holds of a model, beside experts; ranges are empty where it holds nothing.

    Attributes:
        layers: the decoder layers.
        attention: the virtual shards of attention, the same in all its layers.
        mlp: the virtual shards of dense MLPs and shared experts.
        has_embedding: whether it holds what works before the layers.
        has_head: whether it holds what works after them.
    """

    layers: range = range(0)
    attention: range = range(0)
    mlp: range = range(0)
    has_embedding: bool = False
    has_head: bool = False

    @classmethod
    def everything(cls, skeleton: Skeleton) -> "Holding":
        """All dense blocks of a model."""
        return cls(
            layers=range(skeleton.num_layers),
            attention=range(skeleton.num_attention_shards),
            mlp=range(skeleton.num_mlp_shards),
            has_embedding=True,
            has_head=True,
        )

    @classmethod
    def of(cls, layout: Layout, rank: int) -> "Holding":
        """What `layout` gives to a rank; nothing to one that stands by."""
        if rank not in layout.places:
            return cls()
        number, at = layout.places[rank]
        stages = layout.pipelines[at].stages
        stage = stages[number]
        place = stage.group.index(rank)
        attention, mlp = stage.attention[place], stage.mlp[place]
        return cls(
            layers=range(stage.first_layer, stage.end_layer),
            attention=range(attention.first, attention.end),
            mlp=range(mlp.first, mlp.end),
            has_embedding=number == 0,
            has_head=number == len(stages) - 1,
        )

    @classmethod
    def of_blocks(cls, blocks: Collection[Block]) -> "Holding":
        """What a rank holds that holds these blocks, as a layout gives them to one rank."""
        indices: dict[BlockKind, set[int]] = defaultdict(set)
        for block in blocks:
            is_layer = block.kind is BlockKind.NORM_ROUTER
            indices[block.kind].add(block.layer if is_layer else block.index)

        def run(kind: BlockKind) -> range:
            return range(min(indices[kind], default=0), max(indices[kind], default=-1) + 1)

        return cls(
            layers=run(BlockKind.NORM_ROUTER),
            attention=run(BlockKind.ATTENTION),
            mlp=run(BlockKind.DENSE_MLP),
            has_embedding=BlockKind.EMBEDDING in indices,
            has_head=BlockKind.HEAD in indices,
        )

    def run(self, kind: BlockKind) -> range:
        """The virtual shards of a kind: ATTENTION or DENSE_MLP."""
        return self.attention if kind is BlockKind.ATTENTION else self.mlp

    def has(self, block: Block) -> bool:
        """Whether it holds a block; of experts, whether it holds their layer."""
        match block.kind:
            case BlockKind.EMBEDDING:
                return self.has_embedding
            case BlockKind.HEAD:
                return self.has_head
            case BlockKind.ATTENTION | BlockKind.DENSE_MLP:
                return block.layer in self.layers and block.index in self.run(block.kind)
        return block.layer in self.layers


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """A block's part of a parameter or buffer: all of it, a slot of a stack, or a shard.

    Attributes:
        tensor: the parameter or buffer.
        slot: the slot, of a stacked parameter.
        cut: how the tensor is divided, of a shard.
        run: the shards that the tensor has.
        shard: the shard's number in the model.
    """

    tensor: torch.Tensor
    slot: int | None = None
    cut: Cut | None = None
    run: range = range(0)
    shard: int = 0

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The block's part of any tensor in the parameter's shape, as a view."""
        if self.cut is not None:
            return self.cut.piece(whole, self.shard - self.run.start, len(self.run))
        return whole if self.slot is None else whole[self.slot]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Replaced:
    """A parameter or buffer that another took the place of, as its rank holds something else.

    Attributes:
        old: the tensor before; on meta if it was not held.
        new: the tensor in its place; on meta if it is not held any more.
        cut: how it is divided, if it is.
        old_run: the shards that `old` has.
        new_run: the shards that `new` has.
    """

    old: torch.Tensor
    new: torch.Tensor
    cut: Cut | None
    old_run: range
    new_run: range

    def copy_kept(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what stays.

        Args:
            source: a tensor in the shape of `old`.
            target: a tensor in the shape of `new`.
        """
        first = max(self.old_run.start, self.new_run.start)
        count = min(self.old_run.stop, self.new_run.stop) - first
        if self.cut is not None and count > 0:
            old, new = self.old_run, self.new_run
            kept = self.cut.run(source, first - old.start, count, len(old))
            self.cut.run(target, first - new.start, count, len(new)).copy_(kept)


class BlockStore:
    """The blocks that one rank holds, in the parameters of the skeleton's modules.

    Tensors have the size of the rank's runs of shards. Each layer with experts has `num_slots`
    slots: its stacked parameters are [num_slots, ...], and free slots are zero. What is not held
    is on the meta device, under its name and in the model's shape; decoder layers and the head
    then return their input.

    Attributes:
        skeleton: the model; its modules get the parameters.
        num_slots: slots of each layer with experts.
        device: where the tensors are.
        holding: what is held beside experts.
    """

    def __init__(
        self, skeleton: Skeleton, *, num_slots: int, device: torch.device | str = "cpu"
    ) -> None:
        self.skeleton = skeleton
        self.num_slots = num_slots
        self.device = torch.device(device)
        self.holding = Holding()
        self._slots: list[dict[int, int]] = [{} for _ in skeleton.experts]
        self._places = _places(skeleton.module)
        self._tensors = {
            name: places[0][0].get_parameter(places[0][1])
            if places[0][1] in places[0][0]._parameters
            else places[0][0].get_buffer(places[0][1])
            for name, places in self._places.items()
            if name in skeleton.specs
        }
        self._stacks = {name for one in skeleton.experts if one for name in one.tensors}
        self._homes: dict[str, Block] = {}
        for block, specs in skeleton.blocks.items():
            for name in specs:
                self._homes.setdefault(name, block)
        self._bypassed: dict[torch.nn.Module, object] = {}

    @property
    def slots(self) -> Sequence[Mapping[int, int]]:
        """By layer, the slot of each expert that the rank holds."""
        return self._slots

    def stacked(self, layer: int) -> dict[str, torch.nn.Parameter]:
        """The stacked parameters of a layer's experts, by their names; {} for a dense layer.

        On the meta device where the layer is not held.
        """
        experts = self.skeleton.experts[layer]
        names = experts.tensors if experts else ()
        return {name: self._tensors[name] for name in names}  # type: ignore[misc]

    def tensor(self, name: str) -> torch.Tensor:
        """The parameter or buffer of this name; on the meta device where it is not held."""
        return self._tensors[name]

    def blocks_of(self, name: str) -> list[Block]:
        """The blocks that have this tensor, or its shards here; [] where it is a stack or away."""
        home, cut = self._homes[name], self.skeleton.cuts.get(name)
        if name in self._stacks or (home.layer not in self.holding.layers and cut is not None):
            return []
        if cut is None:
            return [home] if self.holding.has(home) else []
        return [Block(cut.kind, home.layer, n) for n in self.holding.run(cut.kind)]

    def materialize(
        self,
        held: Sequence[Mapping[int, int]],
        source: BlockSource,
        holding: Holding | None = None,
    ) -> None:
        """Allocate the rank's blocks and fill them, one block at a time.

        Args:
            held: by layer, the slot of each expert that the rank holds; empty for layers without.
            source: the tensors of each block.
            holding: what the rank holds beside experts; None: everything.

        Raises:
            ValueError: a slot or expert is out of range, a slot is given twice, or is of a layer
                that is not held.
        """
        holding = holding or Holding.everything(self.skeleton)
        for layer, wanted in enumerate(held):
            self._check_slots(layer, wanted, holding)
        library.materialize_unsaved_buffers(self.skeleton.module, self.device)
        if not self.rehold(holding):
            self._use_holding()
        self._slots = [dict(wanted) for wanted in held]
        for block in self.blocks():
            self.write(block, source.tensors(block))

    def rehold(self, holding: Holding) -> dict[str, Replaced]:
        """Change what is held beside experts.

        Shards that stay are copied into the new tensors; what is new is not initialised until it
        is written. Layers that are left lose their experts, new ones have none.

        Args:
            holding: what is held from now on.

        Returns:
            By name, what was replaced, experts' stacks too. Optimizers have the old parameters.
        """
        replaced: dict[str, Replaced] = {}
        if holding == self.holding:
            return replaced
        for name, spec in self.skeleton.specs.items():
            old_run, new_run = self._run(name, self.holding), self._run(name, holding)
            if old_run == new_run:
                continue
            cut = self.skeleton.cuts.get(name)
            old, shape, device = self._tensors[name], spec.shape, torch.device("meta")
            if new_run is not None:
                device = self.device
                if name in self._stacks:
                    shape = (self.num_slots, *shape[1:])
                elif cut is not None:
                    shape = cut.run_shape(shape, len(new_run))
            allocate = torch.zeros if name in self._stacks else torch.empty
            new = _place(self._places[name], allocate(shape, dtype=spec.dtype, device=device))
            one = Replaced(
                old=old, new=new, cut=cut, old_run=old_run or range(0), new_run=new_run or range(0)
            )
            one.copy_kept(old.detach(), new.detach())
            self._tensors[name], replaced[name] = new, one
        for layer in set(self.holding.layers) - set(holding.layers):
            self._slots[layer] = {}
        self.holding = holding
        self._use_holding()
        return replaced

    def _run(self, name: str, holding: Holding) -> range | None:
        """The shards of a tensor that a holding has; range(1) of one that is whole."""
        home = self._homes[name]
        cut = self.skeleton.cuts.get(name)
        if cut is not None:
            return holding.run(cut.kind) if home.layer in holding.layers else None
        return range(1) if holding.has(home) else None

    def _use_holding(self) -> None:
        """Let regions compute with the shards held, and layers not held return their input."""
        away: list[str] = [] if self.holding.has_head else [*self.skeleton.head]
        for layer in range(self.skeleton.num_layers):
            if layer not in self.holding.layers:
                away.append(f"{self.skeleton.layers}.{layer}")
        modules = [self.skeleton.module.get_submodule(name) for name in away]
        for module in [one for one in self._bypassed if one not in modules]:
            own = self._bypassed.pop(module)
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own
        for module in modules:
            if module not in self._bypassed:
                self._bypassed[module] = module.__dict__.get("forward")
                module.__dict__["forward"] = _pass_through
        for region in self.skeleton.regions:
            if region.layer in self.holding.layers:
                region.apply_run(self.holding.run(region.kind))

    def blocks(self) -> Iterator[Block]:
        """The blocks that the rank holds, in the order of the skeleton's."""
        return filter(self.holds, self.skeleton.blocks)

    def holds(self, block: Block) -> bool:
        """Whether the rank holds a block of the model."""
        is_expert = block.kind is BlockKind.EXPERT
        return self.holding.has(block) and (
            not is_expert or block.index in self._slots[block.layer]
        )

    def shapes(self, block: Block) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of a block of the model, whether the rank holds it or not."""
        return {name: spec.shape for name, spec in self.skeleton.blocks[block].items()}

    def parts(self, block: Block) -> dict[str, Part]:
        """Where the tensors of a block lie.

        Raises:
            KeyError: the model has no such block, or the rank does not hold it.
        """
        names = self.skeleton.blocks[block]
        if not self.holds(block):
            raise KeyError(f"{block} is not held here")
        if block.kind is BlockKind.EXPERT:
            slot = self._slots[block.layer][block.index]
            return {name: Part(self._tensors[name], slot) for name in names}
        run, cuts = self.holding.run(block.kind), self.skeleton.cuts
        return {
            name: Part(self._tensors[name], None, cuts[name], run, block.index)
            if name in cuts
            else Part(self._tensors[name])
            for name in names
        }

    def read(self, block: Block) -> dict[str, torch.Tensor]:
        """The tensors of a block that the rank holds, as views without gradient."""
        return {name: part.of(part.tensor.detach()) for name, part in self.parts(block).items()}

    def write(self, block: Block, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into a block that the rank holds.

        Raises:
            ValueError: a name is missing or foreign, or a shape is another.
        """
        own = self.read(block)
        if own.keys() != tensors.keys():
            raise ValueError(f"{block}: expected {sorted(own)}, got {sorted(tensors)}")
        for name, value in tensors.items():
            if own[name].shape != value.shape:
                raise ValueError(
                    f"{block}: {name} is {tuple(own[name].shape)}, got {tuple(value.shape)}"
                )
            own[name].copy_(value)

    def assign(self, layer: int, slots: Mapping[int, int]) -> None:
        """Change which experts of a layer lie in which slots; slots that become free are zeroed.

        An expert that stays keeps its slot and state. A new one is zero until it is written.

        Args:
            layer: the decoder layer.
            slots: the slot of each expert that the rank holds from now on.

        Raises:
            ValueError: a slot or expert is out of range, a slot is given twice, an expert that
                stays changes its slot, or the layer is not held.
        """
        self._check_slots(layer, slots, self.holding)
        old = self._slots[layer]
        moved = [expert for expert in slots if slots[expert] != old.get(expert, slots[expert])]
        if moved:
            raise ValueError(f"layer {layer}: experts {moved} cannot change their slots")
        experts = self.skeleton.experts[layer]
        for expert, slot in old.items():
            if expert not in slots and experts:
                for name in experts.tensors:
                    self._tensors[name].detach()[slot].zero_()
        self._slots[layer] = dict(slots)

    def _check_slots(self, layer: int, slots: Mapping[int, int], holding: Holding) -> None:
        experts = self.skeleton.experts[layer]
        if slots and layer not in holding.layers:
            raise ValueError(f"layer {layer} is not held here, got slots {dict(slots)}")
        num_experts = experts.num_experts if experts else 0
        foreign = [expert for expert in slots if not 0 <= expert < num_experts]
        if foreign:
            raise ValueError(f"layer {layer} has {num_experts} experts, got {foreign}")
        taken = sorted(slots.values())
        if len(taken) != len(set(taken)) or not all(0 <= slot < self.num_slots for slot in taken):
            raise ValueError(f"layer {layer} has {self.num_slots} slots, got {taken}")


def _pass_through(hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """The forward of a layer that another rank has."""
    return hidden_states


_Places = Sequence[tuple[torch.nn.Module, str]]


def _places(model: torch.nn.Module) -> Mapping[str, _Places]:
    """Every module and attribute of a tensor, by the tensor's first name: more than one if tied."""
    first: dict[int, str] = {}
    places: dict[str, list[tuple[torch.nn.Module, str]]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                full = f"{prefix}.{name}" if prefix else name
                places[first.setdefault(id(tensor), full)].append((module, name))
    return dict(places)


def _place(places: _Places, value: torch.Tensor) -> torch.Tensor:
    """Set a parameter or buffer at all its places."""
    module, name = places[0]
    old = module._parameters.get(name)
    if old is not None:
        value = torch.nn.Parameter(value, requires_grad=old.requires_grad)
    for module, name in places:
        setattr(module, name, value)
    return value
