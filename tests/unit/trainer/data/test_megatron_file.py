"""Files of Megatron-LM: sequences, documents, and indexes that do not fit."""

import struct
from pathlib import Path

import numpy as np
import pytest

from pacekeeper.core.errors import DataError, HostError
from pacekeeper.trainer.data.megatron_file import open_megatron_file
from support.token_files import CODES, write_megatron

DOCUMENTS: list[list[list[int]]] = [[[1, 2], [3]], [[4, 5, 6]], [], [[]], [[7]], []]
SIZE = 34 + 5 * 4 + 5 * 8 + 7 * 8


@pytest.mark.parametrize("dtype", sorted(CODES))
def test_tokens_and_documents(tmp_path: Path, dtype: str) -> None:
    shard = open_megatron_file(write_megatron(tmp_path / "a.bin", DOCUMENTS, dtype))
    assert shard.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert shard.tokens.dtype == dtype
    assert shard.documents is not None
    assert shard.documents.num_documents == 6
    assert [shard.documents.start(number) for number in range(6)] == [0, 3, 6, 6, 6, 7]
    assert shard.documents.within(1, 7) == [3, 6, 6, 6]
    assert shard.documents.within(4, 6) == []
    shard.verify()


def test_a_row_marks_the_starts_of_documents(tmp_path: Path) -> None:
    shard = open_megatron_file(write_megatron(tmp_path / "a.bin", DOCUMENTS))
    tokens, is_start = np.empty(4, np.int64), np.zeros(4, np.bool_)
    shard.read(2, tokens, is_start)
    assert tokens.tolist() == [3, 4, 5, 6]
    assert is_start.tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("first", "data"),
    [
        (0, b"NNIDIDX"),
        (9, struct.pack("<Q", 2)),
        (17, b"\x06"),  # float64
        (17, b"\x09"),
        (18, struct.pack("<Q", 0)),
        (18, struct.pack("<Q", 4)),
        (18, struct.pack("<Q", 1 << 63)),
        (26, struct.pack("<Q", 0)),
        (26, struct.pack("<Q", 6)),
        (26, struct.pack("<Q", 1 << 62)),
        (34, struct.pack("<i", 3)),  # length of sequence 0
        (34, struct.pack("<ii", -1, 4)),
        (54, struct.pack("<q", 4)),  # first byte of sequence 0
        (94, struct.pack("<q", 1)),  # first sequence of document 0
        (102, struct.pack("<q", 9)),
        (SIZE - 8, struct.pack("<q", 6)),
    ],
)
def test_a_damaged_index_is_rejected(tmp_path: Path, first: int, data: bytes) -> None:
    path = write_megatron(tmp_path / "a.bin", DOCUMENTS)
    index = path.with_suffix(".idx")
    whole = index.read_bytes()
    assert len(whole) == SIZE
    index.write_bytes(whole[:first] + data + whole[first + len(data) :])
    with pytest.raises(DataError) as caught:
        open_megatron_file(path)
    assert str(index) in str(caught.value)


@pytest.mark.parametrize("change", [-SIZE, 20 - SIZE, -9, -1, 1, 5])
def test_an_index_of_another_size_is_rejected(tmp_path: Path, change: int) -> None:
    path = write_megatron(tmp_path / "a.bin", DOCUMENTS)
    index = path.with_suffix(".idx")
    index.write_bytes((index.read_bytes() + bytes(5))[: SIZE + change])
    with pytest.raises(DataError):
        open_megatron_file(path)


@pytest.mark.parametrize("size", [0, 24, 27, 32])
def test_tokens_of_another_size_are_rejected(tmp_path: Path, size: int) -> None:
    path = write_megatron(tmp_path / "a.bin", DOCUMENTS)
    path.write_bytes((path.read_bytes() + bytes(4))[:size])
    with pytest.raises(DataError):
        open_megatron_file(path)


def test_a_negative_token_is_rejected(tmp_path: Path) -> None:
    shard = open_megatron_file(write_megatron(tmp_path / "a.bin", [[[1, -2]]]))
    with pytest.raises(DataError):
        shard.verify()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a.bin", DOCUMENTS)
    path.unlink()
    with pytest.raises(HostError) as caught:
        open_megatron_file(path)
    assert str(path) in str(caught.value)
