"""What a checkpoint holds: one value that vouches for every block, and its JSON form.

Pure. A checkpoint is one more holder of blocks: it knows no ranks but who wrote which file, so that
any layout can be filled from it. It exists from the moment its manifest does, never before.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from pacekeeper.core.layout import Block, BlockKind, Layout
from pacekeeper.core.layout_codec import decode_layout, encode_layout

FORMAT = 1
MANIFEST_FILE = "manifest.json"
_NAME = re.compile(r"(\d{13,})-g(\d{4,})-step(\d{8,})")
_PART = re.compile(r"part-(\d+)\.json")
_HEX = re.compile("[0-9a-f]{64}")
Identity = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class CheckpointId:
    """A checkpoint's place in the history of its job: the order of ids is that of their making.

    `life`: of the launch that wrote it; `generation`: of the layout then; `step`: steps committed.
    After a job went back to an earlier step, generation or life are higher.
    """

    life: int
    generation: int
    step: int

    @property
    def name(self) -> str:
        """The name of its directory; names sort as ids do."""
        return f"{self.life:013d}-g{self.generation:04d}-step{self.step:08d}"

    @classmethod
    def of_name(cls, name: str) -> "CheckpointId | None":
        """The id of a directory; None for a name that is none."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        life, generation, step = map(int, found.groups())
        own = cls(life=life, generation=generation, step=step)
        return own if own.name == name else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file: its size, and the SHA-256 of its header, which places the tensors."""

    name: str
    size_bytes: int
    header_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEntry:
    """Where a block's tensors lie: `size_bytes` from `first_byte` of the file; their SHA-256."""

    block: Block
    file: str
    first_byte: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank has written, durable when the part is visible: one file of whole blocks."""

    file: FileEntry
    blocks: tuple[BlockEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A complete checkpoint. Raises ValueError unless it has every block of its layout once.

    `step`: steps committed, so the next one to do; `ticket`: transactions; `num_updates`: of the
    optimizer, fewer than steps where some were skipped; `last_loss` None: of no step yet.
    `identity`: what the run depends on (core/run_identity.py). `layout` as it was: for information.
    """

    job: str
    id: CheckpointId
    ticket: int
    num_updates: int
    last_loss: float | None
    identity: Identity
    layout: Layout
    files: tuple[FileEntry, ...]
    blocks: tuple[BlockEntry, ...]

    def __post_init__(self) -> None:
        if tuple(entry.block for entry in self.blocks) != tuple(self.layout.blocks()):
            raise ValueError("the blocks are not those of the layout, each once, in order")
        if self.id.generation != self.layout.generation or self.num_updates < 0:
            raise ValueError("generation or number of updates is wrong")
        if [file.name for file in self.files] != sorted({file.name for file in self.files}):
            raise ValueError("files must have names of their own, in order")
        for file in self.files:
            _check_file(file, [entry for entry in self.blocks if entry.file == file.name])
        strangers = {entry.file for entry in self.blocks} - {file.name for file in self.files}
        if strangers:
            raise ValueError(f"no such files: {sorted(strangers)}")

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size_bytes for file in self.files)


def _check_file(file: FileEntry, blocks: list[BlockEntry]) -> None:
    """Blocks lie side by side up to the file's end; before them is the header."""
    spans = sorted((b.first_byte, b.first_byte + b.size_bytes) for b in blocks)
    is_whole = bool(spans) and spans[-1][1] == file.size_bytes and spans[0][0] > 0
    if not is_whole or any(one[1] != other[0] for one, other in pairwise(spans)):
        raise ValueError(f"{file.name}: its blocks do not fill it")
    if "/" in file.name or not all(_HEX.fullmatch(d) for d in _digests(file, blocks)):
        raise ValueError(f"{file.name}: not the name of a file, or not digests")


def _digests(file: FileEntry, blocks: list[BlockEntry]) -> list[str]:
    return [file.header_sha256, *(block.sha256 for block in blocks)]


def block_name(block: Block) -> str:
    """The beginning of the names of its tensors: identity is read, never assumed."""
    return f"{block.kind}.{block.layer}.{block.index}"


def part_name(rank: int) -> str:
    """The file that says what `rank` has written."""
    return f"part-{rank}.json"


def rank_of_part(name: str) -> int | None:
    """The rank whose part a file is; None for other files."""
    found = _PART.fullmatch(name)
    return None if found is None else int(found[1])


def gather(
    parts: Iterable[Part], layout: Layout
) -> tuple[tuple[FileEntry, ...], tuple[BlockEntry, ...]]:
    """Files and blocks of a manifest from what the ranks have written, in its order.

    Raises ValueError for a block that the layout lacks.
    """
    parts = tuple(parts)
    order = {block: i for i, block in enumerate(layout.blocks())}
    blocks = [entry for part in parts for entry in part.blocks]
    if any(entry.block not in order for entry in blocks):
        raise ValueError("a part has blocks of another model")
    files = sorted((part.file for part in parts), key=lambda file: file.name)
    return tuple(files), tuple(sorted(blocks, key=lambda entry: order[entry.block]))


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON text with a digest of its own: equal manifests give equal bytes."""
    return _seal(
        {
            "job": manifest.job,
            "id": asdict(manifest.id),
            "ticket": manifest.ticket,
            "num_updates": manifest.num_updates,
            "last_loss": manifest.last_loss,
            "identity": dict(manifest.identity),
            "layout": json.loads(encode_layout(manifest.layout)),
            "files": [asdict(file) for file in manifest.files],
            "blocks": [_plain(entry) for entry in manifest.blocks],
        }
    )


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in `data`. Raises ValueError, saying what is wrong, for anything else."""
    body = _unseal(data)
    try:
        return Manifest(
            job=str(body["job"]),
            id=CheckpointId(**{name: int(body["id"][name]) for name in body["id"]}),
            ticket=int(body["ticket"]),
            num_updates=int(body["num_updates"]),
            last_loss=None if body["last_loss"] is None else float(body["last_loss"]),
            identity=dict(body["identity"]),
            layout=decode_layout(json.dumps(body["layout"]).encode()),
            files=tuple(FileEntry(**file) for file in body["files"]),
            blocks=tuple(_entry(plain) for plain in body["blocks"]),
        )
    except (AttributeError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ValueError(f"not a manifest: {error!r}") from None


def encode_part(part: Part) -> bytes:
    """JSON text with a digest of its own."""
    return _seal({"file": asdict(part.file), "blocks": [_plain(entry) for entry in part.blocks]})


def decode_part(data: bytes) -> Part:
    """The part in `data`. Raises ValueError for anything else."""
    body = _unseal(data)
    try:
        return Part(
            file=FileEntry(**body["file"]),
            blocks=tuple(_entry(plain) for plain in body["blocks"]),
        )
    except (AttributeError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"not a part: {error!r}") from None


def _plain(entry: BlockEntry) -> dict[str, Any]:
    block = entry.block
    return asdict(entry) | {"block": [str(block.kind), block.layer, block.index]}


def _entry(plain: dict[str, Any]) -> BlockEntry:
    kind, layer, index = plain["block"]
    return BlockEntry(**(plain | {"block": Block(BlockKind(kind), layer, index)}))


def _seal(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"format":{FORMAT},"sha256":"{digest}","body":{text}}}\n'.encode()


def _unseal(data: bytes) -> Any:
    """The body, if it is the one that was sealed."""
    try:
        document: Any = json.loads(data)
        found, digest, body = document["format"], document["sha256"], document["body"]
        text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"not one of our documents: {error}") from None
    if found != FORMAT:
        raise ValueError(f"format {found}, this side reads {FORMAT}")
    # Byte by byte: JSON has several forms of one number.
    if hashlib.sha256(text.encode()).hexdigest() != digest or _seal(body) != data:
        raise ValueError("its checksum is wrong: it is torn or was changed")
    return body
