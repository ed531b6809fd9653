"""Blocks as a checkpoint holds them: tensors with names, dtypes and shapes that can be checked."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pacekeeper.core.errors import DataError
from pacekeeper.core.layout import Block, Layout
from pacekeeper.core.manifest import block_name
from pacekeeper.core.tensor_file import TensorSpec
from pacekeeper.trainer.block_state import ENDINGS, read_block, shapes_of
from pacekeeper.trainer.checkpoint_catalog import RawTensor
from pacekeeper.trainer.model import MoETransformer

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def block_specs(model: MoETransformer, block: Block) -> tuple[TensorSpec, ...]:
    """Names, dtypes and shapes of the block's tensors, names ascending; also of blocks that live
    elsewhere.
    """
    shapes, dtype = shapes_of(model, block), DTYPE_NAMES[model.dtype]
    return tuple(
        TensorSpec(name=name, dtype=dtype, shape=shapes[name.partition(".")[0]])
        for name in sorted(f"{name}{ending}" for name in shapes for ending in ENDINGS)
    )


def block_bytes(model: MoETransformer, layout: Layout) -> dict[Block, int]:
    """Bytes of every block of the layout."""
    return {
        block: sum(spec.size_bytes for spec in block_specs(model, block))
        for block in layout.blocks()
    }


def copy_of_block(
    model: MoETransformer, optimizer: torch.optim.Optimizer, block: Block
) -> dict[str, Tensor]:
    """Copies in host memory of a block that this rank holds; names ascend."""
    state = read_block(model, optimizer, block)
    return {name: part.to("cpu", copy=True).contiguous() for name, part in state.items()}


def to_tensors(
    model: MoETransformer, block: Block, raw: Mapping[str, RawTensor]
) -> dict[str, Tensor]:
    """The tensors in what was read. Raises DataError where they do not fit this model's block."""
    specs = block_specs(model, block)
    if [(n, raw[n].dtype, raw[n].shape) for n in sorted(raw)] != [
        (spec.name, spec.dtype, spec.shape) for spec in specs
    ]:
        raise DataError(f"{block_name(block)}: names, dtypes or shapes are of another model")
    dtype = model.dtype
    return {
        spec.name: torch.frombuffer(bytearray(raw[spec.name].data), dtype=dtype).view(spec.shape)
        for spec in specs
    }
