"""Encoding of blocks in several processes, with results in the order of the blocks.

A process ends with its parent, so none outlives a killed one.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pacekeeper.core.errors import DataError, HostError
from pacekeeper.trainer.data.tokenizing.blocks import Block
from pacekeeper.trainer.data.tokenizing.encoders import Encoder, EncoderSpec

T = TypeVar("T")
_WAITING = 4  # blocks per process that are encoded, or wait for an earlier one
_encoders: list[Encoder] = []  # in a process that encodes: its own


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a block in the dtype of the file, and how many documents end in it."""

    tokens: bytes
    num_documents: int


def encode_block(encoder: Encoder, block: Block, dtype: str) -> Encoded:
    """Encode one block.

    Args:
        encoder: makes the tokens.
        block: text.
        dtype: of the file, with room for the vocabulary.

    Raises:
        DataError: the text is not what it should be, or a token is outside the vocabulary.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    pieces = list(block.pieces())
    try:
        found = encoder.encode([piece for piece, _ in pieces])
    except DataError as error:
        raise DataError(f"{block.source}: {error.what}", remedy=error.remedy) from None
    end = np.array([encoder.end_of_document], dtype=kind)
    parts = [np.empty(0, kind)]
    for tokens, (_, is_end) in zip(found, pieces, strict=True):
        if len(tokens) and int(tokens.max()) >= encoder.vocab_size:
            raise DataError(
                f"{block.source}: the tokenizer gave token {tokens.max()}, and its vocabulary has "
                f"{encoder.vocab_size}"
            )
        parts += [tokens.astype(kind), end] if is_end else [tokens.astype(kind)]
    return Encoded(np.concatenate(parts).tobytes(), sum(is_end for _, is_end in pieces))


def encode_in_processes(
    spec: EncoderSpec, dtype: str, blocks: Iterable[tuple[Block, T]], num_processes: int
) -> Generator[tuple[Encoded, T]]:
    """Encode blocks and yield results in their order, each with what came with its block.

    Args:
        spec: the encoder, loaded by each process.
        dtype: of the file.
        blocks: read as processes become free.
        num_processes: that encode.

    Raises:
        DataError: a block is invalid.
        HostError: a process died.
    """
    pending = deque[tuple[Future[Encoded], T]]()
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_processes, context, _begin, (spec,))
    try:
        for block, label in blocks:
            pending.append((pool.submit(_encode, block, dtype), label))
            while len(pending) >= _WAITING * num_processes or (pending and pending[0][0].done()):
                future, label = pending.popleft()
                yield future.result(), label
        for future, label in pending:
            yield future.result(), label
    except BrokenProcessPool:
        raise HostError(
            "a process that encodes text died, perhaps for lack of memory",
            remedy="use fewer --processes",
        ) from None
    finally:
        for process in list(pool._processes.values()):  # the pool may wait for one for ever
            process.kill()
        pool.shutdown(cancel_futures=True)


def _begin(spec: EncoderSpec) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _encoders.append(spec.load())


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "spawned"
    parent.join()
    os._exit(1)


def _encode(block: Block, dtype: str) -> Encoded:
    return encode_block(_encoders[0], block, dtype)
