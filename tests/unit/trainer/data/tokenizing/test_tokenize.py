"""Tokenizing as a whole: files, options that do not fit, and inputs without text."""

import json
from pathlib import Path

import pytest

from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.trainer.data.token_file import open_token_file, read_info
from pacekeeper.trainer.data.token_stream import open_tokens
from pacekeeper.trainer.data.tokenizing.encoders import BYTES, EncoderSpec
from pacekeeper.trainer.data.tokenizing.inputs import find_inputs
from pacekeeper.trainer.data.tokenizing.tokenize import TokenizeOptions, tokenize

OPTIONS = TokenizeOptions(encoder=EncoderSpec(BYTES))


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("ab")
    lines.write_text('{"text": "c"}\n{"text": "d"}\n')
    return [lines, text]


def test_inputs_become_one_file_in_their_order(tmp_path: Path, inputs: list[Path]) -> None:
    output, seen = tmp_path / "o.bin", list[int]()
    info = tokenize(find_inputs(inputs), output, OPTIONS, seen.append)
    assert read_info(output) == info
    assert open_token_file(output).tokens.tolist() == [99, 256, 100, 256, 97, 98, 256]
    assert (info.num_tokens, info.num_documents, info.dtype) == (7, 3, "uint16")
    assert (info.vocab_size, info.end_of_document, info.tokenizer) == (257, 256, "bytes")
    assert seen == [28, 30]
    open_token_file(output).verify()


def test_the_number_of_processes_does_not_change_the_file(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"{number} " * (number % 977)}) for number in range(2000)]
    source.write_text("\n".join(lines))
    assert source.stat().st_size > 3 << 20
    for number in (1, 3):
        options = TokenizeOptions(encoder=EncoderSpec(BYTES), num_processes=number)
        tokenize(find_inputs([source]), tmp_path / f"{number}.bin", options)
    assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "3.bin").read_bytes()
    assert read_info(tmp_path / "1.bin") == read_info(tmp_path / "3.bin")


def test_a_larger_dtype(tmp_path: Path, inputs: list[Path]) -> None:
    options = TokenizeOptions(encoder=EncoderSpec(BYTES), dtype="uint32")
    tokenize(find_inputs(inputs), tmp_path / "o.bin", options)
    assert (tmp_path / "o.bin").stat().st_size == 28
    assert open_tokens([tmp_path / "o.bin"], dtype="uint32").num_tokens == 7


def test_a_dtype_too_small_for_the_vocabulary(
    tmp_path: Path, inputs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = EncoderSpec(BYTES).load()
    encoder.vocab_size = (1 << 16) + 1
    monkeypatch.setattr(EncoderSpec, "load", lambda _: encoder)
    options = TokenizeOptions(encoder=EncoderSpec(BYTES), dtype="uint16")
    with pytest.raises(ConfigError):
        tokenize(find_inputs(inputs), tmp_path / "o.bin", options)
    tokenize(find_inputs(inputs), tmp_path / "o.bin", OPTIONS)
    assert read_info(tmp_path / "o.bin").dtype == "uint32"


def test_inputs_without_text_make_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError):
        tokenize(find_inputs([tmp_path / "a.txt"]), tmp_path / "o.bin", OPTIONS)
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt"}


def test_an_invalid_input_makes_no_file(tmp_path: Path, inputs: list[Path]) -> None:
    (tmp_path / "c.jsonl").write_text("no")
    with pytest.raises(DataError):
        tokenize(find_inputs([*inputs, tmp_path / "c.jsonl"]), tmp_path / "o.bin", OPTIONS)
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "b.jsonl", "c.jsonl"}


def test_an_input_is_never_the_output(tmp_path: Path, inputs: list[Path]) -> None:
    path = inputs[1].rename(tmp_path / "a.bin")
    options = TokenizeOptions(encoder=EncoderSpec(BYTES), overwrite=True)
    with pytest.raises(ConfigError):
        tokenize(find_inputs([path]), path, options)
    assert path.read_text() == "ab"


def test_an_output_has_the_name_of_a_token_file(tmp_path: Path, inputs: list[Path]) -> None:
    with pytest.raises(ConfigError):
        tokenize(find_inputs(inputs), tmp_path / "o.idx", OPTIONS)
