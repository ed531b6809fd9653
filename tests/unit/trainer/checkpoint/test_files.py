"""Where checkpoints lie: directories and URLs alike; what is half gone is not taken."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.object_store import object_store

from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE
from pacekeeper.core.errors import HostError
from pacekeeper.trainer.checkpoint.reader import REJECTED_FILE, complete_ids, reject
from pacekeeper.trainer.checkpoint.storage import (
    LocalStorage,
    RemoteStorage,
    Storage,
    below,
    open_storage,
)
from support.trainees import Lone


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """On a server of its own."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with object_store() as url:
        yield url


@pytest.fixture(params=["directory", "memory", "objects"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "objects":
        return open_storage(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")
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
    assert below("/", "b") == "/b" and below("file:///", "b") == "file:///b"
    assert below("s3://", "b") == "s3://b" and below("s3://a/", "b") == "s3://a/b"


def test_a_url_of_no_directory_is_not_the_present_one() -> None:
    with pytest.raises(HostError, match="file://: names no directory"):
        open_storage("file://")


def test_what_others_write_and_remove_is_seen_at_once(storage: Storage) -> None:
    """As of a rank on another node, which has a view of its own."""
    if isinstance(storage, RemoteStorage):
        type(storage._system).clear_instance_cache()
    other = open_storage(storage.root)
    storage.publish("a/1", b"x")
    assert other.names("a") == ["1"] and other.size_bytes("a/1") == 1
    storage.publish("a/2", b"y")
    storage.publish("a/1", b"xyz")
    assert other.names("a") == ["1", "2"] and other.size_bytes("a/1") == 3
    storage.discard("a/1")
    assert other.names("a") == ["2"]


def test_an_object_whose_writer_is_killed_is_never_seen(bucket: str) -> None:
    """Three parts of it have arrived; nobody joins them."""
    root = f"{bucket}/cut-short"
    heard, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        own = open_storage(root)
        assert isinstance(own, RemoteStorage)
        own._system.default_block_size = 5 << 20

        def parts() -> Iterator[bytes]:
            for _ in range(3):
                yield bytes(6 << 20)
            os.write(tell, b"sent")
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            own.write("a/file", parts())
        finally:
            os._exit(1)
    os.close(tell)
    os.waitpid(pid, 0)
    with os.fdopen(heard, "rb") as said:
        assert said.read() == b"sent"
    assert open_storage(root).names("a") == []


def test_errors_of_a_library_are_told_as_those_of_the_system(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    storage = open_storage(f"memory://{tmp_path.name}")
    assert isinstance(storage, RemoteStorage)

    class NoRouteError(Exception):
        """As libraries have them."""

    def refuse(*_: object, **__: object) -> None:
        raise NoRouteError("to the bucket")

    for name in ("open", "pipe_file", "cat_file", "size", "ls", "rm_file"):
        setattr(storage._system, name, refuse)
    try:
        for action in (
            lambda: storage.write("a", [b"x"]),
            lambda: storage.publish("a", b"x"),
            lambda: storage.read("a"),
            lambda: storage.size_bytes("a"),
            lambda: storage.names("a"),
            lambda: storage.discard("a"),
        ):
            with pytest.raises(OSError, match="NoRouteError: to the bucket"):
                action()
    finally:
        for name in ("open", "pipe_file", "cat_file", "size", "ls", "rm_file"):
            delattr(storage._system, name)


def test_a_url_of_this_machines_files_is_a_directory(tmp_path: Path) -> None:
    storage = open_storage(f"file://{tmp_path}/there")
    assert isinstance(storage, LocalStorage)
    storage.publish("a/file", b"x")
    assert (tmp_path / "there" / "a" / "file").read_bytes() == b"x"


def test_a_reason_that_is_no_text_is_kept_as_far_as_it_is(tmp_path: Path) -> None:
    """A manifest may hold half a character, and what is wrong with it is told with it."""
    lone = Lone(tmp_path)
    lone.save()
    storage = open_storage(str(lone.root))
    (one,) = complete_ids(storage)
    reject(storage, one, "layout format \udcff")
    assert (lone.root / one.name / REJECTED_FILE).read_text() == "layout format ?"
