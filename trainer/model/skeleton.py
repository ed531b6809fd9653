"""A model's skeleton: the library's modules on the meta device, its experts, its blocks.

Nothing is allocated here: `blocks.py` materializes what a rank holds.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.cuts import Cut, Region, find_regions
from pacekeeper.trainer.model.families import Family, family_of
from pacekeeper.trainer.model.names import dense_block, head_modules

_REMEDY = "train a family of docs/models.md"


@dataclass(frozen=True, eq=False)
class ExpertLayer:
    """The stacked experts of one decoder layer.

    Attributes:
        layer: the decoder layer.
        name: the module's name in the model.
        module: the library's module; `library.run_grouped_experts` computes with it.
        num_experts: experts of the layer.
        parameters: the module's own names of its stacked parameters, [num_experts, ...] each.
    """

    layer: int
    name: str
    module: torch.nn.Module
    num_experts: int
    parameters: tuple[str, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of its stacked parameters in the model."""
        return tuple(f"{self.name}.{parameter}" for parameter in self.parameters)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and data type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A model on the meta device.

    Attributes:
        module: the model; it computes logits of tokens.
        config: its configuration.
        layers: the name of the list of decoder layers.
        experts: by decoder layer; None for a layer without experts.
        specs: by name, each parameter and persistent buffer; tied parameters once, stacked ones
            with all experts.
        blocks: every block of the model with its tensors, by name, each in the shape of the
            block's part. A layer without experts has DENSE_MLP; a block may be empty, where a
            family has nothing of its kind.
        head: the names of the modules that work after the layers.
        num_attention_shards: the virtual shards of a layer's attention.
        num_mlp_shards: the virtual shards of a layer's dense MLP and shared experts. Where both
            numbers are 1, the model is not divided: no tensor is cut.
        cuts: how tensors are divided, by name. What lies in a layer and is not cut belongs to its
            NORM_ROUTER block if the model is divided.
        regions: attention, dense MLPs and shared experts of the decoder layers, in their order;
            none is cut if the model is not divided.
        shared_mlp_layers: layers with experts that have DENSE_MLP blocks, of shared experts.
        has_ties: whether blocks share a tensor, as embedding and head.
    """

    module: torch.nn.Module
    config: library.Config
    layers: str
    experts: tuple[ExpertLayer | None, ...]
    specs: Mapping[str, TensorSpec]
    blocks: Mapping[Block, Mapping[str, TensorSpec]]
    head: tuple[str, ...]
    num_attention_shards: int
    num_mlp_shards: int
    cuts: Mapping[str, Cut]
    regions: tuple[Region, ...]
    shared_mlp_layers: tuple[int, ...]
    has_ties: bool

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.experts)

    @property
    def num_experts(self) -> int:
        """The number of experts of the layers that have experts; 0 for a dense model."""
        return max((one.num_experts for one in self.experts if one is not None), default=0)


def build_skeleton(
    config: Path | str | Mapping[str, Any] | library.Config,
    dtype: torch.dtype = torch.float32,
    *,
    num_attention_shards: int = 1,
    num_mlp_shards: int = 1,
) -> Skeleton:
    """Build a model on the meta device, its experts computed by our function.

    Args:
        config: what `library.load_config` reads.
        dtype: data type of the parameters.
        num_attention_shards: virtual shards of a layer's attention; tensor groups divide them.
        num_mlp_shards: virtual shards of a layer's dense MLP and shared experts.

    Raises:
        ConfigError: the model cannot be built, its experts lack the experts interface, or heads or
            columns do not divide into the shards.
    """
    config = library.load_config(config)
    module = library.build_on_meta(config, dtype)
    found = {name: one for name, one in module.named_modules() if library.is_experts(one)}
    layers = _decoder_layers(module, found, library.num_layers(config))
    family = family_of(config.model_type)
    experts = _expert_layers(module, found, layers, family)
    specs = _specs(module)
    moe_layers = {one.layer for one in experts if one}

    def block_of(name: str) -> Block:
        return dense_block(module, name, layers, moe_layers, family)

    shards = {BlockKind.ATTENTION: num_attention_shards, BlockKind.DENSE_MLP: num_mlp_shards}
    regions, cuts = _regions(module, layers, block_of, shards)
    shared = {
        one.layer for one in regions if one.is_cut and one.kind is BlockKind.DENSE_MLP
    } & moe_layers
    return Skeleton(
        module=module,
        config=module.config,
        layers=layers,
        experts=experts,
        specs=specs,
        blocks=_blocks(block_of, experts, specs, shards, cuts, shared),
        head=head_modules(module, layers, family),
        num_attention_shards=num_attention_shards,
        num_mlp_shards=num_mlp_shards,
        cuts=cuts,
        regions=regions,
        shared_mlp_layers=tuple(sorted(shared)),
        has_ties=_has_ties(module, block_of),
    )


def _regions(
    module: torch.nn.Module,
    layers: str,
    block_of: Callable[[str], Block],
    shards: Mapping[BlockKind, int],
) -> tuple[tuple[Region, ...], Mapping[str, Cut]]:
    """The regions of all layers, and the cuts of their tensors."""
    if min(shards.values()) < 1:
        raise ConfigError(
            f"a layer cannot have {min(shards.values())} virtual shards", remedy="give at least 1"
        )
    regions: list[Region] = []
    cuts: dict[str, Cut] = {}
    for number, one in enumerate(module.get_submodule(layers).children()):
        found = find_regions(
            one,
            number,
            f"{layers}.{number}",
            lambda name: block_of(name).kind,
            shards,
            is_divided=max(shards.values()) > 1,
        )
        regions += found[0]
        cuts |= found[1]
    return tuple(regions), cuts


def _has_ties(module: torch.nn.Module, block_of: Callable[[str], Block]) -> bool:
    """Whether a tensor is in two places that belong to different blocks."""
    places: dict[int, set[Block]] = defaultdict(set)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places[id(parameter)].add(block_of(name))
    return any(len(blocks) > 1 for blocks in places.values())


def _expert_layers(
    module: torch.nn.Module,
    found: Mapping[str, torch.nn.Module],
    layers: str,
    family: Family,
) -> tuple[ExpertLayer | None, ...]:
    experts: list[ExpertLayer | None] = [None] * sum(
        1 for _ in module.get_submodule(layers).children()
    )
    for name, one in found.items():
        number, _, within = name.removeprefix(f"{layers}.").partition(".")
        if not name.startswith(f"{layers}.") or (family.experts and within != family.experts):
            library.use_library_experts(one)
            continue
        stacked = dict(one.named_parameters(recurse=False))
        sizes = {parameter.shape[0] for parameter in stacked.values()}
        if len(sizes) != 1 or experts[int(number)] is not None:
            raise ConfigError(
                f"layer {number} has experts of several kinds: {name} is one of them",
                remedy=_REMEDY,
            )
        experts[int(number)] = ExpertLayer(int(number), name, one, sizes.pop(), tuple(stacked))
    return tuple(experts)


def _blocks(
    block_of: Callable[[str], Block],
    experts: tuple[ExpertLayer | None, ...],
    specs: Mapping[str, TensorSpec],
    shards: Mapping[BlockKind, int],
    cuts: Mapping[str, Cut],
    shared: Collection[int],
) -> dict[Block, Mapping[str, TensorSpec]]:
    dense: dict[Block, dict[str, TensorSpec]] = {Block(BlockKind.EMBEDDING): {}}
    stacked: dict[Block, Mapping[str, TensorSpec]] = {}
    is_divided = max(shards.values()) > 1
    for layer, one in enumerate(experts):
        dense[Block(BlockKind.NORM_ROUTER, layer)] = {}
        for kind, count in shards.items():
            if kind is BlockKind.ATTENTION or not one or layer in shared:
                for shard in range(count):
                    dense[Block(kind, layer, shard)] = {}
        if one:
            parts = {
                name: TensorSpec(specs[name].shape[1:], specs[name].dtype) for name in one.tensors
            }
            for expert in range(one.num_experts):
                stacked[Block(BlockKind.EXPERT, layer, expert)] = parts
    dense[Block(BlockKind.HEAD)] = {}
    stacks = {name for one in experts if one for name in one.tensors}
    outside = (BlockKind.EMBEDDING, BlockKind.HEAD)
    for name, spec in specs.items():
        if name in stacks:
            continue
        home, cut = block_of(name), cuts.get(name)
        if cut is not None:
            piece = TensorSpec(cut.piece_shape(spec.shape), spec.dtype)
            for shard in range(cut.num_shards):
                dense[Block(cut.kind, home.layer, shard)][name] = piece
        elif is_divided and home.kind not in outside:
            dense[Block(BlockKind.NORM_ROUTER, home.layer)][name] = spec
        else:
            dense[home][name] = spec
    return {**dense, **stacked}


def _specs(module: torch.nn.Module) -> dict[str, TensorSpec]:
    kept = module.state_dict().keys()  # parameters and persistent buffers
    specs = {
        name: TensorSpec(tuple(parameter.shape), parameter.dtype)
        for name, parameter in module.named_parameters()
    }
    for name, buffer in module.named_buffers():
        if name in kept:
            specs[name] = TensorSpec(tuple(buffer.shape), buffer.dtype)
    return specs


def _decoder_layers(
    module: torch.nn.Module, experts: Mapping[str, torch.nn.Module], num_layers: int
) -> str:
    """The name of the module list of the decoder's layers.

    It is the outermost list around experts, or any outermost one of a dense model; of several, the
    one with as many layers as the configuration gives the decoder.
    """
    sizes: dict[str, int] = {}
    for name, one in module.named_modules():  # parents first
        inner = any(name.startswith(f"{outer}.") for outer in sizes)
        if isinstance(one, torch.nn.ModuleList) and len(one) and not inner:
            sizes[name] = len(one)
    around = [name for name in sizes if any(one.startswith(f"{name}.") for one in experts)]
    if not sizes:
        raise ConfigError(f"{type(module).__name__} has no list of layers", remedy=_REMEDY)
    return max(around or sizes, key=lambda name: (sizes[name] == num_layers, sizes[name]))
