"""Any text comes back from its tokens, document by document, from any kind of input."""

import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.errors import DataError
from pacekeeper.trainer.data.token_file import open_token_file
from pacekeeper.trainer.data.tokenizing import blocks, inputs
from pacekeeper.trainer.data.tokenizing.encoders import BYTES, EncoderSpec
from pacekeeper.trainer.data.tokenizing.inputs import find_inputs
from pacekeeper.trainer.data.tokenizing.tokenize import TokenizeOptions, tokenize

LINES = st.lists(st.text("ab \u00fc\U0001f600\r-", min_size=1, max_size=12), min_size=1, max_size=9)


def tokens_of(path: Path, block_bytes: int, **settings: str) -> list[int]:
    output = path.with_name("o.bin")
    options = TokenizeOptions(encoder=EncoderSpec(BYTES), overwrite=True)
    with (
        mock.patch.object(blocks, "BLOCK_BYTES", block_bytes),
        mock.patch("os.fsync"),  # what is durable is not looked at
        mock.patch.object(inputs, "BLOCK_BYTES", block_bytes),
    ):
        tokenize(find_inputs([path], **settings), output, options)
    shard = open_token_file(output)
    shard.verify()
    return [int(token) for token in shard.tokens]


@given(
    texts=st.lists(st.text(max_size=40), min_size=1, max_size=8).filter(any),
    block_bytes=st.integers(4, 50),
    is_packed=st.booleans(),
)
def test_json_lines(texts: list[str], block_bytes: int, is_packed: bool) -> None:
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl.gz" if is_packed else "a.jsonl")
        path.write_bytes(gzip.compress(data) if is_packed else data)
        expected = [token for text in texts if text for token in (*text.encode(), 256)]
        assert tokens_of(path, block_bytes) == expected


@given(documents=st.lists(LINES, min_size=1, max_size=5), block_bytes=st.integers(4, 50))
def test_separated_documents(documents: list[list[str]], block_bytes: int) -> None:
    texts = ["\n".join(line + "." for line in lines) for lines in documents]
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.txt")
        path.write_bytes("\n---\n".join(texts).encode())
        expected = [token for text in texts for token in (*text.encode(), 256)]
        assert tokens_of(path, block_bytes, separator="---") == expected
        whole = tokens_of(path, block_bytes)
        assert whole == [*path.read_bytes(), 256]


@given(data=st.binary(min_size=1, max_size=200), name=st.sampled_from(["a.jsonl", "a.txt.gz"]))
def test_garbage_makes_no_file(data: bytes, name: str) -> None:
    with TemporaryDirectory() as folder:
        Path(folder, name).write_bytes(data)
        try:
            tokens_of(Path(folder, name), 50)
        except DataError as error:
            assert folder in str(error) or "no text" in str(error)
            assert [path.name for path in Path(folder).iterdir()] == [name]
