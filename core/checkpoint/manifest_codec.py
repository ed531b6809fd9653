"""The JSON form of manifests: one document with a digest of itself.

Equal values give equal bytes; a torn or changed document is rejected as a whole.
"""

import hashlib
import json
from dataclasses import asdict
from math import isfinite
from typing import Any

from pacekeeper.core.checkpoint.interval import SaveCosts
from pacekeeper.core.checkpoint.manifest import (
    MAX_COUNT,
    CheckpointId,
    FileEntry,
    Manifest,
    Piece,
    PieceEntry,
    RankManifest,
    TokenLedgerState,
    WindowStart,
)
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.layout.layout import Block, BlockKind

FORMAT = 5  # those before were written before the first release, of a byte model that is gone


class OtherFormatError(ValueError):
    """It may be whole, but another version wrote it."""


_WRONG = (AttributeError, TypeError, KeyError, IndexError, OverflowError, RecursionError)


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON text with its digest: equal manifests give equal bytes."""
    return encode_with_digest(
        {
            "job": manifest.job,
            "id": asdict(manifest.id),
            "ticket": manifest.ticket,
            "num_updates": manifest.num_updates,
            "last_loss": manifest.last_loss,
            "identity": dict(manifest.identity),
            "layout": json.loads(encode_layout(manifest.layout)),
            "files": [asdict(file) for file in manifest.files],
            "pieces": [_plain(entry) for entry in manifest.pieces],
            "account": asdict(manifest.account),
            "window": None if manifest.window is None else asdict(manifest.window),
            "frozen": [_plain(entry) for entry in manifest.frozen],
            "costs": None if manifest.costs is None else asdict(manifest.costs),
        }
    )


def decode_manifest(data: bytes) -> Manifest:
    """Parse a manifest.

    Raises:
        OtherFormatError: it is of another version.
        ValueError: the data is not a valid manifest; the message gives the reason.
    """
    body = _unseal(data)
    try:
        window = body["window"]
        return Manifest(
            job=_text(body["job"]),
            id=CheckpointId(**{name: _count(number) for name, number in body["id"].items()}),
            ticket=_count(body["ticket"]),
            num_updates=_count(body["num_updates"]),
            last_loss=None if body["last_loss"] is None else float(body["last_loss"]),
            identity=_identity(body["identity"]),
            layout=decode_layout(json.dumps(body["layout"]).encode()),
            files=tuple(_file(plain) for plain in body["files"]),
            pieces=tuple(_entry(plain) for plain in body["pieces"]),
            account=_account(body["account"]),
            window=None if window is None else _window(window),
            frozen=tuple(_entry(plain) for plain in body["frozen"]),
            costs=_costs(body["costs"]),
        )
    except _WRONG as error:
        raise ValueError(f"not a manifest: {error!r}") from None


def encode_rank_manifest(part: RankManifest) -> bytes:
    """JSON text with its digest."""
    return encode_with_digest(
        {
            "files": [asdict(file) for file in part.files],
            "pieces": [_plain(entry) for entry in part.pieces],
            "account": asdict(part.account),
            "frozen": [_plain(entry) for entry in part.frozen],
            "costs": None if part.costs is None else asdict(part.costs),
        }
    )


def decode_rank_manifest(data: bytes) -> RankManifest:
    """Parse the manifest of one rank. Raises ValueError for anything else."""
    body = _unseal(data)
    try:
        return RankManifest(
            files=tuple(_file(plain) for plain in body["files"]),
            pieces=tuple(_entry(plain) for plain in body["pieces"]),
            account=_account(body["account"]),
            frozen=tuple(_entry(plain) for plain in body["frozen"]),
            costs=_costs(body["costs"]),
        )
    except _WRONG as error:
        raise ValueError(f"not a rank manifest: {error!r}") from None


def _plain(entry: PieceEntry) -> dict[str, Any]:
    """Field by field: `asdict` would take most of the time of encoding a manifest."""
    block, strips = entry.piece.block, entry.piece.strips
    strip = [entry.piece.strip, strips] if strips > 1 else []
    plain: dict[str, Any] = {
        "piece": [str(block.kind), block.layer, block.index, entry.piece.kind, *strip],
        "file": entry.file,
        "first_byte": entry.first_byte,
        "size_bytes": entry.size_bytes,
        "sha256": entry.sha256,
        "tokens": entry.tokens,
    }
    return plain if entry.step is None else plain | {"step": entry.step}


def _entry(plain: dict[str, Any]) -> PieceEntry:
    block_kind, layer, index, kind, *strip = plain["piece"]
    block = Block(BlockKind(block_kind), _count(layer), _count(index))
    return PieceEntry(
        piece=Piece(block, _text(kind), *map(_count, strip)),
        file=_text(plain["file"]),
        first_byte=_count(plain["first_byte"]),
        size_bytes=_count(plain["size_bytes"]),
        sha256=_text(plain["sha256"]),
        tokens=_count(plain["tokens"]),
        step=None if plain.get("step") is None else _count(plain["step"]),
    )


def _file(plain: dict[str, Any]) -> FileEntry:
    return FileEntry(
        name=_text(plain["name"]),
        size_bytes=_count(plain["size_bytes"]),
        header_sha256=_text(plain["header_sha256"]),
    )


def _window(plain: dict[str, Any]) -> WindowStart:
    return WindowStart(step=_count(plain["step"]), num_updates=_count(plain["num_updates"]))


def _account(plain: dict[str, Any]) -> TokenLedgerState:
    return TokenLedgerState(
        routed=tuple(tuple(map(_count, counts)) for counts in plain["routed"]),
        lost=tuple(map(_count, plain["lost"])),
        num_faults=_count(plain["num_faults"]),
    )


def _identity(plain: dict[str, Any]) -> dict[str, int | float | str]:
    for name, value in plain.items():
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{name} is {value}")
        if type(value) not in (int, float, str):
            raise ValueError(f"{name} is {value!r:.40}")
    return dict(plain)


def _count(value: Any) -> int:
    """A whole number in the range that the encoder writes."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"expected a whole number from 0 to {MAX_COUNT}, got {value!r:.40}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a text, got {value!r:.40}")
    return value


def _costs(plain: dict[str, Any] | None) -> SaveCosts | None:
    if plain is None:
        return None
    return SaveCosts(
        held_s=float(plain["held_s"]),
        step_s=float(plain["step_s"]),
        running_s=float(plain["running_s"]),
        num_restores=_count(plain["num_restores"]),
    )


def encode_with_digest(body: dict[str, Any]) -> bytes:
    """The document of `body` with its digest."""
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"format":{FORMAT},"sha256":"{digest}","body":{text}}}\n'.encode()


def _unseal(data: bytes) -> Any:
    """The body, if its digest is right."""
    try:
        document: Any = json.loads(data)
        found, digest, body = document["format"], document["sha256"], document["body"]
        text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"not a manifest document: {error}") from None
    if found != FORMAT:
        is_older = type(found) is int and found < FORMAT
        whose = ", of the byte model that earlier versions trained" if is_older else ""
        raise OtherFormatError(f"format {found}{whose}; this side reads format {FORMAT} only")
    # Byte by byte: JSON has several forms of one number.
    if hashlib.sha256(text.encode()).hexdigest() != digest or encode_with_digest(body) != data:
        raise ValueError("its checksum is wrong: it is torn or was changed")
    return body
