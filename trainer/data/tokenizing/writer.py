"""Writing of a token file that is seen whole or not at all."""

import errno
import os
import zlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.trainer.data.token_file import TokenFileInfo, info_path


class TokenFileWriter:
    """Writes `FILE.partial` and renames it at the end; without an end it removes it.

    Args:
        path: the token file; its folder exists.
        overwrite: replace the file, and a `FILE.partial` that a killed process left.

    Raises:
        ConfigError: the file or its `.partial` exists.
        HostError: the folder cannot be written.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path
        self.crc32 = 0
        self._partial = path.with_name(path.name + ".partial")
        if not overwrite:
            for file in (path, info_path(path), self._partial):
                if file.exists():
                    raise ConfigError(
                        f"{file} exists"
                        + (", of a run that goes on or was killed" * (file == self._partial)),
                        remedy="choose another --out, or replace it with --overwrite",
                    )
        self._file = self._open(overwrite)

    def __enter__(self) -> "TokenFileWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # of the last buffer on a full disk
            self._file.close()
        self._partial.unlink(missing_ok=True)

    def write(self, tokens: bytes) -> None:
        """Append tokens. Raises HostError."""
        self.crc32 = zlib.crc32(tokens, self.crc32)
        try:
            self._file.write(tokens)
        except OSError as error:
            raise self._failed(error) from None

    def finish(self, info: TokenFileInfo) -> None:
        """Make the file durable and give it and its description their names. Raises HostError.

        A process that is killed in between leaves tokens without description, which no reader
        takes for something else.
        """
        description = info_path(self.path)
        partial = description.with_name(description.name + ".partial")
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            with partial.open("wb") as file:
                file.write(info.encode())
                file.flush()
                os.fsync(file.fileno())
            description.unlink(missing_ok=True)
            self._partial.replace(self.path)
            partial.replace(description)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise self._failed(error) from None

    def _open(self, overwrite: bool) -> IO[bytes]:
        try:
            if overwrite:
                self._partial.unlink(missing_ok=True)
            return self._partial.open("xb")
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> HostError:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return HostError(
            f"cannot write {self._partial}: {error.strerror}",
            remedy="free space, or write it elsewhere" if is_full else "write it elsewhere",
        )
