"""Where checkpoints lie: a directory all nodes see, or a URL of fsspec; what is written is durable.

Errors are OSError, as the system names them. Nothing here knows what the bytes mean.
"""

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE
from pacekeeper.core.errors import HostError

Bytes = bytes | memoryview


class Storage(Protocol):
    """Files by paths below one root, with "/" between names."""

    root: str

    def write(self, path: str, parts: Iterable[Bytes]) -> None:
        """A new file; durable when this returns, visible at any time before."""

    def publish(self, path: str, data: bytes) -> None:
        """A small file that is seen whole or not at all; durable when this returns."""

    def read(self, path: str, first: int = 0, size: int | None = None) -> bytes:
        """`size` bytes from `first`, fewer at the file's end; None: all that follow."""

    def size_bytes(self, path: str) -> int:
        """Of a file."""

    def names(self, path: str) -> list[str]:
        """What lies in a directory, in order; empty where there is none."""

    def discard(self, path: str) -> None:
        """One file, which may be gone already; gone for good when this returns."""

    def remove(self, path: str) -> None:
        """A checkpoint's directory, its manifest first: what is half gone is never taken."""


class LocalStorage:
    """A directory of a file system."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._is_rooted = False

    def write(self, path: str, parts: Iterable[Bytes]) -> None:
        target = Path(self.root, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())

    def publish(self, path: str, data: bytes) -> None:
        unseen = f"{path}.{uuid4().hex}"  # ranks of two nodes may have one pid
        try:
            self.write(unseen, [data])
            os.replace(Path(self.root, unseen), Path(self.root, path))
        except OSError:
            with contextlib.suppress(OSError):
                Path(self.root, unseen).unlink()
            raise
        folder = Path(self.root, path).parent
        for directory in (folder, folder.parent):
            _make_durable(directory)
        if not self._is_rooted:  # whoever made the directories above may not have come so far
            for directory in Path(self.root).absolute().parents:
                _make_durable(directory)
            self._is_rooted = True

    def read(self, path: str, first: int = 0, size: int | None = None) -> bytes:
        with Path(self.root, path).open("rb") as file:
            file.seek(first)
            return file.read(-1 if size is None else size)

    def size_bytes(self, path: str) -> int:
        return Path(self.root, path).stat().st_size

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(Path(self.root, path)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            if path and error.errno == errno.ELOOP:  # a link that leads to itself
                return []
            raise

    def discard(self, path: str) -> None:
        target = Path(self.root, path)
        target.unlink(missing_ok=True)
        _make_durable(target.parent)

    def remove(self, path: str) -> None:
        folder = Path(self.root, path)
        names = self.names(path)
        if MANIFEST_FILE in names:
            self.discard(f"{path}/{MANIFEST_FILE}")
        for name in names:
            if name != MANIFEST_FILE:
                (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if folder.is_symlink():  # what it led to is empty now
                folder.unlink()
            else:
                folder.rmdir()


class RemoteStorage:
    """What fsspec reaches by a URL: objects, which nothing renames.

    What is written is seen when its last byte is there, whole: by one request, or by the one that
    joins the parts of a large one. So a part or a manifest needs no name of its own before. What
    others wrote is seen at once: nothing here lives from what was listed before.
    """

    def __init__(self, root: str) -> None:
        try:
            import fsspec
        except ModuleNotFoundError:
            raise HostError(
                f"{root}: fsspec is not installed here",
                remedy="pip install 'pacekeeper[objects]', or name a directory",
            ) from None
        try:
            self._system, self._base = fsspec.core.url_to_fs(root, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise HostError(f"{root}: {error}", remedy="name a directory") from None
        self.root = root
        self._made = ""  # the directory that was made last, where there are any

    def write(self, path: str, parts: Iterable[Bytes]) -> None:
        with _errors_of_the_system():
            self._make_folder(path)
            with self._system.open(self._at(path), "wb") as file:
                for part in parts:
                    file.write(part)

    def publish(self, path: str, data: bytes) -> None:
        with _errors_of_the_system():
            self._make_folder(path)
            self._system.pipe_file(self._at(path), data)

    def read(self, path: str, first: int = 0, size: int | None = None) -> bytes:
        end = None if size is None else first + size
        with _errors_of_the_system():
            data: bytes = self._system.cat_file(self._at(path), start=first, end=end)
        return data

    def size_bytes(self, path: str) -> int:
        with _errors_of_the_system():
            self._system.invalidate_cache()  # not all libraries know the option above
            return int(self._system.size(self._at(path)))

    def names(self, path: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError), _errors_of_the_system():
            self._system.invalidate_cache()
            found: list[Any] = self._system.ls(self._at(path), detail=False)
            return sorted(str(name).rstrip("/").rpartition("/")[2] for name in found)
        return []

    def discard(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _errors_of_the_system():
            self._system.rm_file(self._at(path))

    def remove(self, path: str) -> None:
        self.discard(f"{path}/{MANIFEST_FILE}")
        with contextlib.suppress(FileNotFoundError), _errors_of_the_system():
            self._system.rm(self._at(path), recursive=True)

    def _make_folder(self, path: str) -> None:
        """Some of what fsspec reaches has directories; to others this is one request for each."""
        folder = self._at(path).rpartition("/")[0]
        if folder != self._made:
            self._system.makedirs(folder, exist_ok=True)
            self._made = folder

    def _at(self, path: str) -> str:
        return f"{self._base}/{path}".rstrip("/")


@contextlib.contextmanager
def _errors_of_the_system() -> Iterator[None]:
    """Libraries of object stores have errors of their own: no route, no right, no such bucket."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


def open_storage(root: str) -> Storage:
    """The storage at a directory or URL. Raises HostError where no such URL can be reached here."""
    scheme, separator, path = root.partition("://")
    if scheme in ("file", "local") and separator:
        if not path:
            raise HostError(f"{root}: names no directory", remedy="file:///DIRECTORY does")
        return LocalStorage(path)  # durable and atomic, which fsspec would not be
    return RemoteStorage(root) if separator else LocalStorage(root)


def below(root: str, name: str) -> str:
    """The root of what is called `name` in `root`."""
    is_bare = root.rstrip("/").endswith(":")  # file:///, s3://
    return f"{root}{name}" if is_bare and "://" in root else f"{root.rstrip('/')}/{name}"


def _make_durable(directory: Path) -> None:
    """The names in it, too. Some network file systems refuse that: there they are at once."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


SAY_AFTER_S = 10.0  # then at twice the time, and so on


T = TypeVar("T")


_log = logging.getLogger(__name__)


def wait_aloud(wait: Callable[[float], bool], what: str, timeout_s: float) -> bool:
    """Call `wait(seconds)` until it says that what it waits for is there, or `timeout_s` are over.

    False: they are over. `what` is told with the time that went by.
    """
    began_s = time.monotonic()
    pause_s, waited_s = SAY_AFTER_S, 0.0
    while True:
        if wait(max(0.0, min(pause_s, timeout_s - waited_s))):
            return True
        waited_s = time.monotonic() - began_s
        if waited_s >= timeout_s:
            return False
        _log.warning("still waits for %s, %.0f s so far", what, waited_s)
        pause_s = waited_s


def answered(
    action: Callable[[], T],
    what: str,
    patience_s: float,
    progress: Callable[[], int] = lambda: 0,
) -> T:
    """What `action` returns or raises. Raises TimeoutError where it does not end for `patience_s`
    in which `progress` says the same.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(action())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name="storage").start()
    while True:
        before = progress()
        if wait_aloud(partial(_is_done, result), what, patience_s):
            return result.result()
        if progress() == before:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer for {patience_s:.0f} s")


def _is_done(result: "Future[T]", timeout_s: float) -> bool:
    wait_for([result], timeout_s)
    return result.done()
