"""Which block each tensor of a model belongs to, by the names of the library's modules.

Every parameter and persistent buffer belongs to one block. What no rule names goes where it is
dense and whole: NORM_ROUTER within a layer, EMBEDDING outside.
"""

from collections.abc import Collection

import torch

from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.model.families import Family

_HEADS = ("norm", "final", "hc_head")
_MIXERS = ("Mamba", "DeltaNet")


def dense_block(
    model: torch.nn.Module, name: str, layers: str, moe_layers: Collection[int], family: Family
) -> Block:
    """The block of a tensor that is not a stacked one of experts.

    Args:
        model: the model.
        name: the tensor.
        layers: the name of the list of decoder layers.
        moe_layers: the decoder layers with experts; shared experts of these are in NORM_ROUTER.
        family: the rules of the model's family.
    """
    prefix = f"{layers}."
    if not name.startswith(prefix):
        at_head = _is_head(model, name, layers, family)
        return Block(BlockKind.HEAD if at_head else BlockKind.EMBEDDING)
    number, _, rest = name.removeprefix(prefix).partition(".")
    child = rest.partition(".")[0]
    kind = type(getattr(model.get_submodule(f"{prefix}{number}"), child)).__name__
    layer = int(number)
    if kind.endswith(("Attention", "Conv")) or any(word in kind for word in _MIXERS):
        return Block(BlockKind.ATTENTION, layer)
    if layer not in moe_layers and kind.endswith("MLP"):
        return Block(BlockKind.DENSE_MLP, layer)
    return Block(BlockKind.NORM_ROUTER, layer)


def head_modules(model: torch.nn.Module, layers: str, family: Family) -> tuple[str, ...]:
    """The modules that work after the layers, by name: the last norm and the output head."""
    decoder = layers.rpartition(".")[0]
    own = [name for name, _ in model.named_children()]
    inner = [f"{decoder}.{name}" for name, _ in model.get_submodule(decoder).named_children()]
    return tuple(
        name
        for name in (*inner, *own)
        if name != layers and _is_head(model, f"{name}.", layers, family)
    )


def _is_head(model: torch.nn.Module, name: str, layers: str, family: Family) -> bool:
    """Whether a tensor outside the layers works after them."""
    decoder, _, list_name = layers.rpartition(".")
    if name.partition(".")[0] != decoder.partition(".")[0]:
        return True  # beside the base model: the output head
    if not name.startswith(f"{decoder}."):
        return False  # another part of the base model, as a vision tower
    modules = dict(model.get_submodule(decoder).named_children())
    children = list(modules)
    child = name.removeprefix(f"{decoder}.").partition(".")[0]
    return (
        child in children[children.index(list_name) :]
        and child not in family.embedding
        and ("Norm" in type(modules[child]).__name__ or child.startswith(_HEADS))
    )
