"""Processes that encode: results in order, errors and deaths."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pacekeeper.core.errors import DataError, HostError
from pacekeeper.trainer.data.tokenizing.blocks import Block
from pacekeeper.trainer.data.tokenizing.encoders import BYTES, ByteEncoder, EncoderSpec
from pacekeeper.trainer.data.tokenizing.workers import Encoded, encode_block, encode_in_processes

SPEC = EncoderSpec(BYTES)


def block(text: str, *, is_open: bool = False) -> Block:
    return Block(source="x", data=text.encode(), piece_sizes=(len(text),), is_open=is_open)


def tokens(encoded: Encoded) -> list[int]:
    return [int(token) for token in np.frombuffer(encoded.tokens, "<u2")]


def test_each_document_is_followed_by_its_end() -> None:
    two = Block(source="x", data=b"abc", piece_sizes=(2, 1))
    assert tokens(encode_block(ByteEncoder(), two, "uint16")) == [97, 98, 256, 99, 256]
    assert encode_block(ByteEncoder(), two, "uint16").num_documents == 2
    half = encode_block(ByteEncoder(), block("ab", is_open=True), "uint16")
    assert (tokens(half), half.num_documents) == ([97, 98], 0)


def test_a_block_without_documents_has_no_tokens() -> None:
    empty = Block(source="x", data=b"\n", field="text")
    assert encode_block(ByteEncoder(), empty, "uint32") == Encoded(b"", 0)


def test_tokens_have_the_bytes_of_the_dtype() -> None:
    assert encode_block(ByteEncoder(), block("a"), "uint32").tokens == b"a\0\0\0\0\1\0\0"


def test_a_token_out_of_the_vocabulary_is_an_error() -> None:
    encoder = ByteEncoder()
    encoder.vocab_size = 97
    with pytest.raises(DataError) as caught:
        encode_block(encoder, block("a"), "uint16")
    assert "97" in str(caught.value)


def test_results_come_in_order_from_several_processes() -> None:
    """Short blocks are done long before long ones."""
    texts = [str(number) * (1 if number % 3 else 50_000) for number in range(40)]
    found = list(encode_in_processes(SPEC, "uint16", ((block(t), t) for t in texts), 2))
    assert [label for _, label in found] == texts
    assert [tokens(one) for one, _ in found] == [[*text.encode(), 256] for text in texts]
    assert multiprocessing.active_children() == []


def test_errors_of_a_process_are_its_caller_s() -> None:
    wrong = Block(source="x", data=b"no", field="text", first_line=3)
    blocks = [(block("a"), None), (wrong, None), (block("b"), None)]
    with pytest.raises(DataError) as caught:
        list(encode_in_processes(SPEC, "uint16", blocks, 2))
    assert "x, line 3" in str(caught.value) and "--field" in caught.value.remedy
    assert multiprocessing.active_children() == []


def test_a_process_that_dies_ends_the_run() -> None:
    def blocks() -> Iterator[tuple[Block, None]]:
        yield block("a"), None
        for process in multiprocessing.active_children():
            os.kill(int(process.pid or 0), signal.SIGKILL)
        while True:
            yield block("b"), None

    with pytest.raises(HostError):
        for _ in encode_in_processes(SPEC, "uint16", blocks(), 2):
            pass
    assert multiprocessing.active_children() == []


def test_processes_load_what_the_specification_names(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    from support.tokenizers import write_tokenizer

    spec = EncoderSpec(str(write_tokenizer(tmp_path)))
    ((found, _),) = encode_in_processes(spec, "uint16", [(block("the"), None)], 2)
    assert tokens(found) == [31, 33]
