"""Write a model's blocks as a Hugging Face checkpoint, each rank its own safetensors files.

No rank holds the model: a block is converted and written when it is given, a stacked tensor expert
by expert. All ranks compute the same plan of files; how a block gets to its writer is not known
here.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import IO

import torch

from pacekeeper.core.checkpoint.safetensors_header import TensorSpec as DiskSpec
from pacekeeper.core.checkpoint.safetensors_header import encode_header
from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.checkpoint_reader import INDEX
from pacekeeper.trainer.model.conversions import to_disk
from pacekeeper.trainer.model.skeleton import ExpertLayer, Skeleton, TensorSpec

MAX_FILE_BYTES = 5_000_000_000
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


@dataclass(frozen=True, eq=False)
class WriterGroup:
    """Blocks that share tensors on disk, so that one rank writes them.

    Attributes:
        blocks: one block; or all shards of a layer's attention or MLP; or all experts of a layer,
            where the family's checkpoints stack them; or all blocks of a layer, where they combine
            them.
        tensors: what they make on disk, in the order of the conversion; the first dimension of a
            stack is the expert.
        is_combined: whether the blocks are converted together; else one by one.
    """

    blocks: tuple[Block, ...]
    tensors: tuple[DiskSpec, ...]
    is_combined: bool = False


def writer_groups(skeleton: Skeleton, dtype: torch.dtype | None = None) -> tuple[WriterGroup, ...]:
    """Which blocks must have the same writer, and what they make on disk.

    Args:
        skeleton: the model.
        dtype: data type of floating-point tensors on disk; None: as in the model.

    Raises:
        ConfigError: the family's checkpoints combine tensors of several blocks.
    """
    groups: list[WriterGroup] = []
    for kind in (BlockKind.EMBEDDING, BlockKind.HEAD):
        specs = skeleton.blocks[Block(kind)]
        groups.append(WriterGroup((Block(kind),), _on_disk(skeleton, specs, dtype)))
    for layer in range(skeleton.num_layers):
        groups += _layer_groups(skeleton, layer, dtype)
    parts = {(spec.name, spec.shape) for group in groups for spec in group.tensors}
    whole = {(spec.name, spec.shape) for spec in _on_disk(skeleton, skeleton.specs, dtype)}
    if parts != whole:
        raise ConfigError(
            f"{skeleton.config.model_type} cannot be exported layer by layer: its checkpoints "
            f"combine tensors of several layers ({min(parts ^ whole)[0]})",
            remedy="keep checkpoints of pacekeeper's own format",
        )
    return tuple(groups)


class CheckpointWriter:
    """Writes the files of one rank.

    Args:
        skeleton: the model.
        folder: where the checkpoint is made; it must hold none yet.
        writers: the rank that writes each block, the same on all ranks; blocks of one
            `WriterGroup` have the same.
        rank: this rank.
        dtype: data type of floating-point tensors on disk; None: as in the model.
        max_file_bytes: size of a file; only a single larger tensor exceeds it.

    Raises:
        ConfigError: the folder holds a checkpoint, or the family cannot be exported.
        HostError: the folder cannot be written, or the disk is too small.
        ValueError: the blocks of a group have several writers.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        folder: Path,
        *,
        writers: Mapping[Block, int],
        rank: int = 0,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        if (folder / INDEX).exists():
            raise ConfigError(f"{folder} holds a checkpoint", remedy="give another folder")
        self._skeleton = skeleton
        self._folder = folder
        self._dtype = dtype
        groups = writer_groups(skeleton, dtype)
        self._files = _plan(groups, writers, max_file_bytes)
        self._groups = {
            block: group for group in groups for block in group.blocks if writers[block] == rank
        }
        self._left = set(self._groups)
        self._waiting: dict[Block, dict[str, torch.Tensor]] = {}  # for others of their groups
        self._own = [file for file in self._files if file.rank == rank]
        self._places = {name: place for file in self._own for name, place in file.places().items()}
        self._streams: dict[str, IO[bytes]] = {}
        with self._disk_errors():
            folder.mkdir(parents=True, exist_ok=True)
            for file in self._own:
                stream = self._streams[file.name] = (folder / file.partial).open("wb")
                os.posix_fallocate(stream.fileno(), 0, file.num_bytes)  # a full disk shows now
                stream.write(file.header)

    @property
    def remaining(self) -> frozenset[Block]:
        """The blocks that this rank has still to write."""
        return frozenset(self._left)

    def write(self, block: Block, tensors: Mapping[str, torch.Tensor]) -> None:
        """Convert and write one of this rank's blocks.

        Args:
            block: the block; in any order, each once.
            tensors: its tensors by name, as `BlockStore.read` gives them.

        Raises:
            HostError: the disk fails; this rank's files are removed.
            ValueError: the block is not this rank's, or was written.
        """
        if block not in self._left:
            raise ValueError(f"{block} is another rank's, or was written")
        group = self._groups[block]
        if group.is_combined:
            self._waiting[block] = {name: value.clone() for name, value in tensors.items()}
            if not all(one in self._waiting for one in group.blocks):
                self._left.discard(block)
                return
            parts = {one: self._waiting.pop(one) for one in group.blocks}
            given = _combined(self._skeleton, parts)
        else:
            is_expert = block.kind is BlockKind.EXPERT
            given = {name: value[None] if is_expert else value for name, value in tensors.items()}
        row = block.index if len(group.blocks) > 1 and not group.is_combined else 0
        made = to_disk(self._skeleton, given)
        with self._disk_errors():
            for spec, value in zip(group.tensors, made.values(), strict=True):
                name, at = self._places[spec.name]
                data = _bytes(value, self._dtype)
                self._streams[name].seek(at + row * len(data))
                self._streams[name].write(data)
        self._left.discard(block)

    def finish(self) -> None:
        """Complete this rank's files under their final names.

        Raises:
            HostError: the disk fails; this rank's files are removed.
            ValueError: a block was not written.
        """
        if self._left:
            raise ValueError(f"{len(self._left)} blocks were not written, as {min(self._left)}")
        with self._disk_errors():
            for file in self._own:
                stream = self._streams[file.name]
                stream.flush()
                os.fsync(stream.fileno())
                stream.close()
                (self._folder / file.partial).replace(self._folder / file.name)

    def commit(self) -> None:
        """Write the configuration and the index, which make the folder a checkpoint.

        One rank calls it, after `finish` returned on all.

        Raises:
            HostError: a rank's file is missing, or the disk fails.
        """
        for file in self._files:
            path = self._folder / file.name
            if not path.is_file() or path.stat().st_size != file.num_bytes:
                raise HostError(
                    f"{path} is missing or incomplete",
                    remedy="give all ranks the same folder of a shared file system",
                )
        index = {
            "metadata": {"total_size": sum(file.num_tensor_bytes for file in self._files)},
            "weight_map": {spec.name: file.name for file in self._files for spec in file.tensors},
        }
        with self._disk_errors():
            text = library.config_text(self._skeleton.module, self._dtype)
            _write_whole(self._folder / "config.json", text)
            _write_whole(self._folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")

    def abort(self) -> None:
        """Remove this rank's files, complete or not."""
        for stream in self._streams.values():
            with suppress(OSError):  # what it held back is lost anyway
                stream.close()
        for file in self._own:
            (self._folder / file.partial).unlink(missing_ok=True)
            (self._folder / file.name).unlink(missing_ok=True)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abort()
            raise HostError(
                f"the checkpoint cannot be written to {self._folder}: {error.strerror or error}",
                remedy="free space or give another folder; no index was written",
            ) from error


@dataclass(eq=False)
class _File:
    """A file of the checkpoint: one rank's, with tensors in this order."""

    rank: int
    tensors: list[DiskSpec] = field(default_factory=list)
    name: str = ""

    @property
    def partial(self) -> str:
        return f".{self.name}.partial"

    @property
    def header(self) -> bytes:
        return encode_header(self.tensors, {"format": "pt"})

    @property
    def num_tensor_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.tensors)

    @property
    def num_bytes(self) -> int:
        return len(self.header) + self.num_tensor_bytes

    def places(self) -> dict[str, tuple[str, int]]:
        """The file and first byte of each tensor."""
        starts = accumulate((spec.size_bytes for spec in self.tensors), initial=len(self.header))
        return {
            spec.name: (self.name, start) for spec, start in zip(self.tensors, starts, strict=False)
        }


def _plan(
    groups: Iterable[WriterGroup], writers: Mapping[Block, int], max_file_bytes: int
) -> list[_File]:
    """The files of all ranks, with names."""
    by_rank: dict[int, list[DiskSpec]] = defaultdict(list)
    for group in groups:
        ranks = {writers[block] for block in group.blocks}
        if len(ranks) > 1:
            raise ValueError(f"{group.blocks[0]} and its group have the writers {sorted(ranks)}")
        by_rank[ranks.pop()] += group.tensors
    files: list[_File] = []
    for rank, specs in sorted(by_rank.items()):
        room = 0
        for spec in specs:
            if spec.size_bytes > room or files[-1].rank != rank:
                files.append(_File(rank))
                room = max_file_bytes
            files[-1].tensors.append(spec)
            room -= spec.size_bytes
    for number, file in enumerate(files, 1):
        file.name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
    return files


def _layer_groups(skeleton: Skeleton, layer: int, dtype: torch.dtype | None) -> list[WriterGroup]:
    """The groups of a layer: block by block, or all in one where the disk combines them."""
    blocks = [
        block
        for block in skeleton.blocks
        if block.layer == layer and block.kind not in (BlockKind.EMBEDDING, BlockKind.HEAD)
    ]
    experts = skeleton.experts[layer]
    names = {name for block in blocks for name in skeleton.blocks[block]}
    together = _on_disk(skeleton, {name: skeleton.specs[name] for name in names}, dtype)
    try:
        apart = _dense_groups(skeleton, blocks, dtype)
        apart += _expert_groups(skeleton, experts, dtype) if experts else []
    except ValueError:  # of the library: a part of a combination is missing
        apart = []
    if {spec.name for group in apart for spec in group.tensors} == {one.name for one in together}:
        return apart
    return [WriterGroup(tuple(blocks), together, is_combined=True)]


def _dense_groups(
    skeleton: Skeleton, blocks: Iterable[Block], dtype: torch.dtype | None
) -> list[WriterGroup]:
    """The groups of a layer's dense blocks: shards of one kind together."""
    by_kind: dict[BlockKind, list[Block]] = defaultdict(list)
    for block in blocks:
        if block.kind is not BlockKind.EXPERT:
            by_kind[block.kind].append(block)
    groups = []
    for own in by_kind.values():
        specs = {name: skeleton.specs[name] for block in own for name in skeleton.blocks[block]}
        is_cut = any(name in skeleton.cuts for name in specs)
        tensors = _on_disk(skeleton, specs, dtype)
        groups.append(WriterGroup(tuple(own), tensors, is_combined=is_cut))
    return groups


def _combined(
    skeleton: Skeleton, blocks: Mapping[Block, Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The whole tensors of blocks: those of experts stacked, shards put together."""
    tensors: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = defaultdict(list)
    for block, own in sorted(blocks.items()):
        for name, value in own.items():
            cut = skeleton.cuts.get(name)
            if block.kind is BlockKind.EXPERT:
                stacks[name].append(value)
            elif cut is None:
                tensors[name] = value
            else:
                if name not in tensors:
                    tensors[name] = value.new_empty(skeleton.specs[name].shape)
                cut.piece(tensors[name], block.index, cut.num_shards).copy_(value)
    return tensors | {name: torch.stack(values) for name, values in stacks.items()}


def _expert_groups(
    skeleton: Skeleton, experts: ExpertLayer, dtype: torch.dtype | None
) -> list[WriterGroup]:
    """The groups of a layer's experts: one each, or one of all where the disk has stacks."""
    count = experts.num_experts
    blocks = [Block(BlockKind.EXPERT, experts.layer, expert) for expert in range(count)]
    whole = {name: skeleton.specs[name] for name in experts.tensors}
    single = {name: TensorSpec((1, *spec.shape[1:]), spec.dtype) for name, spec in whole.items()}
    of_all, of_one = _on_disk(skeleton, whole, dtype), _on_disk(skeleton, single, dtype)
    if [spec.name for spec in of_all] == [spec.name for spec in of_one]:
        return [WriterGroup(tuple(blocks), of_all)]
    # Each of one expert's tensors, for all experts in a row.
    return [WriterGroup((block,), of_all[block.index :: count][: len(of_one)]) for block in blocks]


def _on_disk(
    skeleton: Skeleton, specs: Mapping[str, TensorSpec], dtype: torch.dtype | None
) -> tuple[DiskSpec, ...]:
    """What tensors make on disk."""
    tensors = {
        name: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for name, spec in specs.items()
    }
    return tuple(
        DiskSpec(name=name, dtype=_DTYPES[_dtype_of(value, dtype)], shape=tuple(value.shape))
        for name, value in to_disk(skeleton, tensors).items()
    )


def _dtype_of(value: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and value.is_floating_point() else value.dtype


def _bytes(value: torch.Tensor, dtype: torch.dtype | None) -> bytes:
    kept = value.detach().to("cpu", _dtype_of(value, dtype)).contiguous()
    return kept.reshape(-1).view(torch.uint8).numpy().tobytes()


def _write_whole(path: Path, text: str) -> None:
    """Write a file that is either complete or not there."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
