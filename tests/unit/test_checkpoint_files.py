"""Where checkpoints lie: directories and URLs alike; what is half gone is not taken."""

import os
from pathlib import Path

import pytest

from pacekeeper.core.errors import HostError
from pacekeeper.core.manifest import MANIFEST_FILE
from pacekeeper.trainer.checkpoint_files import Storage, below, open_storage


@pytest.fixture(params=["directory", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "memory":
        pytest.importorskip("fsspec")
        return open_storage(f"memory://{tmp_path.name}")
    return open_storage(str(tmp_path / "not" / "there"))


def test_what_is_written_is_read_whole_or_in_part(storage: Storage) -> None:
    storage.write("a/file", [b"0123", memoryview(b"456789")])
    assert storage.read("a/file") == b"0123456789"
    assert storage.read("a/file", 3, 4) == b"3456"
    assert storage.read("a/file", 8, 9) == b"89"
    assert storage.size_bytes("a/file") == 10


def test_names_ascend_and_what_is_not_there_has_none(storage: Storage) -> None:
    assert storage.names("") == []
    storage.write("b/2", [b"x"])
    storage.publish("b/1", b"y")
    storage.write("a/1", [b"z"])
    assert storage.names("") == ["a", "b"]
    assert storage.names("b") == ["1", "2"]
    assert storage.names("c") == []


def test_what_is_missing_is_an_error_of_the_system(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read("a/file")
    with pytest.raises(FileNotFoundError):
        storage.size_bytes("a/file")


def test_a_directory_goes_with_all_that_is_in_it_and_may_be_gone_already(storage: Storage) -> None:
    storage.write("a/file", [b"x"])
    storage.publish(f"a/{MANIFEST_FILE}", b"{}")
    storage.remove("a")
    storage.remove("a")
    assert storage.names("") == []


def test_the_manifest_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path))
    for name in ("0", MANIFEST_FILE, "z"):
        storage.publish(f"a/{name}", b"x")
    gone: list[str] = []
    unlink = Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        gone.append(path.name)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    storage.remove("a")
    assert gone == [MANIFEST_FILE, "0", "z"]


def test_who_publishes_in_vain_leaves_what_stood_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path))
    storage.publish("a/file", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        storage.publish("a/file", b"new")
    assert os.listdir(tmp_path / "a") == ["file"]
    assert storage.read("a/file") == b"old"


def test_a_url_that_nobody_knows_is_refused() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(HostError, match=r"nonsense://bucket: .*name a directory"):
        open_storage("nonsense://bucket")


def test_paths_below_a_root_have_one_slash_between() -> None:
    assert below("a/", "b") == below("a", "b") == "a/b"
