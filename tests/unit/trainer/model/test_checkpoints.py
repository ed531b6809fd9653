"""Hugging Face checkpoints, block by block: what is written loads, what is wrong is refused."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmarks import tiny_families as families
from safetensors.torch import load_file, save_file

from pacekeeper.core.errors import ConfigError, DataError, HostError
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.model.blocks import BlockStore, Holding
from pacekeeper.trainer.model.checkpoint_reader import INDEX, CheckpointReader
from pacekeeper.trainer.model.checkpoint_writer import CheckpointWriter, writer_groups
from pacekeeper.trainer.model.initialization import SeededInitialization
from pacekeeper.trainer.model.skeleton import Skeleton, build_skeleton
from support.tiny_models import tiny_config, whole_store

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]


def writers_of(skeleton: Skeleton, num_ranks: int) -> dict[Block, int]:
    groups = enumerate(writer_groups(skeleton))
    return {block: number % num_ranks for number, group in groups for block in group.blocks}


def export(store: BlockStore, folder: Path, num_ranks: int = 2, **options: int) -> Path:
    """Write a store's blocks as `num_ranks` ranks would, the last rank first."""
    writers = writers_of(store.skeleton, num_ranks)
    ranks = [
        CheckpointWriter(store.skeleton, folder, writers=writers, rank=rank, **options)  # type: ignore[arg-type]
        for rank in range(num_ranks)
    ]
    for writer in reversed(ranks):
        for block in sorted(writer.remaining, reverse=True):
            writer.write(block, store.read(block))
        writer.finish()
    assert not (folder / INDEX).exists()
    ranks[0].commit()
    return folder


def held_by(skeleton: Skeleton, experts: Mapping[int, int]) -> list[dict[int, int]]:
    return [dict(experts) if one else {} for one in skeleton.experts]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_loads_in_the_library_without_a_difference(family: str, tmp_path: Path) -> None:
    store = whole_store(family)
    folder = export(store, tmp_path / "out", max_file_bytes=100_000)
    files = sorted(one.name for one in folder.iterdir())
    assert len(files) > 3  # shards, index and config.json, and nothing else
    assert not any(name.startswith(".") for name in files)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = store.skeleton.module.state_dict()
    theirs = loaded.state_dict()
    assert theirs.keys() == ours.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_its_blocks_of_a_checkpoint_of_the_library(
    family: str, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**tiny_config(family))
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path)
    skeleton = build_skeleton(tmp_path, num_attention_shards=shards, num_mlp_shards=shards)
    store = BlockStore(skeleton, num_slots=2)
    reader = CheckpointReader(skeleton, tmp_path)
    holding = Holding.everything(skeleton)
    if shards > 1:
        holding = replace(holding, attention=range(1, 4), mlp=range(1), has_embedding=False)
    read: list[torch.Tensor] = []
    original = CheckpointReader._tensor

    def counted(self: CheckpointReader, *place: object) -> torch.Tensor:
        read.append(original(self, *place))  # type: ignore[arg-type]
        return read[-1]

    monkeypatch.setattr(CheckpointReader, "_tensor", counted)
    store.materialize(held_by(skeleton, {3: 0, 1: 1}), reader, holding)
    for block in store.blocks():
        for name, value in store.read(block).items():
            part = theirs.state_dict()[name]
            if block.kind is BlockKind.EXPERT:
                part = part[block.index]
            elif name in skeleton.cuts:
                part = skeleton.cuts[name].piece(part, block.index, shards)
            assert torch.equal(value, part), name
    held = sum(value.numel() for block in store.blocks() for value in store.read(block).values())
    assert sum(one.numel() for one in read) == held  # no byte of another expert or shard


def parted(family: str, folder: Path | None = None) -> list[BlockStore]:
    """A model on two stages, each a tensor group with uneven runs: one rank without an MLP."""
    stores = []
    for layers in (range(1), range(1, 2)):
        for attention, mlp in ((range(3), range(4)), (range(3, 4), range(0))):
            skeleton = build_skeleton(
                folder or tiny_config(family), num_attention_shards=4, num_mlp_shards=4
            )
            holding = Holding(
                layers=layers,
                attention=attention,
                mlp=mlp,
                has_embedding=layers.start == 0,
                has_head=layers.start == 1,
            )
            held = [
                {2 * (n % 2) + (not mlp): 0} if one and n in layers else {}
                for n, one in enumerate(skeleton.experts)
            ]
            source = CheckpointReader(skeleton, folder) if folder else RoughSource(skeleton)
            stores.append(BlockStore(skeleton, num_slots=2))
            stores[-1].materialize(held, source, holding)
    return stores


class RoughSource(SeededInitialization):
    """Blocks in which no tensor is constant."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__(skeleton, 4)

    def tensors(self, block: Block) -> dict[str, torch.Tensor]:
        drawn = super().tensors(block)
        return {
            name: value + 0.01 * torch.arange(value.numel()).view_as(value)
            for name, value in drawn.items()
        }


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_and_uneven_runs_export_one_checkpoint_and_read_their_parts_of_it(
    family: str, tmp_path: Path
) -> None:
    stores = parted(family)
    holders = {block: store for store in stores for block in store.blocks()}
    skeleton = stores[0].skeleton
    source = RoughSource(skeleton)
    writers = writers_of(skeleton, 2)
    ranks = [CheckpointWriter(skeleton, tmp_path, writers=writers, rank=rank) for rank in range(2)]
    for writer in ranks:
        for block in sorted(writer.remaining):
            held = holders[block].read(block) if block in holders else source.tensors(block)
            writer.write(block, held)
        writer.finish()
    ranks[0].commit()
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = loaded.state_dict()
    for name, cut in skeleton.cuts.items():
        for shard in range(4):
            layer = int(name.removeprefix(f"{skeleton.layers}.").partition(".")[0])
            own = source.tensors(Block(cut.kind, layer, shard))[name]
            assert torch.equal(cut.piece(theirs[name], shard, 4), own), name
    for old, new in zip(stores, parted(family, tmp_path), strict=True):
        assert list(old.blocks()) == list(new.blocks())
        for block in old.blocks():
            read = new.read(block)
            assert all(torch.equal(v, read[n]) for n, v in old.read(block).items()), block


@pytest.mark.parametrize(
    ("family", "largest_group"),
    [("qwen3_vl_moe", 4), ("ernie4_5_vl_moe", 6)],
    ids=["shapes_compared", "blocks_combined"],
)
def test_a_rank_with_some_experts_exports_and_reads_what_the_disk_cuts_otherwise(
    family: str, largest_group: int, tmp_path: Path
) -> None:
    """Qwen3-VL's conversion looks at the parameter's shape; Ernie's mixes experts of two kinds."""
    skeletons = [build_skeleton(families.tiny_config(family)) for _ in range(2)]
    stores = [BlockStore(skeleton, num_slots=2) for skeleton in skeletons]
    for store, held in zip(stores, ({0: 1, 2: 0}, {1: 0, 3: 1}), strict=True):
        source = SeededInitialization(store.skeleton, 4)
        store.materialize(held_by(store.skeleton, held), source)
    holders = {block: store for store in stores for block in store.blocks()}
    groups = writer_groups(skeletons[0])
    assert max(len(group.blocks) for group in groups) == largest_group
    writer = CheckpointWriter(skeletons[0], tmp_path, writers=dict.fromkeys(holders, 0))
    for block in sorted(writer.remaining):
        writer.write(block, holders[block].read(block))
    writer.finish()
    writer.commit()
    kind: Any = type(skeletons[0].module)
    loaded, report = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    reader = CheckpointReader(skeletons[1], tmp_path)
    for block, store in holders.items():
        read = reader.tensors(block)
        for name, value in store.read(block).items():
            whole = loaded.state_dict()[name]
            assert torch.equal(read[name], value), name
            assert torch.equal(whole[block.index] if whole.shape != value.shape else whole, value)


def test_what_was_exported_in_bfloat16_is_read_as_it_was_rounded(tmp_path: Path) -> None:
    store = whole_store("deepseek_v3")
    writer = CheckpointWriter(
        store.skeleton,
        tmp_path,
        writers=dict.fromkeys(store.skeleton.blocks, 0),
        dtype=torch.bfloat16,
    )
    for block in writer.remaining:
        writer.write(block, store.read(block))
    writer.finish()
    writer.commit()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    reader = CheckpointReader(build_skeleton(tmp_path), tmp_path)
    for block in store.blocks():
        for name, value in reader.tensors(block).items():
            assert value.dtype is torch.float32
            assert torch.equal(value, store.read(block)[name].bfloat16().float())


def damage_missing(folder: Path, file: Path) -> None:
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, file)


def damage_foreign(folder: Path, file: Path) -> None:
    save_file(load_file(file) | {"model.extra": torch.zeros(1)}, file)


def damage_shape(folder: Path, file: Path) -> None:
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(tensors | {name: tensors[name][:8].clone()}, file)


def damage_cut(folder: Path, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def damage_pickle(folder: Path, file: Path) -> None:
    file.rename(folder / "pytorch_model.bin")


def damage_index(folder: Path, file: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')


def damage_file_gone(folder: Path, file: Path) -> None:
    names = dict.fromkeys(load_file(file), "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


DAMAGES = [
    damage_missing,
    damage_foreign,
    damage_shape,
    damage_cut,
    damage_pickle,
    damage_index,
    damage_file_gone,
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    config = transformers.AutoConfig.for_model(**tiny_config("qwen3_moe"))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(damage: object, saved: Path, tmp_path: Path) -> None:
    assert callable(damage)
    folder = tmp_path / "damaged"
    shutil.copytree(saved, folder)
    CheckpointReader(build_skeleton(folder), folder)
    damage(folder, folder / "model.safetensors")
    with pytest.raises(DataError) as refused:
        CheckpointReader(build_skeleton(folder), folder)
    assert refused.value.remedy


def test_all_that_is_wrong_is_named_in_one_error(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(saved, folder)
    for damage in (damage_foreign, damage_shape):
        damage(folder, folder / "model.safetensors")
    with pytest.raises(DataError) as refused:
        CheckpointReader(build_skeleton(folder), folder)
    assert "model.extra" in refused.value.what
    assert "model.layers.0.self_attn.q_proj.weight" in refused.value.what


def test_a_quantized_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(DataError):
        CheckpointReader(build_skeleton(tmp_path), tmp_path)


def test_a_stack_on_disk_has_one_writer() -> None:
    assert {len(group.blocks) for group in writer_groups(build_skeleton(tiny_config("olmoe")))} == {
        1
    }
    skeleton = build_skeleton(tiny_config("gpt_oss"))
    assert max(len(group.blocks) for group in writer_groups(skeleton)) == 4
    writers = dict.fromkeys(skeleton.blocks, 0) | {Block(BlockKind.EXPERT, 0, 1): 1}
    with pytest.raises(ValueError):
        CheckpointWriter(skeleton, Path("never-made"), writers=writers)
    assert not Path("never-made").exists()


def test_a_full_disk_leaves_no_index_and_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = whole_store("qwen3_moe")
    writer = CheckpointWriter(
        store.skeleton, tmp_path, writers=dict.fromkeys(store.skeleton.blocks, 0)
    )
    first, second = sorted(writer.remaining)[:2]
    writer.write(first, store.read(first))
    name = writer._own[0].name

    class Full:
        def seek(self, place: int) -> None: ...

        def close(self) -> None: ...

        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    writer._streams[name].close()
    monkeypatch.setitem(writer._streams, name, Full())
    with pytest.raises(HostError):
        writer.write(second, store.read(second))
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_export_gets_no_index(tmp_path: Path) -> None:
    store = whole_store("qwen3_moe")
    writers = writers_of(store.skeleton, 2)
    one, two = (
        CheckpointWriter(store.skeleton, tmp_path, writers=writers, rank=rank) for rank in (0, 1)
    )
    for block in sorted(one.remaining):
        one.write(block, store.read(block))
    with pytest.raises(ValueError):
        one.write(Block(BlockKind.EMBEDDING), store.read(Block(BlockKind.EMBEDDING)))
    one.finish()
    with pytest.raises(ValueError):
        two.finish()
    with pytest.raises(HostError):
        one.commit()
    assert not (tmp_path / INDEX).exists()
    assert not (tmp_path / "config.json").exists()
    two.abort()
    one.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_not_written_over(tmp_path: Path) -> None:
    store = whole_store("qwen3_moe")
    export(store, tmp_path, num_ranks=1)
    with pytest.raises(ConfigError):
        export(store, tmp_path, num_ranks=1)


def test_tied_heads_are_written_once(tmp_path: Path) -> None:
    store = whole_store("qwen3_moe", tie_word_embeddings=True)
    export(store, tmp_path, num_ranks=1)
    names = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert "lm_head.weight" not in names
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, store.skeleton.module.get_parameter("lm_head.weight"))
    CheckpointReader(build_skeleton(tmp_path), tmp_path)
