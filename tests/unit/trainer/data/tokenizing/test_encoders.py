"""Encoders: bytes, and a tokenizer of Hugging Face from its file alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.trainer.data.tokenizing.encoders import BYTES, EncoderSpec
from support.tokenizers import END, write_tokenizer


def encode(spec: EncoderSpec, *texts: str) -> list[list[int]]:
    return [tokens.tolist() for tokens in spec.load().encode([text.encode() for text in texts])]


def test_a_byte_is_a_token() -> None:
    spec = EncoderSpec(BYTES)
    assert encode(spec, "a\u00fc", "") == [[97, 0xC3, 0xBC], []]
    assert spec.load().encode([b"\xff"])[0].tolist() == [255]
    assert (spec.load().vocab_size, spec.load().end_of_document) == (257, 256)


def test_bytes_have_one_end_of_documents() -> None:
    with pytest.raises(ConfigError):
        EncoderSpec(BYTES, "x").load()


class TestHuggingFace:
    """With the package tokenizers."""

    @pytest.fixture(autouse=True)
    def _needs_tokenizers(self) -> None:
        pytest.importorskip("tokenizers")

    def test_a_folder_and_its_file_are_the_same(self, tmp_path: Path) -> None:
        folder = write_tokenizer(tmp_path / "mine")
        for path in (folder, folder / "tokenizer.json"):
            spec = EncoderSpec(str(path))
            encoder = spec.load()
            assert encode(spec, "the he", "h\u00fc") == [[31, 26, 32], [7, 28, 29]]
            assert (encoder.name, encoder.vocab_size, encoder.end_of_document) == ("mine", 34, 33)
            assert encoder.crc32 == EncoderSpec(str(folder)).load().crc32

    def test_text_never_becomes_a_special_token(self, tmp_path: Path) -> None:
        """Else a document could end another one."""
        (tokens,) = encode(EncoderSpec(str(write_tokenizer(tmp_path))), f"a{END}b")
        assert 33 not in tokens
        assert tokens[0] == 0 and tokens[-1] == 1

    def test_nothing_is_added_cut_or_padded(self, tmp_path: Path) -> None:
        added = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": END, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
            "special_tokens": {END: {"id": END, "ids": [33], "tokens": [END]}},
        }  # fmt: skip
        cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        padding = {
            "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "a",
        }  # fmt: skip
        folder = write_tokenizer(tmp_path, truncation=cut, padding=padding, post_processor=added)
        assert encode(EncoderSpec(str(folder)), "abcd", "a") == [[0, 1, 2, 3], [0]]

    @pytest.mark.parametrize(
        "settings",
        [{"eos_token": END}, {"eos_token": {"content": END}}, {"auto_map": {}, "eos_token": END}],
    )
    def test_the_end_of_documents_is_in_the_settings(
        self, tmp_path: Path, settings: dict[str, Any]
    ) -> None:
        folder = write_tokenizer(tmp_path, settings=settings)
        assert EncoderSpec(str(folder)).load().end_of_document == 33

    @pytest.mark.parametrize("settings", [{}, {"eos_token": None}, {"eos_token": 3}])
    def test_without_it_must_be_named(self, tmp_path: Path, settings: dict[str, Any]) -> None:
        folder = write_tokenizer(tmp_path, settings=settings)
        with pytest.raises(ConfigError) as caught:
            EncoderSpec(str(folder)).load()
        assert "--end-of-document" in caught.value.remedy
        assert EncoderSpec(str(folder), END).load().end_of_document == 33

    @pytest.mark.parametrize("token", ["a", "the", "none"])
    def test_an_ordinary_token_ends_no_documents(self, tmp_path: Path, token: str) -> None:
        with pytest.raises(ConfigError) as caught:
            EncoderSpec(str(write_tokenizer(tmp_path)), token).load()
        assert END in caught.value.remedy

    def test_an_added_token_that_is_not_special_ends_no_documents(self, tmp_path: Path) -> None:
        folder = write_tokenizer(tmp_path, is_special=False)
        with pytest.raises(ConfigError):
            EncoderSpec(str(folder)).load()

    def test_code_of_a_tokenizer_is_never_loaded(self, tmp_path: Path) -> None:
        settings = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}, "eos_token": END}
        with pytest.raises(ConfigError):
            EncoderSpec(str(write_tokenizer(tmp_path, settings=settings))).load()

    def test_a_folder_without_tokenizer(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
        for path in (tmp_path, tmp_path / "none"):
            with pytest.raises(ConfigError) as caught:
                EncoderSpec(str(path)).load()
            assert str(path) in str(caught.value)

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    @pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b"{"])
    def test_damaged_files_are_named(self, tmp_path: Path, name: str, content: bytes) -> None:
        folder = write_tokenizer(tmp_path)
        (folder / name).write_bytes(content)
        spec = EncoderSpec(str(folder), END)
        if (name, content) == ("tokenizer_config.json", b"{}"):
            spec.load()
            return
        with pytest.raises(DataError) as caught:
            spec.load()
        assert str(folder / name) in str(caught.value)

    def test_no_text_is_found_by_what_is_before_it(self, tmp_path: Path) -> None:
        encoder = EncoderSpec(str(write_tokenizer(tmp_path))).load()
        with pytest.raises(DataError) as caught:
            encoder.encode([b"good", b"some words \xff more"])
        assert "some words " in str(caught.value)

    def test_a_tokenizer_that_fails_is_named(self, tmp_path: Path) -> None:
        model = {"type": "BPE", "unk_token": "none", "vocab": {"a": 0}, "merges": []}
        encoder = EncoderSpec(str(write_tokenizer(tmp_path / "mine", model=model))).load()
        with pytest.raises(DataError) as caught:
            encoder.encode([b"b"])
        assert "mine" in str(caught.value)

    def test_the_file_is_read_as_transformers_reads_it(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        folder = write_tokenizer(tmp_path, settings=settings)
        theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        text = "the weather there\nhe  the"
        assert encode(EncoderSpec(str(folder)), text) == [
            theirs(text, add_special_tokens=False)["input_ids"]
        ]
        assert json.loads((folder / "tokenizer_config.json").read_text()) == settings
