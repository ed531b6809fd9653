"""Token files as nanoGPT writes them: `FILE.bin`, flat little-endian tokens without a header.

What the tokens are stands in `FILE.bin.json`, which `pacekeeper data tokenize` writes. A file
without it is opened with the dtype that the caller states; nothing is guessed from the content.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import Field

from pacekeeper.core.config.loader import read_table
from pacekeeper.core.errors import ConfigError, DataError, HostError
from pacekeeper.trainer.data.shard import Shard, Tokens, map_file

TokenDtype = Literal["uint16", "uint32"]
DTYPES: tuple[TokenDtype, ...] = get_args(TokenDtype)
MAX_VOCAB_SIZE = 1 << 32
_MAX_INFO_BYTES = 1 << 16
_Crc = Annotated[int, Field(ge=0, lt=1 << 32)]
_Count = Annotated[int, Field(ge=1)]
# llm.c and modded-nanoGPT: 256 int32 before the tokens, the first one of these.
_LLM_C_MAGICS = (20240520, 20240801)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFileInfo:
    """The content of `FILE.bin.json`.

    Attributes:
        format: name and version of this description.
        dtype: of the tokens, little-endian.
        vocab_size: tokens are below it.
        end_of_document: token after each document.
        tokenizer: name of what made the tokens; `tokenizer_crc32`: of its file.
        num_tokens: tokens of the file, ends of documents included.
        num_documents: documents of the file.
        crc32: of all bytes of the file.
    """

    format: Literal["pacekeeper-tokens-1"] = "pacekeeper-tokens-1"
    dtype: TokenDtype
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
    end_of_document: Annotated[int, Field(ge=0)]
    tokenizer: str
    tokenizer_crc32: _Crc
    num_tokens: _Count
    num_documents: _Count
    crc32: _Crc

    def encode(self) -> bytes:
        """The JSON text of the file."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def info_path(path: Path) -> Path:
    """The path of the description of a token file."""
    return path.with_name(path.name + ".json")


def smallest_dtype(vocab_size: int) -> TokenDtype:
    """The smallest dtype with room for a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def read_info(path: Path) -> TokenFileInfo:
    """Read the description of the token file `path`.

    Raises:
        DataError: the description is invalid.
        HostError: it cannot be read.
    """
    file = info_path(path)
    remedy = f"restore it, or delete it and state the dtype of {path.name}"
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_INFO_BYTES + 1)
    except OSError as error:
        raise HostError(f"cannot read {file}: {error.strerror}") from None
    try:
        values = json.loads(data)
        if len(data) > _MAX_INFO_BYTES or not isinstance(values, dict):
            raise ValueError("expected one small JSON object")
        info: TokenFileInfo = read_table(TokenFileInfo, values, where=str(file))
        if info.end_of_document >= info.vocab_size:
            raise ValueError("end_of_document: expected a token below vocab_size")
    except ConfigError as error:
        raise DataError(str(error), remedy=remedy) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: {error}", remedy=remedy) from None
    return info


def open_token_file(
    path: Path, *, dtype: TokenDtype | None = None, end_of_document: int | None = None
) -> Shard:
    """Open a nanoGPT token file.

    Args:
        path: the `.bin` file.
        dtype: of a file without description.
        end_of_document: token that ends documents in a file without description; None: the whole
            file is one document.

    Raises:
        ConfigError: there is no description and no dtype, or they contradict each other.
        DataError: the file is empty, truncated, foreign, or differs from its description.
        HostError: it cannot be read.
    """
    if not path.is_file():
        raise HostError(f"cannot read {path}: no such file")
    if not info_path(path).exists():
        if dtype is None:
            raise ConfigError(
                f"{path}: the type of its tokens is unknown: there is no {info_path(path).name}",
                remedy=f"state the dtype of the tokens ({' or '.join(DTYPES)}), "
                "or write the file with `pacekeeper data tokenize`",
            )
        return Shard(path=path, tokens=_map_tokens(path, dtype), end_of_document=end_of_document)
    info = read_info(path)
    for name, stated in (("dtype", dtype), ("end_of_document", end_of_document)):
        if stated is not None and stated != getattr(info, name):
            raise ConfigError(
                f"{path}: {name} {stated} is stated, but {info_path(path).name} says "
                f"{getattr(info, name)}",
                remedy=f"leave {name} out",
            )
    tokens = _map_tokens(path, info.dtype)
    if len(tokens) != info.num_tokens:
        raise DataError(
            f"{path}: {len(tokens)} tokens, expected {info.num_tokens} by {info_path(path).name}",
            remedy="one of the two files is truncated or of another run: copy both again",
        )
    return Shard(
        path=path,
        tokens=tokens,
        end_of_document=info.end_of_document,
        vocab_size=info.vocab_size,
        tokenizer=(info.tokenizer, info.tokenizer_crc32),
        crc32=info.crc32,
    )


def _map_tokens(path: Path, dtype: TokenDtype) -> Tokens:
    tokens = map_file(path, np.dtype(dtype).newbyteorder("<"))
    head = tokens[:2].tobytes()[:4]
    if len(tokens) * tokens.itemsize >= 1024 and int.from_bytes(head, "little") in _LLM_C_MAGICS:
        raise DataError(
            f"{path}: begins with a header of llm.c, expected tokens only",
            remedy="remove its first 1,024 bytes (tail -c +1025)",
        )
    return tokens
