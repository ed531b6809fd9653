"""Read blocks from a Hugging Face checkpoint in safetensors files on a local path.

Only headers are read before a block is asked for, and of a stacked tensor only the expert's slice;
of a divided one only the shard, where it lies on disk as in the model.
Checkpoints in pickle are refused; nothing is downloaded.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pacekeeper.core.errors import DataError
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.model.conversions import Conversion, conversions
from pacekeeper.trainer.model.cuts import Cut
from pacekeeper.trainer.model.skeleton import Skeleton

INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_SHOWN = 8  # names in an error


class CheckpointReader:
    """A source of blocks that reads a checkpoint.

    Args:
        skeleton: the model; its parameters may be on meta or held.
        folder: the checkpoint's folder.

    Raises:
        DataError: the folder has no safetensors files, one is damaged, tensors are missing, foreign
            or of another shape, or the checkpoint is quantized.
    """

    def __init__(self, skeleton: Skeleton, folder: Path) -> None:
        self._skeleton = skeleton
        self._folder = folder
        self._files: dict[str, Any] = {}
        if getattr(skeleton.config, "quantization_config", None) is not None:
            raise DataError(
                f"{folder}: the checkpoint is quantized", remedy="give one in float32 or bfloat16"
            )
        self._file_of = _files_of_tensors(folder)
        self._shapes = {name: self._shape(name) for name in self._file_of}
        found, foreign = conversions(skeleton, self._file_of)
        self._conversions: dict[str, Conversion] = {}
        self._sliced: set[str] = set()  # targets of which one expert can be read alone
        wrong = self._index(found)
        missing = [name for name in skeleton.specs if name not in self._conversions]
        self._check(missing, foreign, wrong)

    @property
    def fingerprint(self) -> str:
        """Files, tensors and shapes of the checkpoint, wherever it lies."""
        return repr(sorted((n, str(f), self._shapes[n]) for n, f in self._file_of.items()))

    @property
    def reads_single_experts(self) -> bool:
        """Whether an expert is read alone; else with all of its layer, layer by layer."""
        stacks = {name for one in self._skeleton.experts if one for name in one.tensors}
        return all(self._conversions[name].target in self._sliced for name in stacks)

    def tensors(self, block: Block) -> dict[str, torch.Tensor]:
        """Read the tensors of a block, in the data types of the model.

        Raises:
            DataError: a file cannot be read.
            KeyError: the model has no such block.
        """
        specs, cuts = self._skeleton.blocks[block], self._skeleton.cuts
        made: dict[str, torch.Tensor] = {}
        for name in specs:
            conversion = self._conversions[name]
            if name in cuts and conversion.is_renaming:
                ((source,),) = conversion.sources.values()
                made[name] = self._shard(source, cuts[name], block.index)
            elif name in cuts:
                whole = self._convert(conversion, None)[name]
                made[name] = cuts[name].piece(whole, block.index, cuts[name].num_shards)
            elif name not in made:
                expert = block.index if block.kind is BlockKind.EXPERT else None
                made |= self._convert(conversion, expert)
        return {name: made[name].to(spec.dtype) for name, spec in specs.items()}

    def _convert(self, conversion: Conversion, expert: int | None) -> dict[str, torch.Tensor]:
        if expert is None:
            return conversion.run(self._read(conversion, None))
        if conversion.target in self._sliced:
            made = conversion.run(self._read(conversion, expert), is_one_expert=True)
            return {name: value[0] for name, value in made.items()}
        return {
            name: value[expert]
            for name, value in conversion.run(self._read(conversion, None)).items()
        }

    def _read(self, conversion: Conversion, expert: int | None) -> dict[str, list[torch.Tensor]]:
        """The sources' tensors: all, or what `_slice_of` says of one expert."""
        read: dict[str, list[torch.Tensor]] = {}
        for pattern, names in conversion.sources.items():
            if expert is None:
                read[pattern] = [self._tensor(name) for name in names]
            elif len(names) == 1:
                read[pattern] = [self._tensor(names[0], slice(expert, expert + 1))]
            else:
                read[pattern] = [self._tensor(names[expert])]
        return read

    def _tensor(self, name: str, *at: slice) -> torch.Tensor:
        """Read a tensor, or the part of it that lies at `at`."""
        try:
            tensor = self._open(self._file_of[name]).get_slice(name)
            found: torch.Tensor = tensor[at or slice(None)]
        except (SafetensorError, OSError) as error:
            raise _damaged(self._folder / self._file_of[name], error) from error
        return found

    def _shard(self, name: str, cut: Cut, shard: int) -> torch.Tensor:
        """Read one shard of a tensor that lies on disk as in the model, and no more."""
        unit = self._shapes[name][cut.dim] // (cut.parts * cut.num_shards)
        firsts = [(part * cut.num_shards + shard) * unit for part in range(cut.parts)]
        before = (slice(None),) * cut.dim
        found = [self._tensor(name, *before, slice(first, first + unit)) for first in firsts]
        return torch.stack(found, cut.dim) if cut.parts > 1 else found[0]

    def _shape(self, name: str) -> tuple[int, ...]:
        file = self._file_of[name]
        try:
            return tuple(self._open(file).get_slice(name).get_shape())
        except SafetensorError as error:
            raise _damaged(self._folder / file, error) from error

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self._folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise _damaged(self._folder / file, error) from error
        return self._files[file]

    def _index(self, found: list[Conversion]) -> list[str]:
        """Note by the model's names what makes each tensor; the wrong ones in words."""
        wrong = []
        specs = self._skeleton.specs
        stacks = {name: one for one in self._skeleton.experts if one for name in one.tensors}
        for conversion in found:
            sources = {
                pattern: [torch.empty(self._shapes[name], device="meta") for name in names]
                for pattern, names in conversion.sources.items()
            }
            try:
                made = conversion.run(sources)
            except (RuntimeError, ValueError, IndexError) as error:
                wrong.append(f"{conversion.target}: {error}")
                continue
            for name, value in made.items():
                self._conversions[name] = conversion
                if name in specs and tuple(value.shape) != specs[name].shape:
                    wrong.append(f"{name}: {tuple(value.shape)} instead of {specs[name].shape}")
            experts = stacks.get(conversion.target)
            if experts and self._can_slice(conversion, experts.num_experts):
                self._sliced.add(conversion.target)
        return wrong

    def _can_slice(self, conversion: Conversion, num_experts: int) -> bool:
        """Whether the conversion of one expert's sources makes one expert of each tensor."""
        part: dict[str, list[torch.Tensor]] = {}
        for pattern, names in conversion.sources.items():
            shape = self._shapes[names[0]]
            if len(names) == 1 and shape[:1] == (num_experts,):
                shape = (1, *shape[1:])
            elif len(names) != num_experts:
                return False
            part[pattern] = [torch.empty(shape, device="meta")]
        try:
            made = conversion.run(part, is_one_expert=True)
        except (RuntimeError, ValueError, IndexError, KeyError):
            return False
        specs = self._skeleton.specs
        return all(
            tuple(value.shape) == (1, *specs[name].shape[1:]) for name, value in made.items()
        )

    def _check(self, missing: list[str], foreign: list[str], wrong: list[str]) -> None:
        kinds = {"missing": missing, "foreign": foreign, "wrong": wrong}
        if any(kinds.values()):
            named = "; ".join(
                f"{len(names)} {kind} ({', '.join(sorted(names)[:_SHOWN])}"
                f"{', ...' if len(names) > _SHOWN else ''})"
                for kind, names in kinds.items()
                if names
            )
            raise DataError(
                f"{self._folder} is no checkpoint of this {self._skeleton.config.model_type}: "
                f"tensors {named}",
                remedy="give the checkpoint's own config.json, or another checkpoint",
            )


def _files_of_tensors(folder: Path) -> Mapping[str, str]:
    """The file of each tensor on disk."""
    if (folder / INDEX).is_file():
        try:
            names = json.loads((folder / INDEX).read_text())["weight_map"]
            files = {str(name): str(file) for name, file in names.items()}
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise _damaged(folder / INDEX, error) from error
        outside = sorted({file for file in files.values() if Path(file).name != file})
        if outside:
            raise DataError(
                f"{folder / INDEX} names files outside of its folder: {outside[0]}",
                remedy="give a checkpoint whose files lie in one folder",
            )
        return files
    if (folder / _WHOLE).is_file():
        try:
            with safe_open(folder / _WHOLE, framework="pt") as file:
                return dict.fromkeys(file.keys(), _WHOLE)
        except (SafetensorError, OSError) as error:
            raise _damaged(folder / _WHOLE, error) from error
    pickles = sorted(one.name for one in folder.glob("*") if one.suffix in {".bin", ".pt", ".pth"})
    raise DataError(
        f"{folder} has no {INDEX} and no {_WHOLE}"
        + (f", only {pickles[0]}, which could run code" if pickles else ""),
        remedy="convert the checkpoint to safetensors",
    )


def _damaged(path: Path, error: BaseException) -> DataError:
    return DataError(f"{path} cannot be read: {error}", remedy="copy the checkpoint again")
