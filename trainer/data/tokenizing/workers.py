"""Encoding of blocks in several processes, with results in the order of the blocks.

A process gets one block at a time over a pipe of its own and ends with it, so none outlives a
killed parent. Only bytes go over the pipes.
"""

import multiprocessing
import signal
import struct
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TypeVar

import numpy as np

from pacekeeper.core.errors import DataError, HostError
from pacekeeper.trainer.data.tokenizing.blocks import Block
from pacekeeper.trainer.data.tokenizing.encoders import Encoder, EncoderSpec

T = TypeVar("T")
_HEAD = struct.Struct("<?Q")  # is valid, documents
_WAITING = 4  # results per process that wait for an earlier block


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
    context = multiprocessing.get_context("spawn")
    processes, idle = [], []
    try:
        for _ in range(num_processes):
            own, other = context.Pipe()
            process = context.Process(target=_serve, args=(other, spec, dtype), daemon=True)
            process.start()
            other.close()
            processes.append(process)
            idle.append(own)
        yield from _exchange(idle, blocks)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _exchange(
    idle: list[Connection], blocks: Iterable[tuple[Block, T]]
) -> Iterator[tuple[Encoded, T]]:
    """Give blocks to idle processes; yield results in order, and wait for the earliest."""
    limit = _WAITING * len(idle)
    busy: dict[Connection, int] = {}
    labels: dict[int, T] = {}
    results: dict[int, Encoded] = {}
    done = 0
    for number, (block, label) in enumerate(blocks):
        labels[number] = label
        while not idle or number - done >= limit:
            _receive(busy, idle, results)
            while done in results:
                yield results.pop(done), labels.pop(done)
                done += 1
        connection = idle.pop()
        try:
            connection.send_bytes(block.encode())
        except OSError:
            raise _process_died() from None
        busy[connection] = number
    while busy:
        _receive(busy, idle, results)
    for number in sorted(results):
        yield results[number], labels[number]


def _receive(
    busy: dict[Connection, int], idle: list[Connection], results: dict[int, Encoded]
) -> None:
    """Wait for results and take those that are there."""
    for connection in wait(list(busy)):
        assert isinstance(connection, Connection)
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            raise _process_died() from None
        is_valid, num_documents = _HEAD.unpack_from(message)
        if not is_valid:
            what, _, remedy = message[_HEAD.size :].decode().partition("\0")
            raise DataError(what, remedy=remedy)
        results[busy.pop(connection)] = Encoded(message[_HEAD.size :], num_documents)
        idle.append(connection)


def _process_died() -> HostError:
    return HostError(
        "a process that encodes text died, perhaps for lack of memory",
        remedy="use fewer --processes",
    )


def _serve(connection: Connection, spec: EncoderSpec, dtype: str) -> None:
    """Encode blocks until the other side closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    encoder = spec.load()
    while True:
        try:
            block = Block.decode(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            encoded = encode_block(encoder, block, dtype)
            message = _HEAD.pack(True, encoded.num_documents) + encoded.tokens
        except DataError as error:
            message = _HEAD.pack(False, 0) + f"{error.what}\0{error.remedy}".encode()
        try:
            connection.send_bytes(message)
        except OSError:
            return
