"""Shards as one stream: order, documents across them, parts, and files that do not fit together."""

from pathlib import Path

import numpy as np
import pytest

from pacekeeper.core.errors import ConfigError, DataError, HostError
from pacekeeper.trainer.data.token_stream import TokenStream, open_tokens
from support.token_files import write_megatron, write_tokens


@pytest.fixture
def stream(tmp_path: Path) -> TokenStream:
    """Tokens 0 to 9, with documents that begin at 0, 3 (both by tokens), 5, 8 and 9."""
    return open_tokens(
        [
            write_tokens(tmp_path / "a.bin", [0, 1, 99, 3, 4]),
            write_megatron(tmp_path / "b.bin", [[[5, 6, 7]], [[8]]]),
            write_tokens(tmp_path / "c.bin", [9]),
        ]
    )


def test_rows_cross_the_ends_of_shards(stream: TokenStream) -> None:
    assert stream.num_tokens == 10
    tokens, is_start = stream.read(np.array([1, 0, 3]), 7)
    assert tokens.tolist() == [
        [1, 99, 3, 4, 5, 6, 7],
        [0, 1, 99, 3, 4, 5, 6],
        [3, 4, 5, 6, 7, 8, 9],
    ]
    assert [np.flatnonzero(row).tolist() for row in is_start] == [
        [0, 2, 4],
        [0, 3, 5],
        [0, 2, 5, 6],
    ]


def test_no_rows(stream: TokenStream) -> None:
    tokens, is_start = stream.read(np.array([], dtype=np.int64), 7)
    assert tokens.shape == is_start.shape == (0, 7)


def test_a_held_out_tail_shares_no_token(stream: TokenStream) -> None:
    train, held_out = stream.split(0.3)
    assert (train.num_tokens, held_out.num_tokens) == (7, 3)
    assert train.read(np.array([0]), 7)[0].tolist() == [[0, 1, 99, 3, 4, 5, 6]]
    tokens, is_start = held_out.read(np.array([0]), 3)
    assert tokens.tolist() == [[7, 8, 9]]
    assert is_start.tolist() == [[True, True, True]]
    assert len({part.fingerprint() for part in (stream, train, held_out)}) == 3


@pytest.mark.parametrize("share", [-0.1, 0.0, 1.0, 2.0, 0.01, 0.99, float("nan")])
def test_a_tail_of_nothing_or_all_is_rejected(stream: TokenStream, share: float) -> None:
    with pytest.raises(ConfigError):
        stream.split(share)


def test_the_first_token_out_of_the_vocabulary_is_named(tmp_path: Path) -> None:
    paths = [
        write_tokens(tmp_path / "a.bin", [0, 1, 2]),
        write_tokens(tmp_path / "b.bin", [3, 4, 100, 101]),
    ]
    stream = open_tokens(paths)
    assert stream.read(np.array([1]), 4)[0].tolist() == [[1, 2, 3, 4]]
    with pytest.raises(DataError) as caught:
        stream.read(np.array([0, 3]), 4)
    assert str(paths[1]) in str(caught.value) and "token 2 is 100" in str(caught.value)


def test_the_vocabulary_of_the_model_bounds_files_that_do_not_state_theirs(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a.bin", [[[0, 1, 300]]])
    assert open_tokens([path]).read(np.array([0]), 3)[0].tolist() == [[0, 1, 300]]
    assert open_tokens([path], vocab_size=301).vocab_size == 301
    with pytest.raises(DataError):
        open_tokens([path], vocab_size=300).read(np.array([0]), 3)


def test_a_vocabulary_larger_than_the_model_s_is_rejected(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", [1, 2])
    assert open_tokens([path], vocab_size=128).vocab_size == 100
    with pytest.raises(ConfigError):
        open_tokens([path], vocab_size=99)


@pytest.mark.parametrize(
    "changes", [{"tokenizer_crc32": 2}, {"end_of_document": 98}, {"vocab_size": 101}]
)
def test_files_of_different_tokenizers_are_rejected(
    tmp_path: Path, changes: dict[str, int]
) -> None:
    paths = [
        write_tokens(tmp_path / "a.bin", [1, 2]),
        write_tokens(tmp_path / "b.bin", [1, 2], **changes),
    ]
    with pytest.raises(ConfigError) as caught:
        open_tokens(paths)
    assert all(str(path) in str(caught.value) for path in paths)


def test_a_megatron_file_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a_text_document.bin", [[[1, 2, 3]]])
    for name in (path, path.with_suffix(".idx"), path.with_suffix("")):
        assert open_tokens([name]).num_tokens == 3


def test_what_lies_beside_a_file_must_be_clear(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a.bin", [[[1, 2, 3]]])
    write_tokens(path, [1, 2, 3])
    with pytest.raises(ConfigError):
        open_tokens([path])


def test_no_files_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_tokens([])
    with pytest.raises(HostError):
        open_tokens([tmp_path / "none.idx"], dtype="uint16")


def test_fingerprints_tell_files_apart(tmp_path: Path) -> None:
    first = write_tokens(tmp_path / "a.bin", [1, 2, 3])
    same = write_tokens(tmp_path / "b.bin", [1, 2, 3])
    other = write_tokens(tmp_path / "c.bin", [1, 2, 4])
    bare = tmp_path / "d.bin"
    bare.write_bytes(first.read_bytes())
    found = [open_tokens([path]).fingerprint() for path in (first, same, other)]
    assert found[0] == found[1] != found[2]
    assert open_tokens([bare], dtype="uint16").fingerprint() not in found
