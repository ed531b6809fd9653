"""The state of one rank's model as typed blocks, and the slots that hold its experts.

The names of a block's tensors are those of the library's modules, without the expert: they never
depend on the layout. Only what the rank holds is ever allocated.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.skeleton import Skeleton


class BlockSource(Protocol):
    """Where the tensors of blocks come from: an initialization or a checkpoint."""

    @property
    def fingerprint(self) -> str:
        """What tells this source from another; equal on all ranks of a job."""

    def tensors(self, block: Block) -> Mapping[str, torch.Tensor]:
        """The tensors of `block` by name, in the shapes of `Skeleton.blocks`."""


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """A block's part of a parameter or buffer: all of it, or one slot of a stacked parameter."""

    tensor: torch.Tensor
    slot: int | None = None

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The block's part of any tensor in the parameter's shape, as a view."""
        return whole if self.slot is None else whole[self.slot]


class BlockStore:
    """The blocks that one rank holds, in the parameters of the skeleton's modules.

    The rank holds all dense blocks. Each layer with experts has `num_slots` slots: its stacked
    parameters are [num_slots, ...], and free slots are zero.

    Attributes:
        skeleton: the model; its modules get the parameters.
        num_slots: slots of each layer with experts.
        device: where the tensors are.
    """

    def __init__(
        self, skeleton: Skeleton, *, num_slots: int, device: torch.device | str = "cpu"
    ) -> None:
        self.skeleton = skeleton
        self.num_slots = num_slots
        self.device = torch.device(device)
        self._slots: list[dict[int, int]] = [{} for _ in skeleton.experts]
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def slots(self) -> Sequence[Mapping[int, int]]:
        """By layer, the slot of each expert that the rank holds."""
        return self._slots

    def stacked(self, layer: int) -> dict[str, torch.nn.Parameter]:
        """The stacked parameters of a layer's experts, by their names; {} for a dense layer."""
        experts = self.skeleton.experts[layer]
        names = experts.tensors if experts else ()
        return {name: self._tensors[name] for name in names}  # type: ignore[misc]

    def materialize(self, held: Sequence[Mapping[int, int]], source: BlockSource) -> None:
        """Allocate the rank's blocks and fill them, one block at a time.

        Args:
            held: by layer, the slot of each expert that the rank holds; empty for layers without.
            source: the tensors of each block.

        Raises:
            ValueError: a slot or expert is out of range, or a slot is given twice.
        """
        for layer, wanted in enumerate(held):
            self._check_slots(layer, wanted)
        library.materialize_unsaved_buffers(self.skeleton.module, self.device)
        stacked = {name for one in self.skeleton.experts if one for name in one.tensors}
        places = _places(self.skeleton.module)
        for name, spec in self.skeleton.specs.items():
            shape = (self.num_slots, *spec.shape[1:]) if name in stacked else spec.shape
            allocate = torch.zeros if name in stacked else torch.empty
            value = allocate(shape, dtype=spec.dtype, device=self.device)
            self._tensors[name] = _place(places[name], value)
        self._slots = [dict(wanted) for wanted in held]
        for block in self.blocks():
            self.write(block, source.tensors(block))

    def blocks(self) -> Iterator[Block]:
        """The blocks that the rank holds, in the order of the skeleton's."""
        for block in self.skeleton.blocks:
            if block.kind is not BlockKind.EXPERT or block.index in self._slots[block.layer]:
                yield block

    def shapes(self, block: Block) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of a block of the model, whether the rank holds it or not."""
        return {name: spec.shape for name, spec in self.skeleton.blocks[block].items()}

    def parts(self, block: Block) -> dict[str, Part]:
        """Where the tensors of a block lie.

        Raises:
            KeyError: the model has no such block, or the rank does not hold it.
        """
        names = self.skeleton.blocks[block]
        slot = self._slots[block.layer][block.index] if block.kind is BlockKind.EXPERT else None
        return {name: Part(self._tensors[name], slot) for name in names}

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
            ValueError: a slot or expert is out of range, a slot is given twice, or an expert that
                stays changes its slot.
        """
        self._check_slots(layer, slots)
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

    def _check_slots(self, layer: int, slots: Mapping[int, int]) -> None:
        experts = self.skeleton.experts[layer]
        num_experts = experts.num_experts if experts else 0
        foreign = [expert for expert in slots if not 0 <= expert < num_experts]
        if foreign:
            raise ValueError(f"layer {layer} has {num_experts} experts, got {foreign}")
        taken = sorted(slots.values())
        if len(taken) != len(set(taken)) or not all(0 <= slot < self.num_slots for slot in taken):
            raise ValueError(f"layer {layer} has {self.num_slots} slots, got {taken}")


_Places = Sequence[tuple[torch.nn.Module, str]]


def _places(model: torch.nn.Module) -> dict[str, _Places]:
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
