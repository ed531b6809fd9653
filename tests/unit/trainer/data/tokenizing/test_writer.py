"""The writer: whole files or none."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.trainer.data.token_file import TokenFileInfo, open_token_file
from pacekeeper.trainer.data.tokenizing.writer import TokenFileWriter


def info_of(writer: TokenFileWriter, num_tokens: int) -> TokenFileInfo:
    return TokenFileInfo(
        dtype="uint16", vocab_size=1 << 16, end_of_document=0, tokenizer="t", tokenizer_crc32=0,
        num_tokens=num_tokens, num_documents=1, crc32=writer.crc32,
    )  # fmt: skip


def write(path: Path, data: bytes, *, overwrite: bool = False) -> None:
    with TokenFileWriter(path, overwrite=overwrite) as writer:
        for first in range(0, len(data), 10):
            writer.write(data[first : first + 10])
        writer.finish(info_of(writer, len(data) // 2))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Files cannot grow beyond `size` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_and_its_description(tmp_path: Path) -> None:
    write(tmp_path / "a.bin", bytes(range(30)))
    assert names(tmp_path) == {"a.bin", "a.bin.json"}
    shard = open_token_file(tmp_path / "a.bin")
    assert shard.tokens.tobytes() == bytes(range(30))


def test_what_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        TokenFileWriter(tmp_path / "a.bin") as writer,
    ):
        writer.write(b"ab")
        assert names(tmp_path) == {"a.bin.partial"}
        raise KeyboardInterrupt
    assert names(tmp_path) == set()


@pytest.mark.parametrize("size", [0, 20, 100_000])
def test_a_full_disk_leaves_nothing(tmp_path: Path, size: int) -> None:
    with file_size_limit(size), pytest.raises(HostError) as caught:
        write(tmp_path / "a.bin", bytes(200_000))
    assert "a.bin" in str(caught.value) and "free space" in caught.value.remedy
    assert names(tmp_path) == set()


def test_a_disk_too_full_for_the_description_leaves_the_old_file(tmp_path: Path) -> None:
    write(tmp_path / "a.bin", b"old1")
    with file_size_limit(50), pytest.raises(HostError):
        write(tmp_path / "a.bin", b"new2", overwrite=True)
    assert names(tmp_path) == {"a.bin", "a.bin.json"}
    assert open_token_file(tmp_path / "a.bin").tokens.tobytes() == b"old1"


@pytest.mark.parametrize("name", ["a.bin", "a.bin.json", "a.bin.partial"])
def test_files_are_replaced_only_when_asked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError) as caught:
        write(tmp_path / "a.bin", b"abcd")
    assert str(tmp_path / name) in str(caught.value)
    assert (tmp_path / name).read_text() == "mine"
    write(tmp_path / "a.bin", b"abcd", overwrite=True)
    assert names(tmp_path) == {"a.bin", "a.bin.json"}
    open_token_file(tmp_path / "a.bin").verify()


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        write(tmp_path / "none" / "a.bin", b"ab")
    assert str(tmp_path / "none") in str(caught.value)
