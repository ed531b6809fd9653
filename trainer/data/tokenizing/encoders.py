"""Encoders: bytes of text to tokens.

Built in is one token per byte. Others are the `tokenizer.json` of a Hugging Face folder, read by
the package tokenizers: a file of data, from which no code runs. Folders that name code of their own
are rejected.
"""

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pacekeeper.core.errors import ConfigError, DataError, HostError

BYTES = "bytes"


class Encoder(Protocol):
    """Makes tokens of text."""

    name: str
    crc32: int  # of what defines the tokens
    vocab_size: int
    end_of_document: int

    def encode(self, pieces: Sequence[bytes]) -> list[NDArray[np.integer]]:
        """Return the tokens of each piece of text. Raises DataError for bytes that are no UTF-8."""


class ByteEncoder:
    """One token per byte; token 256 ends a document."""

    name = BYTES
    crc32 = zlib.crc32(b"bytes 256")
    vocab_size = 257
    end_of_document = 256

    def encode(self, pieces: Sequence[bytes]) -> list[NDArray[np.integer]]:
        """One token per byte, valid UTF-8 or not."""
        return [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]


class HuggingFaceEncoder:
    """Encodes with a `tokenizer.json`; text never becomes one of its special tokens.

    Args:
        path: a folder with `tokenizer.json`, or such a file.
        end_of_document: a special token; None: the `eos_token` of its `tokenizer_config.json`.

    Raises:
        ConfigError: there is no tokenizer, it needs code of its own, or has no such token.
        DataError: its files are damaged.
        HostError: its files cannot be read.
        ModuleNotFoundError: the package tokenizers is not installed.
    """

    def __init__(self, path: Path, end_of_document: str | None) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        settings = _read_settings(file.with_name("tokenizer_config.json"))
        if "AutoTokenizer" in (settings.get("auto_map") or {}):
            raise ConfigError(
                f"{path}: this tokenizer runs code of its own (auto_map), which is never loaded",
                remedy="use a tokenizer that is a tokenizer.json alone",
            )
        data = _read_tokenizer(file)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes share the work
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(data.decode())
        except Exception as error:  # the package raises no other class
            raise DataError(f"{file}: no tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # as text, like any other characters
        self.name = file.resolve().parent.name
        self.crc32 = zlib.crc32(data)
        self.vocab_size = (
            max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        self.end_of_document = self._special_token(path, end_of_document or _eos_token(settings))

    def encode(self, pieces: Sequence[bytes]) -> list[NDArray[np.integer]]:
        """The tokenizer's tokens, without the special ones that it would add."""
        texts = [_decode(piece) for piece in pieces]
        try:
            found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # as above
            raise DataError(
                f"the tokenizer {self.name} fails: {error}", remedy="repair its tokenizer.json"
            ) from None
        return [np.array(one.ids, dtype=np.uint32) for one in found]

    def _special_token(self, path: Path, token: str | None) -> int:
        if token is None:
            raise ConfigError(
                f"{path}: its settings name no end-of-sequence token",
                remedy="name the token that ends documents with --end-of-document",
            )
        number: int | None = self._tokenizer.token_to_id(token)
        added = self._tokenizer.get_added_tokens_decoder()
        if number is None or number not in added or not added[number].special:
            special = [one.content for one in added.values() if one.special]
            raise ConfigError(
                f"{path}: {token!r} is no special token, and text could contain it",
                remedy=f"choose one with --end-of-document: {', '.join(special) or 'it has none'}",
            )
        return number


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """A tokenizer by name or path, so that each process loads the same encoder.

    Attributes:
        tokenizer: BYTES, or the path of a tokenizer.
        end_of_document: see `HuggingFaceEncoder`; not for BYTES.
    """

    tokenizer: str
    end_of_document: str | None = None

    def load(self) -> Encoder:
        """Load the encoder. Raises what `HuggingFaceEncoder` raises."""
        if self.tokenizer != BYTES:
            return HuggingFaceEncoder(Path(self.tokenizer), self.end_of_document)
        if self.end_of_document is not None:
            raise ConfigError(
                f"the tokenizer {BYTES!r} ends documents with token 256",
                remedy="leave --end-of-document out",
            )
        return ByteEncoder()


def _read_tokenizer(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {file}",
            remedy="save the tokenizer with transformers' save_pretrained, which writes "
            f"tokenizer.json, or use the built-in one: --tokenizer {BYTES}",
        ) from None
    except OSError as error:
        raise HostError(f"cannot read {file}: {error.strerror}") from None


def _read_settings(file: Path) -> dict[str, Any]:
    """The content of a `tokenizer_config.json`; empty where there is none."""
    try:
        settings = json.loads(file.read_bytes())
        if not isinstance(settings, dict):
            raise ValueError("expected a JSON object")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise HostError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: {error}") from None
    return settings


def _eos_token(settings: dict[str, Any]) -> str | None:
    token = settings.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _decode(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        before = piece[max(error.start - 40, 0) : error.start].decode(errors="replace")
        raise DataError(
            f"not UTF-8 ({error.reason}) after {before!r}",
            remedy=f"convert the file, or use --tokenizer {BYTES}",
        ) from None
