"""Inputs: documents of text files, JSON lines and datasets, and what cannot be read."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pacekeeper.core.errors import ConfigError, DataError, HostError
from pacekeeper.trainer.data.tokenizing import blocks, inputs
from pacekeeper.trainer.data.tokenizing.inputs import find_inputs

TEXT = "one\ntwo\n\nthree\r\n \t\r\n\n\nfour"


def documents(path: Path, **settings: Any) -> list[bytes]:
    """The documents of an input, with pieces put together."""
    (one,) = find_inputs([path], **settings)
    found, text = [], b""
    for block, done_bytes in one.blocks():
        assert 0 <= done_bytes <= one.size_bytes
        assert Path(block.source) == path
        for piece, is_end in block.pieces():
            text += piece
            if is_end:
                found.append(text)
                text = b""
    assert not text
    return found


@pytest.fixture(params=[4, 8, 1 << 20], autouse=True)
def _block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are the same, however short blocks are."""
    for module in (blocks, inputs):
        monkeypatch.setattr(module, "BLOCK_BYTES", request.param)


def written(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a", "a.txt.gz", "a.json.txt"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    assert documents(written(tmp_path / name, TEXT)) == [TEXT.encode()]


def test_a_file_without_text_has_no_documents(tmp_path: Path) -> None:
    assert documents(written(tmp_path / "a.txt", "")) == []
    assert documents(written(tmp_path / "a.txt", "\n\n\n"), separator="") == []
    assert documents(written(tmp_path / "a.jsonl", "\n")) == []


def test_blank_lines_separate_documents(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", TEXT)
    assert documents(path, separator="") == [b"one\ntwo", b"three", b"four"]


def test_a_line_of_its_own_separates_documents(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "<end>\none <end>\n\ntwo\n <end> \n<end>\nthree\n<end>\n")
    assert documents(path, separator="<end>") == [b"one <end>\n\ntwo", b"three"]


def test_a_long_document_before_a_separator_ends_there(tmp_path: Path) -> None:
    """Its last piece may be a line break alone, which is not part of it."""
    text = "12345678\n" * 3
    path = written(tmp_path / "a.txt", f"{text}\n{text}")
    assert documents(path, separator="") == [text.rstrip().encode()] * 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    lines = [json.dumps({"t": text}) for text in ("one", "two words", "")]
    path = written(tmp_path / name, "\n".join(lines))
    assert documents(path, field="t") == [b"one", b"two words"]


def test_a_wrong_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "a"}\n' * 9 + "no\n")
    with pytest.raises(DataError) as caught:
        documents(path)
    assert f"{path}, line 10" in str(caught.value)


@pytest.mark.parametrize("change", [slice(0, -9), slice(0, 14), slice(1, None)])
def test_a_damaged_packed_file_is_named(tmp_path: Path, change: slice) -> None:
    path = written(tmp_path / "a.txt.gz", TEXT * 100)
    path.write_bytes(path.read_bytes()[change])
    with pytest.raises(DataError) as caught:
        documents(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        documents(tmp_path / "none.txt")
    assert "none.txt" in str(caught.value)


class FakeDataset:
    """What is used of a dataset of the package datasets, which is not installed with the tests."""

    def __init__(self, records: dict[str, list[Any]]) -> None:
        self.records = records
        self.column_names = list(records)

    def __len__(self) -> int:
        return len(next(iter(self.records.values())))

    def __getitem__(self, part: slice) -> dict[str, list[Any]]:
        return {name: values[part] for name, values in self.records.items()}

    def select_columns(self, names: list[str]) -> "FakeDataset":
        return FakeDataset({name: self.records[name] for name in names})


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a saved dataset of 2,501 records."""
    for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"):
        (tmp_path / name).write_text("{}")
    texts = [f"text {number}" for number in range(2501)]
    module = SimpleNamespace(load_from_disk=lambda _: FakeDataset({"text": texts, "id": texts}))
    monkeypatch.setitem(sys.modules, "datasets", module)
    return tmp_path


def test_a_dataset(saved: Path) -> None:
    assert documents(saved) == [f"text {number}".encode() for number in range(2501)]


def test_a_column_that_is_missing_or_no_text(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        documents(saved, field="content")
    assert "text, id" in str(caught.value)
    module = SimpleNamespace(load_from_disk=lambda _: FakeDataset({"text": ["a", 1]}))
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(DataError) as damaged:
        documents(saved)
    assert f"{saved}, record 2" in str(damaged.value)


def test_a_dataset_without_the_package(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(HostError) as caught:
        documents(saved)
    assert "pip install datasets" in caught.value.remedy


def test_a_dataset_that_cannot_be_loaded(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise ValueError("damaged")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=fail))
    with pytest.raises(DataError):
        documents(saved)


def test_other_folders_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        find_inputs([tmp_path])
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        find_inputs([tmp_path])
    assert "split" in caught.value.remedy
