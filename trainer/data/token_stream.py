"""Token files in order as one stream of tokens, and parts of it.

`open_tokens` is the entry: it recognises a file by its description or index, never by its content.
Rows are read by their first token; the stream knows nothing of steps, seeds or ranks.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.trainer.data.megatron_file import index_path, open_megatron_file
from pacekeeper.trainer.data.shard import Shard, check_vocabulary
from pacekeeper.trainer.data.token_file import TokenDtype, info_path, open_token_file


@dataclass(frozen=True, slots=True, eq=False)
class TokenStream:
    """Tokens [first, end) of shards in order.

    Attributes:
        shards: the files, at least one.
        bounds: int64 [shards + 1]; the first token of each shard, and their total.
        first: first token of this part.
        end: token after the last one of this part.
        vocab_size: tokens are below it; None: unknown.
    """

    shards: tuple[Shard, ...]
    bounds: NDArray[np.int64]
    first: int
    end: int
    vocab_size: int | None

    @property
    def num_tokens(self) -> int:
        """Tokens of this part."""
        return self.end - self.first

    def split(self, held_out: float) -> tuple["TokenStream", "TokenStream"]:
        """Divide into a part to train on and a held-out tail; they share no token.

        The cut may divide a document.

        Args:
            held_out: share of the tokens in the tail, above 0 and below 1.

        Raises:
            ConfigError: the share is outside these bounds, or one part would be empty.
        """
        num_held_out = round(self.num_tokens * held_out) if 0.0 < held_out < 1.0 else 0
        if not 0 < num_held_out < self.num_tokens:
            raise ConfigError(
                f"{held_out} of {self.num_tokens} tokens cannot be held out",
                remedy="give a share between 0 and 1 that leaves tokens in both parts",
            )
        cut = self.end - num_held_out
        return replace(self, end=cut), replace(self, first=cut)

    def read(
        self, starts: NDArray[np.int64], width: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Read rows of tokens.

        Args:
            starts: int64 [rows]; the first token of each row, from 0 in this part.
            width: tokens of a row; at most `num_tokens` - start.

        Returns:
            tokens: int64 [rows, width].
            is_start: bool [rows, width]; whether a document begins at the token. A row's first
                token counts as one, because nothing before it is read.

        Raises:
            DataError: a token is outside the vocabulary.
        """
        tokens = np.empty((len(starts), width), np.int64)
        is_start = np.zeros((len(starts), width), np.bool_)
        for row, start in enumerate((starts + self.first).tolist()):
            assert self.first <= start and start + width <= self.end
            number = int(np.searchsorted(self.bounds, start, side="right")) - 1
            place = 0
            while place < width:  # usually once: a row may cross the ends of shards
                begin = start + place - int(self.bounds[number])
                size = min(width - place, len(self.shards[number].tokens) - begin)
                part = slice(place, place + size)
                self.shards[number].read(begin, tokens[row, part], is_start[row, part])
                is_start[row, place] = True  # a shard begins with a document
                place, number = place + size, number + 1
        self._check(tokens, starts)
        return tokens, is_start

    def fingerprint(self) -> int:
        """A number that differs, most likely, for other files: ranks compare theirs.

        CRC-32 of sizes, dtypes, stored checksums and samples of all files, and of the part's
        bounds. It reads at most 2 MiB of each file.
        """
        text = f"{self.first} {self.end} {[shard.fingerprint() for shard in self.shards]}"
        return zlib.crc32(text.encode())

    def _check(self, tokens: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        limit = self.vocab_size if self.vocab_size is not None else np.iinfo(np.int64).max
        if not tokens.size or (tokens.max() < limit and tokens.min() >= 0):
            return
        row, place = np.argwhere((tokens < 0) | (tokens >= limit))[0]
        at = int(starts[row]) + self.first + int(place)
        number = int(np.searchsorted(self.bounds, at, side="right")) - 1
        path, first = self.shards[number].path, at - int(self.bounds[number])
        check_vocabulary(tokens[row, place : place + 1], self.vocab_size, path, first)


def open_tokens(
    paths: Sequence[Path | str],
    *,
    dtype: TokenDtype | None = None,
    end_of_document: int | None = None,
    vocab_size: int | None = None,
) -> TokenStream:
    """Open token files as one stream, in the given order.

    Args:
        paths: `FILE.bin` with `FILE.bin.json` (written by `pacekeeper data tokenize`), or with
            `FILE.idx` (Megatron-LM; the path of the `.idx` file and the prefix are accepted, too),
            or alone (nanoGPT), where `dtype` is required.
        dtype: of files without description.
        end_of_document: token that ends documents in files without description and index.
        vocab_size: of the model; None: not checked.

    Raises:
        ConfigError: no files are given, the kind of one is unknown, or they do not fit together or
            the model.
        DataError: a file is empty, damaged, truncated or foreign.
        HostError: a file cannot be read.
    """
    if not paths:
        raise ConfigError("no token files are given", remedy="give at least one")
    shards = tuple(_open(Path(path), dtype, end_of_document) for path in paths)
    _check_together(shards, vocab_size)
    sizes = [shard.vocab_size for shard in shards if shard.vocab_size is not None]
    bounds = np.cumsum([0, *(len(shard.tokens) for shard in shards)], dtype=np.int64)
    return TokenStream(
        shards=shards,
        bounds=bounds,
        first=0,
        end=int(bounds[-1]),
        vocab_size=sizes[0] if len(sizes) == len(shards) else vocab_size,
    )


def _open(path: Path, dtype: TokenDtype | None, end_of_document: int | None) -> Shard:
    if not path.name:  # of "", which is the current directory
        raise HostError(f"cannot read {path}: no such file")
    binary = path.with_suffix(".bin") if path.suffix == ".idx" else path
    if (
        binary.suffix != ".bin"
        and index_path(prefixed := path.with_name(f"{path.name}.bin")).exists()
    ):
        binary = prefixed
    if not index_path(binary).exists():
        return open_token_file(binary, dtype=dtype, end_of_document=end_of_document)
    if info_path(binary).exists():
        raise ConfigError(
            f"{binary}: both {index_path(binary).name} and {info_path(binary).name} describe it",
            remedy="remove the one that belongs to another file",
        )
    return open_megatron_file(binary)


def _check_together(shards: Sequence[Shard], vocab_size: int | None) -> None:
    """Raise ConfigError for files of different tokenizers, or of a larger vocabulary."""
    described = [shard for shard in shards if shard.tokenizer is not None]
    for shard in described:
        first = described[0]
        for name in ("tokenizer", "vocab_size", "end_of_document"):
            if getattr(shard, name) != getattr(first, name):
                raise ConfigError(
                    f"{shard.path}: {name} {getattr(shard, name)}, but {first.path} has "
                    f"{getattr(first, name)}",
                    remedy="tokenize all files with one tokenizer",
                )
        if (
            vocab_size is not None
            and shard.vocab_size is not None
            and shard.vocab_size > vocab_size
        ):
            raise ConfigError(
                f"{shard.path}: its vocabulary has {shard.vocab_size} tokens, the model's "
                f"{vocab_size}",
                remedy="tokenize with the model's own tokenizer",
            )
