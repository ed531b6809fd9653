"""Files with changed, lost or added bytes: one clear error, or data that is still the same."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from pacekeeper.core.errors import ConfigError, DataError, HostError
from pacekeeper.trainer.data.token_stream import open_tokens
from support.token_files import write_megatron, write_tokens

TOKENS = [*range(20), 99, *range(30), 99, 4, 5]
DOCUMENTS: list[list[list[int]]] = [[[1, 2, 3], [4]], [], [[5] * 20, []], [[7, 8]]]


def damaged(data: bytes, draw: st.DataObject) -> bytes:
    """The data, truncated, longer or with bytes changed."""
    kind = draw.draw(st.sampled_from(["cut", "grow", "flip", "flip", "replace"]))
    if kind == "cut":
        return data[: draw.draw(st.integers(0, len(data) - 1))]
    if kind == "grow":
        return data + draw.draw(st.binary(min_size=1, max_size=20))
    if kind == "replace":
        return draw.draw(st.binary(max_size=100))
    changed = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        changed[draw.draw(st.integers(0, len(data) - 1))] ^= draw.draw(st.integers(1, 255))
    return bytes(changed)


@given(draw=st.data())
def test_a_described_file(draw: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = write_tokens(Path(folder, "a.bin"), TOKENS)
        target = draw.draw(st.sampled_from([path, Path(folder, "a.bin.json")]))
        target.write_bytes(damaged(target.read_bytes(), draw))
        try:
            stream = open_tokens([path])
            stream.shards[0].verify()
            tokens, _ = stream.read(np.array([0]), stream.num_tokens)
        except (ConfigError, DataError) as error:
            assert folder in str(error)
        else:
            assert tokens.tolist() == [TOKENS]


@given(draw=st.data())
def test_an_index(draw: st.DataObject) -> None:
    """It has no checksum: bounds of documents may change within what is possible."""
    with TemporaryDirectory() as folder:
        path = write_megatron(Path(folder, "a.bin"), DOCUMENTS)
        expected = open_tokens([path]).read(np.array([0]), 26)[0]
        index = path.with_suffix(".idx")
        before = index.read_bytes()
        after = damaged(before, draw)
        assume(before[17:18] == after[17:18])  # another dtype of the same size is another content
        index.write_bytes(after)
        try:
            stream = open_tokens([path])
            tokens, is_start = stream.read(np.array([0]), stream.num_tokens)
        except DataError as error:
            assert folder in str(error)
        else:
            assert (tokens == expected).all()
            assert is_start[0, 0]


@given(draw=st.data())
def test_tokens_of_megatron(draw: st.DataObject) -> None:
    """Without checksum only the size and the vocabulary can be wrong."""
    with TemporaryDirectory() as folder:
        path = write_megatron(Path(folder, "a.bin"), DOCUMENTS)
        path.write_bytes(damaged(path.read_bytes(), draw))
        try:
            stream = open_tokens([path], vocab_size=100)
            tokens, _ = stream.read(np.array([0]), stream.num_tokens)
        except DataError as error:
            assert folder in str(error)
        else:
            assert tokens.shape == (1, 26)
            assert ((tokens >= 0) & (tokens < 100)).all()


@given(data=st.binary(max_size=3000))
def test_garbage(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        for name in ("a.idx", "a.bin"):
            Path(folder, name).write_bytes(data)
        try:
            open_tokens([Path(folder, "a.bin")])
        except (DataError, HostError) as error:
            assert folder in str(error)
        else:
            raise AssertionError("opened")
