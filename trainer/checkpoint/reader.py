"""Which checkpoints a job has, and which of them are whole. No torch.

A checkpoint counts from the moment its manifest is seen. A part is read back only if its bytes have
the digest in the manifest: a torn, flipped, swapped or missing one is named, never taken.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from pacekeeper.core.checkpoint.manifest import (
    MANIFEST_FILE,
    CheckpointId,
    FileEntry,
    Manifest,
    PieceEntry,
    parse_tensor_name,
    piece_name,
)
from pacekeeper.core.checkpoint.manifest_codec import OtherFormatError, decode_manifest
from pacekeeper.core.checkpoint.safetensors_header import (
    LENGTH_BYTES,
    PlacedTensor,
    decode_header,
    header_bytes,
)
from pacekeeper.core.errors import DataError
from pacekeeper.trainer.checkpoint.storage import Storage

REJECTED_FILE = "rejected"  # why not all ranks could read this one


class NotOursError(DataError):
    """It may be whole, but it is not for us to judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTensor:
    """A tensor's checked bytes; `dtype` as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def ids(storage: Storage) -> list[CheckpointId]:
    """Of all directories that are, were to become or were a checkpoint, newest first."""
    found = (CheckpointId.of_name(name) for name in storage.names(""))
    return sorted((one for one in found if one is not None), reverse=True)


def complete_ids(storage: Storage) -> list[CheckpointId]:
    """Of those with a manifest, or that may have one, newest first. Raises OSError."""
    return [one for one in ids(storage) if _may_be_complete(storage, one)]


def _may_be_complete(storage: Storage, one: CheckpointId) -> bool:
    """One that is closed to us must not hide the others: who reads it finds out, and says so."""
    try:
        return MANIFEST_FILE in storage.names(one.name)
    except PermissionError:
        return True


def read_manifest(storage: Storage, one: CheckpointId) -> Manifest:
    """Raises DataError where it can not be read or is not what it should be, NotOursError where it
    is of another version.
    """
    path = f"{one.name}/{MANIFEST_FILE}"
    try:
        manifest = decode_manifest(storage.read(path))
    except OtherFormatError as error:
        raise NotOursError(f"{storage.root}/{path}: {error}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{storage.root}/{path}: {why_of(error)}") from None
    if manifest.id != one:
        raise DataError(f"{storage.root}/{path} is of {manifest.id.name}")
    return manifest


def is_sound(storage: Storage, one: CheckpointId) -> bool:
    """Is its manifest what it should be, and has no launch said that it could not read the rest?"""
    try:
        read_manifest(storage, one)
        return REJECTED_FILE not in storage.names(one.name)
    except (DataError, OSError):
        return False


@dataclass(slots=True, kw_only=True)
class BlockReader:
    """Reads pieces of one checkpoint, wherever they lie; each file's header once."""

    storage: Storage
    manifest: Manifest
    _headers: dict[str, tuple[PlacedTensor, ...]] = field(default_factory=dict)

    def read(self, entry: PieceEntry) -> dict[str, RawTensor]:
        """A piece's tensors, or its rows of them, by their names within its block.

        Raises DataError that names file and piece where they are not what was saved.
        """
        where = f"{self.storage.root}/{entry.file}: {piece_name(entry.piece)}"
        end = entry.first_byte + entry.size_bytes
        inside = [t for t in self._header(entry.file) if entry.first_byte <= t.first_byte < end]
        try:
            data = b""
            if entry.size_bytes:  # object stores know no empty range
                data = self.storage.read(entry.file, entry.first_byte, entry.size_bytes)
        except OSError as error:
            raise DataError(f"{where}: {why_of(error)}") from None
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise DataError(f"{where}: its bytes are not those that were saved")
        named = [parse_tensor_name(entry.piece, tensor.spec.name) for tensor in inside]
        if None in named:
            strangers = [t.spec.name for t, name in zip(inside, named, strict=True) if name is None]
            raise DataError(f"{where}: there lie {strangers} instead")
        return {
            str(name): RawTensor(
                dtype=tensor.spec.dtype,
                shape=tensor.spec.shape,
                data=data[
                    tensor.first_byte - entry.first_byte : tensor.end_byte - entry.first_byte
                ],
            )
            for tensor, name in zip(inside, named, strict=True)
        }

    def _header(self, name: str) -> tuple[PlacedTensor, ...]:
        if name not in self._headers:
            (file,) = (file for file in self.manifest.files if file.name == name)
            self._headers[name] = self._read_header(file)
        return self._headers[name]

    def _read_header(self, file: FileEntry) -> tuple[PlacedTensor, ...]:
        try:
            found = self.storage.size_bytes(file.name)
            if found != file.size_bytes:
                raise ValueError(f"it has {found} bytes instead of {file.size_bytes}")
            size = header_bytes(self.storage.read(file.name, 0, LENGTH_BYTES), found)
            data = self.storage.read(file.name, 0, size)
            if hashlib.sha256(data).hexdigest() != file.header_sha256:
                raise ValueError("its header is not the one that was saved")
            return decode_header(data, found)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.storage.root}/{file.name}: {why_of(error)}") from None


def damages(storage: Storage, manifest: Manifest) -> Iterator[str]:
    """Reads everything; what is wrong, one line each. Nothing: it is whole."""
    reader = BlockReader(storage=storage, manifest=manifest)
    said: set[str] = set()  # a file that is gone is said once, not for each of its pieces
    for entry in manifest.entries:
        try:
            reader.read(entry)
        except DataError as error:
            if error.what not in said:
                said.add(error.what)
                yield error.what


def reject(storage: Storage, one: CheckpointId, why: str) -> None:
    """Say for all runs of the job that not all ranks could read this one. Raises OSError."""
    storage.publish(f"{one.name}/{REJECTED_FILE}", why.encode(errors="replace"))


def accept(storage: Storage, one: CheckpointId) -> None:
    """All ranks read it: whatever was said of it before. Raises OSError."""
    if REJECTED_FILE in storage.names(one.name):
        storage.discard(f"{one.name}/{REJECTED_FILE}")


def why_of(error: OSError | ValueError) -> str:
    """In the system's words, where it has some."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)
