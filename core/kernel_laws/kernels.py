"""Kernels by shape, and those that a backward pass starts for one of the forward pass.

All operands are bf16. A kernel says what is computed, never how long that takes: `laws.time_s`.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix product [rows, inputs] x [inputs, outputs]."""

    rows: int
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class GroupedProduct:
    """Products of several groups in one kernel, [rows, inputs] x [inputs, outputs] each.

    Attributes:
        rows: Rows of each group.
        inputs: The same for all groups.
        outputs: The same for all groups.
        is_weight_gradient: The products are [inputs, rows] x [rows, outputs] instead.
    """

    rows: tuple[int, ...]
    inputs: int
    outputs: int
    is_weight_gradient: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention within documents, scores never in memory (FlashAttention).

    Attributes:
        lengths: Tokens of each document.
        heads: Query heads.
        head_size: Of queries, keys and values.
        window: Tokens that a query sees at most; 0: all before it.
        is_backward: Whether gradients are computed, of queries, keys and values.
    """

    lengths: tuple[int, ...]
    heads: int
    head_size: int
    window: int = 0
    is_backward: bool = False


class StreamKind(StrEnum):
    """Kernels whose time is that of memory traffic."""

    ADD = "add"
    ACTIVATION = "act"
    NORM = "norm"
    ROTARY = "rope"
    EMBEDDING = "emb"


@dataclass(frozen=True, slots=True)
class Stream:
    """A kernel that reads and writes so many bytes, and computes next to nothing."""

    kind: StreamKind
    num_bytes: int


Kernel = Product | GroupedProduct | Attention | Stream


def backward(kernel: Kernel) -> tuple[Kernel, ...]:
    """Return the kernels that compute the gradients of a kernel's operands.

    A product has two, of its rows and of its weights. What streams reads the gradient beside its
    operands: twice the bytes.
    """
    match kernel:
        case Product(rows, inputs, outputs):
            return Product(rows, outputs, inputs), Product(inputs, rows, outputs)
        case GroupedProduct(rows, inputs, outputs):
            of_weights = GroupedProduct(rows, inputs, outputs, is_weight_gradient=True)
            return GroupedProduct(rows, outputs, inputs), of_weights
        case Attention():
            return (replace(kernel, is_backward=True),)
        case Stream():
            return (replace(kernel, num_bytes=2 * kernel.num_bytes),)
