"""Token files of Megatron-LM: tokens in `PREFIX.bin`, sequences and documents in `PREFIX.idx`.

The index (megatron/core/datasets/indexed_dataset.py, version 1): b"MMIDIDX\\0\\0", uint64 version,
uint8 code of the dtype, uint64 numbers of sequences s and of document bounds d, int32 [s] lengths,
int64 [s] first bytes, int64 [d] first sequences of documents and s. Multimodal files have int8 [s]
modes after that and are rejected.
"""

import struct
from pathlib import Path

import numpy as np

from pacekeeper.core.errors import DataError, HostError
from pacekeeper.trainer.data.shard import DocumentIndex, Shard, Tokens, map_file

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
_CHUNK = 1 << 20


def index_path(path: Path) -> Path:
    """The path of the index of a Megatron file."""
    return path.with_suffix(".idx")


def open_megatron_file(path: Path) -> Shard:
    """Open a Megatron file and check its index against its tokens.

    Args:
        path: the `.bin` file; the `.idx` file is in the same folder.

    Raises:
        DataError: one of the files is damaged, truncated, foreign or empty.
        HostError: one of them cannot be read.
    """
    file = index_path(path)
    dtype, num_sequences, num_bounds = _read_header(file)
    offset = _HEADER.size
    lengths = map_file(file, "<i4", offset=offset, count=num_sequences)
    offset += lengths.nbytes
    pointers = map_file(file, "<i8", offset=offset, count=num_sequences)
    offset += pointers.nbytes
    bounds = map_file(file, "<i8", offset=offset, count=num_bounds)
    offset += bounds.nbytes
    if (size := file.stat().st_size) != offset:
        raise DataError(
            f"{file}: {size} bytes, expected {offset}",
            remedy="only text is read: a file with modes of sequences is multimodal",
        )
    tokens = map_file(path, dtype)
    _check_sequences(file, lengths, pointers, tokens)
    _check_bounds(file, bounds, num_sequences)

    def start(document: int) -> int:
        sequence = int(bounds[document])  # that of an empty document at the end does not exist
        size = int(pointers[sequence]) if sequence < num_sequences else tokens.nbytes
        return size // tokens.itemsize

    return Shard(
        path=path,
        tokens=tokens,
        documents=DocumentIndex(num_documents=num_bounds - 1, start=start),
    )


def _read_header(file: Path) -> tuple[str, int, int]:
    """Return dtype of the tokens, number of sequences and number of document bounds."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_HEADER.size)
    except OSError as error:
        raise HostError(f"cannot read {file}: {error.strerror}") from None
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise DataError(
            f"{file}: begins with {data[:9]!r}, expected {_MAGIC!r}",
            remedy="it is no index of Megatron-LM, or truncated",
        )
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(data)
    if version != 1 or code not in _DTYPES:
        raise DataError(
            f"{file}: version {version}, dtype code {code}; expected version 1 and "
            f"an integer dtype ({', '.join(map(str, _DTYPES))})"
        )
    if num_sequences == 0:
        raise DataError(f"{file}: has no sequences")
    return _DTYPES[code], num_sequences, num_bounds


def _check_sequences(file: Path, lengths: Tokens, pointers: Tokens, tokens: Tokens) -> None:
    """Raise DataError unless sequences follow each other from the first to the last token."""
    expected = 0
    for first in range(0, len(lengths), _CHUNK):
        sizes = lengths[first : first + _CHUNK].astype(np.int64) * tokens.itemsize
        begins = expected + np.cumsum(sizes) - sizes
        wrong = np.flatnonzero((pointers[first : first + _CHUNK] != begins) | (sizes < 0))
        if len(wrong):
            raise DataError(
                f"{file}: damaged: sequence {first + wrong[0]} does not begin where the one "
                "before it ends",
                remedy="copy the file again",
            )
        expected = int(begins[-1] + sizes[-1])
    if expected != tokens.nbytes:
        raise DataError(
            f"{file}: its sequences have {expected} bytes, the .bin file has {tokens.nbytes}",
            remedy="one of the two files is truncated or of another run: copy both again",
        )


def _check_bounds(file: Path, bounds: Tokens, num_sequences: int) -> None:
    """Raise DataError unless document bounds ascend from 0 to the number of sequences."""
    is_valid = len(bounds) >= 2 and bounds[0] == 0 and bounds[-1] == num_sequences
    for first in range(0, len(bounds) - 1, _CHUNK):
        part = bounds[first : first + _CHUNK + 1]
        is_valid = is_valid and bool((part[1:] >= part[:-1]).all())
    if not is_valid:
        raise DataError(
            f"{file}: damaged: the bounds of documents do not ascend from 0 to {num_sequences}",
            remedy="copy the file again",
        )
