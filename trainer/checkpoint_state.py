"""A model and its optimizer as blocks: every tensor of a block by a name that no layout changes.

A parameter `w1` comes with its moments `w1.exp_avg` and `w1.exp_avg_sq`; before the first update
these are zero.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pacekeeper.core.errors import DataError
from pacekeeper.core.layout import Block, BlockKind, Layout
from pacekeeper.core.manifest import block_name
from pacekeeper.core.tensor_file import TensorSpec
from pacekeeper.trainer.checkpoint_catalog import RawTensor
from pacekeeper.trainer.model import Attention, MoETransformer
from pacekeeper.trainer.mover import ordered_parameters

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
MOMENTS = ("exp_avg", "exp_avg_sq")
_ENDINGS = ("", *(f".{moment}" for moment in MOMENTS))
BlockState = Mapping[str, Tensor]


def block_specs(model: MoETransformer, block: Block) -> tuple[TensorSpec, ...]:
    """Names, dtypes and shapes of the block's tensors, names ascending; also of experts that live
    elsewhere.
    """
    shapes = {name: _shape(block, p) for name, p in _parameters(model, block).items()}
    dtype = DTYPE_NAMES[model.embedding.dtype]
    return tuple(
        TensorSpec(name=name, dtype=dtype, shape=tuple(shapes[name.partition(".")[0]]))
        for name in sorted(f"{name}{ending}" for name in shapes for ending in _ENDINGS)
    )


def block_bytes(model: MoETransformer, layout: Layout) -> dict[Block, int]:
    """Bytes of every block of the layout."""
    return {
        block: sum(spec.size_bytes for spec in block_specs(model, block))
        for block in layout.blocks()
    }


def read_block(
    model: MoETransformer, optimizer: torch.optim.Optimizer, block: Block
) -> dict[str, Tensor]:
    """Copies in host memory of a block that this rank holds; names ascend."""
    found: dict[str, Tensor] = {}
    for name, parameter in _parameters(model, block).items():
        memory = optimizer.state.get(parameter, {})
        for ending in _ENDINGS:
            whole = memory.get(ending[1:]) if ending else parameter
            value = torch.zeros_like(parameter) if whole is None else whole
            part = value.detach()
            if block.kind is BlockKind.EXPERT:
                part = part[model.layers()[block.layer].bank.experts.index(block.index)]
            found[f"{name}{ending}"] = part.to("cpu", copy=True).contiguous()
    return dict(sorted(found.items()))


def to_tensors(
    model: MoETransformer, block: Block, raw: Mapping[str, RawTensor]
) -> dict[str, Tensor]:
    """The tensors in what was read. Raises DataError where they do not fit this model's block."""
    specs = block_specs(model, block)
    if [(n, raw[n].dtype, raw[n].shape) for n in sorted(raw)] != [
        (spec.name, spec.dtype, spec.shape) for spec in specs
    ]:
        raise DataError(f"{block_name(block)}: names, dtypes or shapes are of another model")
    dtype = model.embedding.dtype
    return {
        spec.name: torch.frombuffer(bytearray(raw[spec.name].data), dtype=dtype).view(spec.shape)
        for spec in specs
    }


def num_updates(model: MoETransformer, optimizer: torch.optim.Optimizer) -> int:
    """How many the optimizer has made, the same of all parameters."""
    return int(optimizer.state.get(model.head, {}).get("step", 0))


def put_in(
    model: MoETransformer,
    optimizer: torch.optim.Optimizer,
    experts: Sequence[tuple[int, ...]],
    state: Mapping[Block, BlockState],
    updates: int,
) -> None:
    """Put `state` in force: all dense blocks, and of layer `l` the replicas of `experts[l]`.

    `updates`: how many the optimizer had made.
    """

    def remember(parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        optimizer.state.pop(parameter, None)
        if updates:
            step = torch.tensor(float(updates))
            optimizer.state[parameter] = {"step": step, **moments}

    for layer, module in enumerate(model.layers()):
        bank = module.bank
        held = [state[Block(BlockKind.EXPERT, layer, expert)] for expert in experts[layer]]
        fresh: dict[str, Tensor] = {}
        for name, old in (("w1", bank.w1), ("w2", bank.w2)):
            optimizer.state.pop(old, None)
            for ending in _ENDINGS:
                parts = [one[f"{name}{ending}"].to(old) for one in held]
                none = old.detach().new_empty((0, *old.shape[1:]))
                fresh[f"{name}{ending}"] = torch.stack(parts) if parts else none
        bank.replace(experts[layer], {name: fresh[name] for name in ("w1", "w2")})
        for name, new in (("w1", bank.w1), ("w2", bank.w2)):
            remember(new, {moment: fresh[f"{name}.{moment}"] for moment in MOMENTS})
    for block, tensors in state.items():
        if block.kind is BlockKind.EXPERT:
            continue
        for name, parameter in _parameters(model, block).items():
            with torch.no_grad():
                parameter.copy_(tensors[name])
            remember(parameter, {m: tensors[f"{name}.{m}"].to(parameter) for m in MOMENTS})
    optimizer.param_groups[0]["params"] = ordered_parameters(model)


def _shape(block: Block, parameter: nn.Parameter) -> torch.Size:
    return parameter.shape[1:] if block.kind is BlockKind.EXPERT else parameter.shape


def _parameters(model: MoETransformer, block: Block) -> dict[str, nn.Parameter]:
    """The parameters of a block by name; an expert's are its layer's banks, a slot of each."""
    attention, moe = model.attention[block.layer], model.layers()[block.layer]
    assert isinstance(attention, Attention), "as it was built"
    assert block.index == 0 or block.kind is BlockKind.EXPERT, "one virtual shard"
    match block.kind:
        case BlockKind.EMBEDDING:
            return {"embedding": model.embedding, "places": model.places}
        case BlockKind.HEAD:
            return {"norm": model.norm, "head": model.head}
        case BlockKind.NORM_ROUTER:
            return {"attention_norm": attention.norm, "norm": moe.norm, "router": moe.router}
        case BlockKind.ATTENTION:
            return {"qkv": attention.qkv, "out": attention.out}
        case BlockKind.EXPERT:
            return {"w1": moe.bank.w1, "w2": moe.bank.w2}
        case BlockKind.DENSE_MLP:
            raise AssertionError("every layer of this model has experts")
