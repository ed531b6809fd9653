"""Blocks of text: the unit that is read, sent to a process and encoded.

A block is whole JSON lines, or pieces of documents. Documents are cut into pieces by their content
alone, so that tokens depend on nothing else.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from pacekeeper.core.errors import DataError

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Text of one input.

    Attributes:
        source: name of the input, for errors.
        data: JSON lines, or pieces of documents, one after the other.
        piece_sizes: bytes of each piece; empty for JSON lines.
        is_open: whether the last piece's document continues in the next block.
        field: of the objects in JSON lines, which has the text; None: `data` is the text itself.
        first_line: number of the first line in the input, from 1 on.
    """

    source: str
    data: bytes
    piece_sizes: tuple[int, ...] = ()
    is_open: bool = False
    field: str | None = None
    first_line: int = 1

    def pieces(self) -> Iterator[tuple[bytes, bool]]:
        """Yield pieces of at most BLOCK_BYTES, and whether a document ends with each.

        Documents without text are left out.

        Raises:
            DataError: a line is not a JSON object with the field; it names file and line.
        """
        if self.field is not None:
            for number, line in enumerate(self.data.split(b"\n"), self.first_line):
                if line and not line.isspace():
                    yield from cut_document(self._text(line, number))
            return
        first, last = 0, len(self.piece_sizes) - 1
        for place, size in enumerate(self.piece_sizes):
            yield self.data[first : first + size], not (place == last and self.is_open)
            first += size

    def _text(self, line: bytes, number: int) -> bytes:
        try:
            document = json.loads(line)
            if not isinstance(document, dict) or not isinstance(document.get(self.field), str):
                raise ValueError(f"expected a JSON object with a text in {self.field!r}")
            text: str = document[self.field]
            return text.encode()
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.source}, line {number}: {error}",
                remedy="each line must be one JSON object; --field names the key of its text",
            ) from None


def cut_document(text: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the pieces of a document as `Block.pieces` does."""
    first = 0
    while len(text) - first > BLOCK_BYTES:
        size = cut_size(text[first : first + BLOCK_BYTES + 1])
        yield text[first : first + size], False
        first += size
    if text:
        yield text[first:], True


def cut_size(text: bytes) -> int:
    """Return how many bytes the first piece of a long text has.

    It ends after the last line break, else before the last space, else before a character.

    Args:
        text: more than BLOCK_BYTES of UTF-8.
    """
    after_line = text.rfind(b"\n", 0, BLOCK_BYTES) + 1
    if after_line:
        return after_line
    if (before_space := text.rfind(b" ", 1, BLOCK_BYTES)) > 0:
        return before_space
    size = BLOCK_BYTES
    while size > BLOCK_BYTES - 3 and text[size] & 0xC0 == 0x80:  # inside a character
        size -= 1
    return size
