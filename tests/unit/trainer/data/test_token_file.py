"""nanoGPT token files: what describes them, and files that are not what they seem."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacekeeper.core.errors import ConfigError, DataError, HostError
from pacekeeper.trainer.data.token_file import (
    TokenDtype,
    TokenFileInfo,
    info_path,
    open_token_file,
    read_info,
    smallest_dtype,
)
from pacekeeper.trainer.data.token_stream import open_tokens
from support.token_files import write_tokens

TOKENS = [1, 2, 99, 3, 99, 70]


def test_a_described_file(tmp_path: Path) -> None:
    shard = open_token_file(write_tokens(tmp_path / "a.bin", TOKENS))
    assert shard.tokens.tolist() == TOKENS
    assert not shard.tokens.flags.writeable
    assert (shard.vocab_size, shard.end_of_document, shard.tokenizer) == (100, 99, ("test", 1))
    shard.verify()


def test_the_description_reads_back(tmp_path: Path) -> None:
    info = TokenFileInfo(
        dtype="uint32", vocab_size=1 << 32, end_of_document=5, tokenizer="a\u00fc", num_tokens=7,
        tokenizer_crc32=(1 << 32) - 1, num_documents=2, crc32=0,
    )  # fmt: skip
    path = tmp_path / "a.bin"
    info_path(path).write_bytes(info.encode())
    assert read_info(path) == info


@pytest.mark.parametrize("name", ["", "none", "none.bin", "none.idx"])
def test_a_missing_file_is_called_missing(tmp_path: Path, name: str) -> None:
    with pytest.raises(HostError, match="no such file"):
        open_tokens([tmp_path / name if name else name])


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_file_without_description_needs_its_dtype(tmp_path: Path, dtype: TokenDtype) -> None:
    path = tmp_path / "a.bin"
    np.array(TOKENS, dtype=dtype).tofile(path)
    with pytest.raises(ConfigError) as caught:
        open_token_file(path)
    assert str(path) in str(caught.value) and "uint16" in caught.value.remedy
    shard = open_token_file(path, dtype=dtype, end_of_document=99)
    assert (shard.tokens.tolist(), shard.end_of_document) == (TOKENS, 99)
    assert shard.vocab_size is None
    shard.verify()


def test_what_is_stated_must_agree_with_the_description(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", TOKENS)
    assert open_token_file(path, dtype="uint16", end_of_document=99).tokens.tolist() == TOKENS
    with pytest.raises(ConfigError):
        open_token_file(path, dtype="uint32")
    with pytest.raises(ConfigError):
        open_token_file(path, end_of_document=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 5},
        {"num_tokens": 0},
        {"num_tokens": True},
        {"format": "pacekeeper-tokens-2"},
        {"dtype": "float32"},
        {"vocab_size": 0},
        {"end_of_document": 100},
        {"end_of_document": -1},
        {"tokenizer": None},
        {"more": 1},
    ],
)
def test_a_wrong_description_is_rejected(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write_tokens(tmp_path / "a.bin", TOKENS)
    file = info_path(path)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(DataError) as caught:
        open_token_file(path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "{", "null", "[" * 100_000, " " * 70_000 + "{}"])
def test_a_garbled_description_is_rejected(tmp_path: Path, text: str) -> None:
    path = write_tokens(tmp_path / "a.bin", TOKENS)
    info_path(path).write_text(text)
    with pytest.raises(DataError) as caught:
        open_token_file(path)
    assert str(info_path(path)) in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 11])
def test_an_empty_or_truncated_file_is_rejected(tmp_path: Path, size: int) -> None:
    for path in (write_tokens(tmp_path / "a.bin", TOKENS), tmp_path / "b.bin"):
        path.write_bytes((tmp_path / "a.bin").read_bytes()[:size])
        with pytest.raises(DataError) as caught:
            open_token_file(path, dtype="uint16")
        assert str(path) in str(caught.value)


def test_a_file_of_llm_c_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    header = np.zeros(256, dtype="<i4")
    header[:3] = (20240520, 1, 100)
    path.write_bytes(header.tobytes() + np.arange(100, dtype="<u2").tobytes())
    with pytest.raises(DataError):
        open_token_file(path, dtype="uint16")


def test_a_missing_file_and_a_folder_are_rejected(tmp_path: Path) -> None:
    for path in (tmp_path / "none.bin", tmp_path):
        with pytest.raises(HostError) as caught:
            open_token_file(path, dtype="uint16")
        assert str(path) in str(caught.value)


def test_a_changed_token_is_found_by_the_checksum(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", TOKENS)
    data = bytearray(path.read_bytes())
    data[0] ^= 4
    path.write_bytes(data)
    shard = open_token_file(path)
    with pytest.raises(DataError):
        shard.verify()


def test_a_token_out_of_the_vocabulary_is_found(tmp_path: Path) -> None:
    shard = open_token_file(write_tokens(tmp_path / "a.bin", [1, 2, 100, 3]))
    with pytest.raises(DataError) as caught:
        shard.verify()
    assert "token 2 is 100" in str(caught.value)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_the_smallest_dtype(vocab_size: int, dtype: str) -> None:
    assert smallest_dtype(vocab_size) == dtype
