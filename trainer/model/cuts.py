"""How attention and dense MLPs of decoder layers are divided into virtual shards.

One rule for all families, by the names of linear layers: those that enter are cut by rows of their
weights, the one that leaves by columns, and what has one value per head likewise. All else stays
whole on every rank. Recurrent mixers, convolutions and modules that the rule does not know are not
cut. No tensor is touched here: `blocks.py` holds them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import BlockKind

_COLUMN = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "g_proj", "q_gate_proj"),
        *("gate_proj", "up_proj", "w1", "w3", "fc1"),
    )
)
_PACKED = frozenset(("gate_up_proj", "input_linear"))  # gate and up in one tensor
_ROW = frozenset(("o_proj", "down_proj", "out_proj", "w2", "fc2", "dense", "output_linear"))
_PER_HEAD = frozenset(("sinks", "gate_bias", "softmax_scaling.scale", "softmax_scaling.bias"))
_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads")
_COUNTS = (*_QUERY_COUNTS, "num_key_value_heads", "num_kv_heads", "n_kv_heads")
_NORMS = {"q_norm": "q_proj", "k_norm": "k_proj"}
_EXPERTS = re.compile(r"\bexperts(\.\d|$)")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is divided into virtual shards.

    Attributes:
        kind: the kind of block that has the pieces: ATTENTION or DENSE_MLP.
        dim: the dimension that is divided.
        num_shards: the shards of the whole tensor.
        parts: tensors that lie one after the other in `dim`, each divided by itself: 2 where gate
            and up are packed.
    """

    kind: BlockKind
    dim: int
    num_shards: int
    parts: int = 1

    def run_shape(self, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
        """The shape of a tensor with `count` of the shards, by that of the whole."""
        size = shape[self.dim] // self.num_shards * count
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def piece_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one shard, by that of the whole tensor."""
        unit = shape[self.dim] // (self.parts * self.num_shards)
        own = (self.parts, unit) if self.parts > 1 else (unit,)
        return (*shape[: self.dim], *own, *shape[self.dim + 1 :])

    def run(self, tensor: Tensor, at: int, count: int, held: int) -> Tensor:
        """Shards [at, at + count) of a tensor that has `held`, [..., parts, count, unit, ...]."""
        unit = tensor.shape[self.dim] // (self.parts * held) if held else 0
        divided = torch.unflatten(tensor, self.dim, (self.parts, held, unit))
        return divided.narrow(self.dim + 1, at, count)

    def piece(self, tensor: Tensor, at: int, held: int) -> Tensor:
        """One shard of a tensor that has `held`, as a view: [..., unit, ...].

        Packed tensors keep their parts apart: [..., parts, unit, ...].
        """
        one = self.run(tensor, at, 1, held).squeeze(self.dim + 1)
        return one if self.parts > 1 else one.squeeze(self.dim)


@dataclass(frozen=True, eq=False, kw_only=True)
class Region:
    """Attention, a dense MLP or shared experts of a decoder layer.

    Attributes:
        layer: the decoder layer.
        kind: ATTENTION or DENSE_MLP.
        name: the module's name in the model.
        module: the library's module.
        num_shards: its virtual shards.
        is_cut: whether it is divided; else every rank of a tensor group computes all of it.
        linears: by name within the module, whole in_features and out_features of cut layers.
        attributes: by name, the module's numbers of heads, which scale with the run.
        row_biases: the names of row-parallel layers that have a bias, which is whole and added by
            one rank only.
        wide_norms: norms over all heads, with the size of the whole. While a rank has a part of
            the heads, they call `sum_over_group(squares)` of themselves, which adds up over the
            ranks of the tensor group, forward and backward.
        whole: tensors within the region, by their names in the model, that are not cut.
    """

    layer: int
    kind: BlockKind
    name: str
    module: nn.Module
    num_shards: int
    is_cut: bool
    linears: Mapping[str, tuple[int, int]]
    attributes: Mapping[str, int]
    row_biases: tuple[str, ...]
    wide_norms: Mapping[nn.Module, int]
    whole: tuple[str, ...]

    def apply_run(self, run: range) -> None:
        """Let the module compute with these shards; its tensors are of that size."""
        if not self.is_cut:
            return
        for name, (in_features, out_features) in self.linears.items():
            linear: Any = self.module.get_submodule(name)
            if name.rpartition(".")[2] in _ROW:
                in_features = in_features // self.num_shards * len(run)
            else:
                out_features = out_features // self.num_shards * len(run)
            linear.in_features, linear.out_features = in_features, out_features
        for name, count in self.attributes.items():
            setattr(self.module, name, count // self.num_shards * len(run))
        for norm, size in self.wide_norms.items():
            if len(run) < self.num_shards:
                norm.__dict__["forward"] = partial(_wide_norm, norm, size)
            else:
                norm.__dict__.pop("forward", None)


def find_regions(
    module: nn.Module,
    layer: int,
    name: str,
    kind_of: Callable[[str], BlockKind],
    shards: Mapping[BlockKind, int],
    *,
    is_divided: bool,
) -> tuple[list[Region], dict[str, Cut]]:
    """The regions of one decoder layer, and the cuts of their tensors.

    Args:
        module: the decoder layer.
        layer: its number.
        name: its name in the model.
        kind_of: the kind of block that a tensor belongs to in an undivided model, by its name.
        shards: the virtual shards of attention and of dense MLPs.
        is_divided: whether modules are cut where the rule knows them, into one shard too.

    Raises:
        ConfigError: heads or columns of a module do not divide into the shards.
    """
    regions: list[Region] = []
    cuts: dict[str, Cut] = {}
    for within, one in module.named_modules():
        full = f"{name}.{within}"
        if any(full.startswith(f"{region.name}.") for region in regions):
            continue
        if within and not _EXPERTS.search(within) and "lora" not in within and _is_divisible(one):
            first = next(f"{full}.{own}" for own, _ in one.named_parameters())
            is_attention = type(one).__name__.endswith("Attention")
            kind = BlockKind.ATTENTION if is_attention else kind_of(first)
            if kind is not BlockKind.ATTENTION:
                kind = BlockKind.DENSE_MLP
            found = _cuts(one, full, kind, shards[kind]) if is_divided else {}
            regions.append(_region(one, layer, full, kind, shards[kind], found))
            cuts |= found
    for child, one in module.named_children():
        full = f"{name}.{child}"
        named = [f"{full}.{own}" for own, _ in one.named_parameters()]
        inside = any(f"{region.name}.".startswith(f"{full}.") for region in regions)
        kind = kind_of(named[0]) if named else BlockKind.NORM_ROUTER
        if kind is not BlockKind.NORM_ROUTER and not inside:
            regions.append(_region(one, layer, full, kind, shards[kind], {}))
    return regions, cuts


def _is_divisible(module: nn.Module) -> bool:
    """Whether the rule knows the module: linear layers in and out, and no recurrence."""
    linears = [name for name, one in module.named_children() if isinstance(one, nn.Linear)]
    is_recurrent = any("conv" in name for name, _ in module.named_children()) or any(
        hasattr(module, name) for name in ("A_log", "A")
    )
    enters = any(name in _COLUMN or name in _PACKED for name in linears)
    return enters and any(name in _ROW for name in linears) and not is_recurrent


def _cuts(module: nn.Module, full: str, kind: BlockKind, num_shards: int) -> dict[str, Cut]:
    """The cuts of a module's tensors, by their names in the model."""
    _check_heads(module, full, kind, num_shards)
    found: dict[str, Cut] = {}
    for name, linear in module.named_children():
        if not isinstance(linear, nn.Linear):
            continue
        parts = 2 if name in _PACKED else 1
        if name in _ROW:
            found[f"{full}.{name}.weight"] = Cut(kind, 1, num_shards)
            _check_size(full, name, linear.in_features, kind, num_shards)
        elif name in _COLUMN or name in _PACKED:
            found[f"{full}.{name}.weight"] = Cut(kind, 0, num_shards, parts)
            if linear.bias is not None:
                found[f"{full}.{name}.bias"] = Cut(kind, 0, num_shards, parts)
            _check_size(full, name, linear.out_features // parts, kind, num_shards)
    for name, parameter in module.named_parameters():
        if name in _PER_HEAD:
            found[f"{full}.{name}"] = Cut(kind, 0, num_shards)
            _check_size(full, name, parameter.shape[0], kind, num_shards)
    for norm in _wide_norms(module):
        found[f"{full}.{norm}.weight"] = Cut(kind, 0, num_shards)
    return found


def _region(
    module: nn.Module,
    layer: int,
    full: str,
    kind: BlockKind,
    num_shards: int,
    cuts: Mapping[str, Cut],
) -> Region:
    linears = {
        name: (one.in_features, one.out_features)
        for name, one in module.named_children()
        if isinstance(one, nn.Linear) and f"{full}.{name}.weight" in cuts
    }
    counts = {name: getattr(module, name, None) for name in _COUNTS}
    return Region(
        layer=layer,
        kind=kind,
        name=full,
        module=module,
        num_shards=num_shards,
        is_cut=bool(cuts),
        linears=linears,
        attributes={
            name: count
            for name, count in counts.items()
            if cuts and type(count) is int and count % num_shards == 0
        },
        row_biases=tuple(
            name for name in linears if name in _ROW and getattr(module, name).bias is not None
        ),
        wide_norms={
            getattr(module, name): getattr(module, name).weight.numel()
            for name in (_wide_norms(module) if cuts else ())
        },
        whole=tuple(
            f"{full}.{name}" for name in module.state_dict() if f"{full}.{name}" not in cuts
        ),
    )


def _wide_norms(module: nn.Module) -> list[str]:
    """The module's norms over all heads."""
    found = []
    for name, of in _NORMS.items():
        norm, linear = getattr(module, name, None), getattr(module, of, None)
        weight = getattr(norm, "weight", None)
        if isinstance(linear, nn.Linear) and weight is not None:
            size = linear.out_features
            if weight.shape == (size,) and size != getattr(module, "head_dim", None):
                found.append(name)
    return found


def _check_heads(module: nn.Module, full: str, kind: BlockKind, num_shards: int) -> None:
    if kind is not BlockKind.ATTENTION:
        return
    counts = [getattr(module, name, None) for name in _QUERY_COUNTS]
    heads = [count for count in counts if type(count) is int]
    size = getattr(module, "head_dim", None)
    for name in ("q_proj", "k_proj"):
        linear = getattr(module, name, None)
        if isinstance(linear, nn.Linear) and type(size) is int and size > 0:
            heads.append(linear.out_features // size)
    for count in heads:
        _check_size(full, "heads", count, kind, num_shards, of=gcd(*heads))


def _check_size(
    full: str, name: str, size: int, kind: BlockKind, num_shards: int, of: int = 0
) -> None:
    if size % num_shards:
        option = "num_attention_shards" if kind is BlockKind.ATTENTION else "num_mlp_shards"
        raise ConfigError(
            f"{full}: {name} of size {size} does not divide into {num_shards} virtual shards",
            remedy=f"give {option} that divides {of or size}",
        )


def _wide_norm(norm: Any, size: int, hidden: Tensor) -> Tensor:
    """RMS norm of a part of the heads; the squares are added up over the tensor group."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    mean = norm.sum_over_group(wide.pow(2).sum(-1, keepdim=True)) / size
    epsilon = getattr(norm, "variance_epsilon", None)
    epsilon = norm.eps if epsilon is None else epsilon
    normed: Tensor = norm.weight * (wide * torch.rsqrt(mean + epsilon)).to(hidden.dtype)
    return normed
