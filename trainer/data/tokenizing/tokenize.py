"""Tokenizing of inputs into one token file, in the order in which they are given."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.trainer.data.token_file import TokenDtype, TokenFileInfo, smallest_dtype
from pacekeeper.trainer.data.tokenizing.blocks import BLOCK_BYTES, Block
from pacekeeper.trainer.data.tokenizing.encoders import EncoderSpec
from pacekeeper.trainer.data.tokenizing.inputs import Input
from pacekeeper.trainer.data.tokenizing.workers import encode_block, encode_in_processes
from pacekeeper.trainer.data.tokenizing.writer import TokenFileWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeOptions:
    """How a token file is made.

    Attributes:
        encoder: the tokenizer.
        dtype: of the tokens; None: the smallest with room for the vocabulary.
        num_processes: that encode, at most; short inputs need fewer. The file is the same.
        overwrite: replace the file.
    """

    encoder: EncoderSpec
    dtype: TokenDtype | None = None
    num_processes: int = 1
    overwrite: bool = False


def tokenize(
    inputs: Sequence[Input],
    output: Path,
    options: TokenizeOptions,
    on_progress: Callable[[int], None] = lambda _: None,
) -> TokenFileInfo:
    """Write the token file `output` and its description.

    Args:
        inputs: what is read, in order.
        output: the file; an end-of-document token follows each document.
        options: how.
        on_progress: called with the stored bytes of the inputs that are done.

    Returns:
        The description of the file.

    Raises:
        ConfigError: options do not fit together, or the file exists.
        DataError: an input is invalid, or there is no text.
        HostError: something cannot be read or written, or a process died.
    """
    encoder = options.encoder.load()
    dtype = options.dtype or smallest_dtype(encoder.vocab_size)
    if encoder.vocab_size - 1 > np.iinfo(dtype).max:
        raise ConfigError(
            f"{dtype} has no room for a vocabulary of {encoder.vocab_size} tokens",
            remedy=f"choose {smallest_dtype(encoder.vocab_size)}",
        )
    if output.suffix != ".bin":
        raise ConfigError(f"{output}: no name of a token file", remedy="let it end in .bin")
    for one in inputs:
        if output.exists() and one.path.samefile(output):
            raise ConfigError(f"{output} is an input", remedy="choose another --out")
    size_bytes = sum(one.size_bytes for one in inputs)
    num_processes = options.num_processes
    if size_bytes:  # a pipe's is unknown
        num_processes = min(num_processes, size_bytes // BLOCK_BYTES + 1)
    num_bytes = num_documents = 0
    with TokenFileWriter(output, overwrite=options.overwrite) as writer:
        blocks = _all_blocks(inputs)
        if num_processes == 1:
            results = ((encode_block(encoder, block, dtype), done) for block, done in blocks)
        else:
            results = encode_in_processes(options.encoder, dtype, blocks, num_processes)
        with closing(results):
            for encoded, done_bytes in results:
                writer.write(encoded.tokens)
                num_bytes += len(encoded.tokens)
                num_documents += encoded.num_documents
                on_progress(done_bytes)
        if not num_documents:
            raise DataError("the inputs have no text", remedy="look at the files")
        info = TokenFileInfo(
            dtype=dtype,
            vocab_size=encoder.vocab_size,
            end_of_document=encoder.end_of_document,
            tokenizer=encoder.name,
            tokenizer_crc32=encoder.crc32,
            num_tokens=num_bytes // np.dtype(dtype).itemsize,
            num_documents=num_documents,
            crc32=writer.crc32,
        )
        writer.finish(info)
    return info


def _all_blocks(inputs: Sequence[Input]) -> Generator[tuple[Block, int]]:
    """Yield the blocks of all inputs, each with the bytes that are read so far."""
    before = 0
    for one in inputs:
        for block, done_bytes in one.blocks():
            yield block, before + done_bytes
        before += one.size_bytes
