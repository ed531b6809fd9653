"""Blocks: where documents are cut, and lines that are no documents."""

import pytest

from pacekeeper.core.errors import DataError
from pacekeeper.trainer.data.tokenizing import blocks
from pacekeeper.trainer.data.tokenizing.blocks import Block, cut_document


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 8)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("12345678", ["12345678"]),
        ("12\n4 678901", ["12\n", "4 678901"]),  # after the last line break
        ("12 45 7890", ["12 45", " 7890"]),  # else before the last space
        (" 234567890", [" 2345678", "90"]),  # not before the first character
        ("1234567890", ["12345678", "90"]),
        ("1234567\u00fc", ["1234567", "\u00fc"]),  # not in a character
        ("12345\U0001f600 7", ["12345", "\U0001f600 7"]),
        ("\n" * 17, ["\n" * 8, "\n" * 8, "\n"]),
    ],
)
def test_a_long_document_is_cut_by_its_content(text: str, pieces: list[str]) -> None:
    found = list(cut_document(text.encode()))
    assert [piece.decode() for piece, _ in found] == pieces
    assert [is_end for _, is_end in found] == [False] * (len(pieces) - 1) + [True] * bool(pieces)


def test_bytes_that_are_no_characters_are_cut_all_the_same() -> None:
    assert [len(piece) for piece, _ in cut_document(b"\x80" * 20)] == [5, 5, 5, 5]


def test_json_lines_are_documents() -> None:
    data = b'{"text": "a"}\r\n\n  \n{"id": 1, "text": "d\\u00fc 4567 9"}\n{"text": ""}'
    block = Block(source="x", data=data, field="text")
    assert list(block.pieces()) == [(b"a", True), ("d\u00fc".encode(), False), (b" 4567 9", True)]


@pytest.mark.parametrize(
    "line",
    [b"{", b"[1]", b'{"text": 1}', b'{"more": "a"}', b'{"text": "\\ud800"}', b'{"text": "\xff"}',
     b"[" * 100_000, b'{"text": null}'],
)  # fmt: skip
def test_a_line_that_is_no_document_is_named(line: bytes) -> None:
    block = Block(source="x", data=b'{"text": "a"}\n' + line, field="text", first_line=7)
    with pytest.raises(DataError) as caught:
        list(block.pieces())
    assert "x, line 8" in str(caught.value)


def test_the_last_piece_may_go_on() -> None:
    block = Block(source="a", data=b"onetwo", piece_sizes=(3, 3), is_open=True)
    assert list(block.pieces()) == [(b"one", True), (b"two", False)]
