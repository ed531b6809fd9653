"""Token files for tests, written from the formats' descriptions and not by the product."""

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_tokens(path: Path, tokens: Sequence[int], **changes: Any) -> Path:
    """A nanoGPT file with its description; `changes` replace entries of the description."""
    info: dict[str, Any] = {
        "format": "pacekeeper-tokens-1",
        "dtype": "uint16",
        "vocab_size": 100,
        "end_of_document": 99,
        "tokenizer": "test",
        "tokenizer_crc32": 1,
        "num_tokens": len(tokens),
        "num_documents": max(list(tokens).count(99), 1),
    } | changes
    data = np.asarray(tokens, dtype=np.dtype(info["dtype"]).newbyteorder("<")).tobytes()
    path.write_bytes(data)
    info = {"crc32": zlib.crc32(data)} | info
    path.with_name(path.name + ".json").write_text(json.dumps(info))
    return path


def write_megatron(
    path: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "int32"
) -> Path:
    """A Megatron-LM file: documents of sequences of tokens; the path of its `.bin` file."""
    sequences = [sequence for document in documents for sequence in document]
    kind = np.dtype(dtype).newbyteorder("<")
    path.write_bytes(b"".join(np.asarray(s, dtype=kind).tobytes() for s in sequences))
    lengths = [len(sequence) for sequence in sequences]
    pointers = np.cumsum([0, *lengths])[:-1] * kind.itemsize
    bounds = np.cumsum([0, *map(len, documents)])
    header = struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(bounds))
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + header
        + np.asarray(lengths, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + bounds.astype("<i8").tobytes()
    )
    return path
