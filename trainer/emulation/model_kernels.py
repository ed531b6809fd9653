"""The kernels that a model's modules start on a device, by the shapes of their parameters.

Shapes are those of the trained model, or of a larger one of its family that it stands for: modules
correspond by name. `engine_device.py` says when they start; what they take is `core.kernel_laws`.

What each module starts is a rule over parameters, for any family: a matrix is a product, stacked
matrices are grouped products, attention is one kernel besides its projections, other modules pass
over their activations once. Modules without attention that mix tokens (recurrent ones) are priced
as such passes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.kernel_laws.kernels import (
    ELEMENT_BYTES,
    Attention,
    GroupedProduct,
    Kernel,
    Product,
    Stream,
    StreamKind,
)
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.skeleton import ExpertLayer, Skeleton

_LOSS_BYTES = 3 * 4  # of a logit in float32: read twice, its gradient written once


class Portion(NamedTuple):
    """What a rank computes of a module in a forward pass.

    Attributes:
        tokens: Part of the micro-batch's tokens.
        shards: Part of the module's columns or heads.
    """

    tokens: float = 1.0
    shards: float = 1.0


WHOLE = Portion()


@dataclass(frozen=True, slots=True)
class ModuleKernels:
    """What one module starts in a forward pass.

    Attributes:
        products: Inputs and outputs of each matrix.
        streams: Kind and bytes per token of each pass over activations.
        attention: Of one token, where the module attends.
        cuts_inputs: Whether a tensor group divides the inputs of its products, not the outputs.
    """

    products: tuple[tuple[int, int], ...] = ()
    streams: tuple[tuple[StreamKind, int], ...] = ()
    attention: Attention | None = None
    cuts_inputs: bool = False

    def forward(self, lengths: tuple[int, ...], portion: Portion = WHOLE) -> list[Kernel]:
        """Return the kernels for documents of these lengths, in tokens."""
        tokens = round(sum(lengths) * portion.tokens)
        if not tokens or not portion.shards:
            return []
        share = portion.shards
        of_inputs, of_outputs = (share, 1.0) if self.cuts_inputs else (1.0, share)
        kernels: list[Kernel] = [
            Product(tokens, max(round(i * of_inputs), 1), max(round(o * of_outputs), 1))
            for i, o in self.products
        ]
        kernels += [Stream(kind, round(tokens * size * share)) for kind, size in self.streams]
        if self.attention is not None:
            heads = max(round(self.attention.heads * share), 1)
            kernels.append(replace(self.attention, lengths=lengths, heads=heads))
        return kernels


@dataclass(frozen=True, slots=True)
class ExpertKernels:
    """What the experts of one layer start: grouped products, and passes over their rows.

    Attributes:
        products: Inputs and outputs of each stacked matrix, in the order of their use.
    """

    products: tuple[tuple[int, int], ...]

    def forward(self, rows: Sequence[int]) -> list[Kernel]:
        """Return the kernels for these rows of each slot."""
        active, total = tuple(n for n in rows if n), sum(rows)
        if not active:
            return []
        kernels: list[Kernel] = [GroupedProduct(active, i, o) for i, o in self.products]
        hidden, inner = self.products[0]
        # Rows are brought into the order of the slots, and their answers back.
        permuted = Stream(StreamKind.ADD, 2 * total * hidden * ELEMENT_BYTES)
        gate = Stream(StreamKind.ACTIVATION, total * (inner + inner // 2) * ELEMENT_BYTES)
        return [permuted, *kernels, gate, permuted]


@dataclass(frozen=True, slots=True)
class ModelKernels:
    """What a whole model starts, by the names of its modules, and by layer of experts."""

    modules: dict[str, ModuleKernels]
    experts: dict[str, ExpertKernels]

    def forward(self, lengths: tuple[int, ...], rows: Sequence[int]) -> Iterator[Kernel]:
        """Yield the kernels of a forward pass in which each layer's experts compute `rows`."""
        for one in self.modules.values():
            yield from one.forward(lengths)
        for experts in self.experts.values():
            yield from experts.forward(rows)


def model_kernels(skeleton: Skeleton, shapes: Skeleton) -> ModelKernels:
    """Return the kernels of a model.

    Args:
        skeleton: The model that is trained.
        shapes: The model whose shapes are taken: the same, or another of its family.

    Raises:
        ConfigError: `shapes` lacks a module of the trained model.
    """
    names = [one.name for one in skeleton.experts if one]
    modules = {}
    for name, _ in skeleton.module.named_modules():
        if not any(name == experts or name.startswith(f"{experts}.") for experts in names):
            kernels = _module_kernels(shapes, name)
            cut = skeleton.cuts.get(f"{name}.weight")
            if kernels != ModuleKernels():
                modules[name] = replace(kernels, cuts_inputs=cut is not None and cut.dim == 1)
    experts = {}
    for one in skeleton.experts:
        if one is not None:
            other = shapes.experts[one.layer] if one.layer < shapes.num_layers else None
            if other is None:
                raise _differs(f"layer {one.layer} has experts")
            experts[one.name] = ExpertKernels(_stacked_matrices(other))
    return ModelKernels(modules=modules, experts=experts)


def _module_kernels(shapes: Skeleton, name: str) -> ModuleKernels:
    try:
        module = shapes.module.get_submodule(name)
    except AttributeError:
        raise _differs(f"there is a module {name}") from None
    hidden = library.hidden_size(shapes.module)
    own = list(module.parameters(recurse=False))
    attention = library.attention_shape(module, shapes.config)
    parent = name.rpartition(".")[0]
    if isinstance(module, nn.Embedding):
        return _streams((StreamKind.EMBEDDING, 2 * module.embedding_dim))
    if attention is not None:
        heads, size, window = attention
        return ModuleKernels(
            # Rotary embeddings, and the addition to the residual.
            streams=(
                (StreamKind.ROTARY, 2 * heads * size * ELEMENT_BYTES),
                (StreamKind.ADD, 3 * hidden * ELEMENT_BYTES),
            ),
            attention=Attention((), heads, size, window),
        )
    if parent.rpartition(".")[0] == shapes.layers and next(module.children(), None) is not None:
        return _streams((StreamKind.ADD, 3 * hidden))  # a branch is added to the residual
    products = tuple((p.shape[1], p.shape[0]) for p in own if p.ndim == 2)
    if products:
        is_head = module is library.output_head(shapes.module)
        loss = ((StreamKind.ADD, _LOSS_BYTES * products[0][1]),) if is_head else ()
        return ModuleKernels(products=products, streams=loss)
    siblings = shapes.module.get_submodule(parent)
    if own:
        width = max(p.numel() for p in own)
        around = library.attention_shape(siblings, shapes.config)
        if around is not None and around[1] == width:  # a norm of each head
            width *= around[0]
        return _streams((StreamKind.NORM, 2 * width))
    if next(module.children(), None) is None and not isinstance(module, nn.Dropout | nn.Identity):
        outputs = [m.out_features for m in siblings.children() if isinstance(m, nn.Linear)]
        return _streams((StreamKind.ACTIVATION, 3 * max(outputs, default=hidden)))
    return ModuleKernels()


def _streams(*passes: tuple[StreamKind, int]) -> ModuleKernels:
    """Passes of so many elements per token each."""
    return ModuleKernels(streams=tuple((kind, n * ELEMENT_BYTES) for kind, n in passes))


def _stacked_matrices(one: ExpertLayer) -> tuple[tuple[int, int], ...]:
    stacks = [p for p in one.module.parameters(recurse=False) if p.ndim == 3]
    if getattr(one.module, "is_transposed", False):  # [experts, inputs, outputs]
        return tuple((p.shape[1], p.shape[2]) for p in stacks)
    return tuple((p.shape[2], p.shape[1]) for p in stacks)


def _differs(what: str) -> ConfigError:
    return ConfigError(
        f"emulated_model: {what} in the trained model, and not in the one whose shapes it is to "
        "have",
        remedy="give a model of the same family with at least as many layers of the same kinds",
    )
