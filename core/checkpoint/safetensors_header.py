"""The header of a safetensors file: a length and a JSON document that places every tensor.

Bytes in, bytes out. Any safetensors reader reads these files; headers are checked as strictly as in
that library, so that a damaged header never places a tensor (ADR 32).
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_ALIGNMENT = 8
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
DTYPE_BYTES = _FLOATS | {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor as the header names it; `dtype` is one of DTYPE_BYTES."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTensor:
    """A tensor and the bytes [first_byte, end_byte) of the whole file that hold it."""

    spec: TensorSpec
    first_byte: int
    end_byte: int


def encode_header(tensors: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file whose tensors follow in this order, without gaps."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for tensor in tensors:
        assert tensor.name not in document, "each tensor once"
        end = at + tensor.size_bytes
        document[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_bytes(start: bytes, file_bytes: int) -> int:
    """The size of length field and header, from a file's first LENGTH_BYTES.

    Raises:
        ValueError: a file of `file_bytes` cannot have such a header.
    """
    size = LENGTH_BYTES + int.from_bytes(start[:LENGTH_BYTES], "little")
    if len(start) < LENGTH_BYTES or size > min(file_bytes, LENGTH_BYTES + MAX_HEADER_BYTES):
        raise ValueError(f"a file of {file_bytes} bytes has no header of {size} bytes")
    return size


def decode_header(data: bytes, file_bytes: int) -> tuple[PlacedTensor, ...]:
    """The tensors of a file of `file_bytes`, in the order of their bytes.

    Args:
        data: the length field and the header, or more of the file.
        file_bytes: the size of the file.

    Raises:
        ValueError: the header is invalid: repeated names, unknown dtypes, sizes that do not match
            the shape, gaps, overlaps or bytes left over.
    """
    first = header_bytes(data, file_bytes)
    try:
        document: Any = json.loads(data[LENGTH_BYTES:first], object_pairs_hook=_each_once)
        placed = [
            _place(name, entry, first) for name, entry in document.items() if name != "__metadata__"
        ]
    except (AttributeError, TypeError, KeyError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not a header of tensors: {error!r}") from None
    placed.sort(key=lambda tensor: (tensor.first_byte, tensor.end_byte))
    at = first
    for tensor in placed:
        if tensor.first_byte != at:
            raise ValueError(f"{tensor.spec.name} begins at byte {tensor.first_byte}, not at {at}")
        at = tensor.end_byte
    if at != file_bytes:
        raise ValueError(f"tensors end at byte {at} of {file_bytes}")
    return tuple(placed)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in the header")
    return found


def _place(name: str, entry: Any, first: int) -> PlacedTensor:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, begin, end]
    if dtype not in DTYPE_BYTES or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{name}: dtype {dtype}, shape {shape}, bytes {begin} to {end}")
    spec = TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
    if end - begin != spec.size_bytes:
        raise ValueError(f"{name}: {end - begin} bytes for {dtype} of shape {shape}")
    return PlacedTensor(spec=spec, first_byte=first + begin, end_byte=first + end)
