"""Which families of transformers the engine trains, moves and saves; writes docs/models.md.

`PYTHONPATH=tests python -m benchmarks.model_families`; five to ten minutes. Builds a tiny model of
each family with the experts interface, in float64, and compares it with the library's own model and
its own loop over experts, in one process:
- `forward`, `backward`: loss, and gradients of all parameters, of the engine in one process;
- `replicas`: the same on two ranks that both hold every expert;
- `move`: three steps of AdamW with two changes of the layout to random replicas and shares: losses
  and all parameters at the end;
- `tensor`: one step on a tensor group of two ranks, of which one has three of four virtual shards
  of attention, dense MLPs and shared experts;
- `pipeline`: one step on two stages, cut in the middle, with two micro-batches;
- `checkpoint`: the ranks' blocks are exported, loaded by `from_pretrained`, and read back block by
  block, without a different tensor.
Ranks are threads of one process. An error is the largest of a tensor, relative to its largest value
(or to a millionth of the largest of all). It must be at most 1e-9, and 1e-12 for `tensor` and
`pipeline`. Prints a table, then one line of JSON; ends with 1 where a family that must work fails,
or where tensor groups or stages are right for too few families.
"""

import argparse
import json
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.tiny_families import EXPERTS, VOCABULARY, families, tiny_config
from benchmarks.wide_floats import use_float64
from pacekeeper.core.errors import ConfigError, PacekeeperError
from pacekeeper.core.layout.layout import Block, BlockKind, Layout, ShardRun
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.micro_batches import MicroBatch, cross_entropy
from pacekeeper.trainer.engine.values import EngineOptions
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.blocks import BlockStore
from pacekeeper.trainer.model.checkpoint_reader import CheckpointReader
from pacekeeper.trainer.model.checkpoint_writer import CheckpointWriter, writer_groups
from pacekeeper.trainer.model.initialization import SeededInitialization
from pacekeeper.trainer.model.packing import packed_arguments, packing_of
from pacekeeper.trainer.model.routers import routers
from pacekeeper.trainer.model.skeleton import Skeleton, build_skeleton
from pacekeeper.trainer.parallel.layouts import start_layout
from support.engines import random_layout
from support.rank_threads import ThreadGroup, run_ranks

BAR, MESH_BAR = 1e-9, 1e-12
CHECKS = ("forward", "backward", "replicas", "move", "tensor", "pipeline", "checkpoint")
MESHES = ("tensor", "pipeline")
ENOUGH, ENOUGH_OF = 56, {"tensor": 35, "pipeline": 40}
REQUIRED = (
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "olmoe",
    "minimax_m2",
    "qwen3_next",
)
RANKS, STEPS, ROWS, TOKENS = 2, 3, 5, 12
OWN_ROWS = ((0, 3), (3, 5))
SHARDS = 4
RUNS = ((0, 3), (3, 4))
DOCUMENTS = ((5, 7), (12,), (3, 4, 5))
# Why a family cannot work, where the measured failure does not tell.
KNOWN = {
    "diffusion_gemma": "trains by diffusion: without a canvas its forward pass draws a random one",
}
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
_SHORT = {BlockKind.ATTENTION: "attention", BlockKind.DENSE_MLP: "MLPs"}
_DRAWING = threading.Lock()  # weights are drawn from torch's global generator


class RoughWeights:
    """A new model's blocks, with noise on every tensor: nothing is zero, one or alike.

    Except ZAYA's biases of routers, the last of which the library sets to -1 whenever it loads.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self._source = SeededInitialization(skeleton, 3)
        self._skeleton = skeleton

    @property
    def fingerprint(self) -> str:
        """The same on all ranks."""
        return "rough"

    def tensors(self, block: Block) -> dict[str, Tensor]:
        with _DRAWING:
            return {
                name: value + 0.05 * self._noise(block, name, value)
                if value.is_floating_point() and not name.endswith("balancing_biases")
                else value
                for name, value in self._source.tensors(block).items()
            }

    def _noise(self, block: Block, name: str, like: Tensor) -> Tensor:
        """Noise for a tensor of a block: of shards, that of the whole tensor."""
        cut = self._skeleton.cuts.get(name)
        place = f"{name}/{block.index}" if block.kind is BlockKind.EXPERT else name
        seed = int.from_bytes(blake2b(place.encode(), digest_size=4).digest(), "little")
        shape = like.shape if cut is None else self._skeleton.specs[name].shape
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(shape, generator=generator, dtype=like.dtype)
        return whole if cut is None else cut.piece(whole, block.index, cut.num_shards)


def rows_of(step: int) -> Tensor:
    """The global batch of a step, with the token after each row."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(3, VOCABULARY - 6, (ROWS, TOKENS + 1), generator=generator)


def micro_batch(rows: Tensor) -> MicroBatch:
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


class Reference:
    """The library's model, its own loop over experts, torch's AdamW: one process."""

    def __init__(self, config: Any) -> None:
        skeleton = build_skeleton(config, torch.float64)
        store = BlockStore(skeleton, num_slots=EXPERTS)
        held = [{e: e for e in range(EXPERTS)} if one else {} for one in skeleton.experts]
        store.materialize(held, RoughWeights(skeleton))
        for one in skeleton.experts:
            if one is not None:
                library.use_library_experts(one.module, "eager")
        self.skeleton = skeleton
        self.model = skeleton.module.train()
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        optimizer = adamw(named.values())
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}
        for step in range(STEPS):
            batch = micro_batch(rows_of(step))
            logits = self.model(input_ids=batch["input_ids"], use_cache=False).logits
            loss = cross_entropy(logits, batch) / batch["labels"].numel()
            optimizer.zero_grad()
            loss.backward()
            if step == 0:
                self.gradients = {
                    name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                    for name, p in named.items()
                }
            optimizer.step()
            self.losses.append(loss.item())
        self.parameters = {name: p.detach() for name, p in named.items()}

    def packing(self) -> str:
        """How documents of a row are kept apart, or "no"."""
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
        rows = rows_of(9)[: len(DOCUMENTS), :-1]
        self.model.eval()
        try:
            given = packed_arguments(self.skeleton, positions, torch.float64)
        except PacekeeperError:
            return "no"
        with torch.no_grad():
            packed = self.model(input_ids=rows, use_cache=False, **given).logits
            for row, lengths in enumerate(DOCUMENTS):
                ends = torch.tensor(lengths).cumsum(0).tolist()
                for first, end in zip([0, *ends[:-1]], ends, strict=True):
                    alone = self.model(input_ids=rows[row : row + 1, first:end], use_cache=False)
                    if error_of(packed[row, first:end], alone.logits[0], 0.0) > BAR:
                        return "not kept apart, against the table of families"
        return str(packing_of(self.skeleton))


def error_of(value: Tensor, expected: Tensor, least: float) -> float:
    """The largest difference, relative to the largest expected value, at least `least`."""
    if not expected.numel():
        return 0.0
    scale = max(float(expected.abs().max()), least, 1e-30)
    worst = float((value - expected).abs().max()) / scale
    return worst if worst == worst else float("inf")


def errors_of(engine: Engine, values: Mapping[str, Tensor], wholes: Mapping[str, Tensor]) -> float:
    """The worst error of tensors shaped like the engine's parameters, by name."""
    least = 1e-6 * max(float(whole.abs().max()) for whole in wholes.values())
    worst = 0.0
    for block in engine.store.blocks():
        for name, part in engine.store.parts(block).items():
            if name in values:
                expected = wholes[name]
                if block.kind is BlockKind.EXPERT:
                    expected = expected[block.index]
                elif part.cut is not None:
                    expected = part.cut.piece(expected, block.index, part.cut.num_shards)
                worst = max(worst, error_of(part.of(values[name]), expected, least))
    return worst


def mesh_of(skeleton: Skeleton, mesh: str) -> Layout:
    """Two ranks: a tensor group with uneven runs, or two stages."""
    counts = [EXPERTS if one else 0 for one in skeleton.experts]
    if mesh == "pipeline":
        return start_layout(counts, range(RANKS), num_stages=RANKS)
    layout = start_layout(
        counts,
        range(RANKS),
        tensor_size=RANKS,
        num_attention_shards=SHARDS,
        num_mlp_shards=SHARDS,
        shared_mlp_layers=skeleton.shared_mlp_layers,
    )
    (pipeline,) = layout.pipelines
    (stage,) = pipeline.stages
    runs = tuple(ShardRun(rank, *run) for rank, run in zip(stage.group, RUNS, strict=True))
    uneven = replace(pipeline, stages=(replace(stage, attention=runs, mlp=runs),))
    return replace(layout, pipelines=(uneven,))


def mesh_error(config: Any, reference: Reference, mesh: str, group: ThreadGroup) -> float:
    """Make one step on stages or a tensor group; the worst error of loss and gradients."""
    shards = SHARDS if mesh == "tensor" else 1
    with _DRAWING:
        skeleton = build_skeleton(
            config, torch.float64, num_attention_shards=shards, num_mlp_shards=shards
        )
        source = RoughWeights(skeleton)
    engine = Engine(
        skeleton,
        source,
        layout=mesh_of(skeleton, mesh),
        groups=EngineGroups(exchange=group, gradients=group, control=group, snapshots=group),
        options=EngineOptions(num_slots=EXPERTS),
    )
    engine.add_optimizer(adamw(engine.parameters()))
    prepared = engine.prepare_step([micro_batch(rows) for rows in rows_of(0).split(3)])
    kept = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in engine.model.named_parameters()
        if p.requires_grad and not p.is_meta
    }
    loss = abs(prepared.result.loss.item() / reference.losses[0] - 1.0)
    return max(loss, errors_of(engine, kept, reference.gradients))


def what_is_cut(skeleton: Skeleton) -> str:
    """Whether a tensor group divides all attention, MLPs and shared experts, or only some."""
    parts = [
        (kind, {one.is_cut for one in skeleton.regions if one.kind is kind})
        for kind in (BlockKind.ATTENTION, BlockKind.DENSE_MLP)
    ]
    words = {
        kind: "some" if len(found) == 2 else "all" if True in found else "none"
        for kind, found in parts
        if found
    }
    if set(words.values()) == {"all"}:
        return "all"
    return ", ".join(f"{word} of {_SHORT[kind]}" for kind, word in words.items())


def train(config: Any, reference: Reference, group: ThreadGroup | None) -> tuple[Engine, Any]:
    """Train on the engine; the worst errors of the first step and of all."""
    size = len(group.ranks) if group else 1
    rank = group.rank if group else 0
    with _DRAWING:
        skeleton = build_skeleton(config, torch.float64)
        source = RoughWeights(skeleton)
    counts = [EXPERTS if one else 0 for one in skeleton.experts]
    engine = Engine(
        skeleton,
        source,
        layout=start_layout(counts, range(size), replicas=size),
        groups=EngineGroups(exchange=group, gradients=group, control=group, snapshots=group)
        if group
        else None,
        options=EngineOptions(num_slots=EXPERTS),
    )
    optimizer = adamw(engine.parameters())
    engine.add_optimizer(optimizer)
    found: dict[str, float] = {}

    def on_step(*_: object) -> None:
        if engine.num_steps == 0:
            own = {name: p.grad for name, p in engine.model.named_parameters() if p.requires_grad}
            kept = {name: grad for name, grad in own.items() if grad is not None}
            found["gradients"] = errors_of(engine, kept, reference.gradients)

    optimizer.register_step_pre_hook(on_step)
    chosen = Random(5)
    losses = []
    for step in range(STEPS):
        if step and group:
            engine.apply(random_layout(engine.layout, chosen))
        first, end = OWN_ROWS[rank] if group else (0, ROWS)
        result = engine.step([micro_batch(rows_of(step)[first:end])])
        losses.append(abs(result.loss.item() / reference.losses[step] - 1.0))
    own = {name: p.detach() for name, p in engine.model.named_parameters() if p.requires_grad}
    found["parameters"] = errors_of(engine, own, reference.parameters)
    found["loss"], found["losses"] = losses[0], max(losses)
    return engine, found


def checkpoint_differences(engines: list[Engine], folder: Path) -> tuple[list[str], str]:
    """Export what the ranks hold and load it again.

    Returns:
        The names of tensors that differ, and what is read for one expert.
    """
    skeleton = engines[0].skeleton
    groups = writer_groups(skeleton)
    holders: dict[Block, Engine] = {}
    for engine in reversed(engines):
        holders |= dict.fromkeys(engine.store.blocks(), engine)
    writers = {block: number % RANKS for number, one in enumerate(groups) for block in one.blocks}
    ranks = [
        CheckpointWriter(skeleton, folder, writers=writers, rank=rank, max_file_bytes=200_000)
        for rank in range(RANKS)
    ]
    for writer in ranks:
        for block in sorted(writer.remaining):
            writer.write(block, holders[block].store.read(block))
        writer.finish()
    ranks[0].commit()
    kind: Any = type(skeleton.module)
    loaded, report = kind.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    wrong = [
        str(name)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        for name in report[kind]
    ]
    theirs = loaded.state_dict()
    reader = CheckpointReader(build_skeleton(folder, torch.float64), folder)
    for block, holder in holders.items():
        read = reader.tensors(block)
        for name, own in holder.store.read(block).items():
            whole = theirs[name]
            there = whole[block.index] if block.kind is BlockKind.EXPERT else whole
            if not torch.equal(own, there) or not torch.equal(own, read[name]):
                wrong.append(name)
    return wrong, "expert" if reader.reads_single_experts else "layer"


def check_family(model_type: str) -> dict[str, Any]:
    """All checks of one family; what failed is in `reasons`."""
    use_float64()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found: dict[str, Any] = {"type": model_type, "reasons": {}}
    if model_type in KNOWN:
        found["reasons"]["known"] = KNOWN[model_type]
        return found
    try:
        found |= _check(model_type, found["reasons"])
    except Exception as error:
        found["reasons"]["error"] = _reason(error)
    return found


def _check_named(given: tuple[str, str]) -> tuple[str, dict[str, Any]]:
    family, model_type = given
    return family, check_family(model_type)


def _check(model_type: str, reasons: dict[str, str]) -> dict[str, Any]:
    config = tiny_config(model_type)
    reference = Reference(config)
    skeleton = reference.skeleton
    experts = [one for one in skeleton.experts if one is not None]
    found: dict[str, Any] = {
        "class": type(skeleton.module).__name__,
        "stacked": list(experts[0].parameters),
        "routers": all(routers(skeleton)[one.layer] for one in experts),
        "meshes": {},
    }
    _, alone = train(config, reference, None)
    ranks = run_ranks(RANKS, lambda group: train(config, reference, group))
    worst = {key: max(errors[key] for _, errors in ranks) for key in alone}
    errors = {
        "forward": alone["loss"],
        "backward": alone["gradients"],
        "replicas": max(worst["loss"], worst["gradients"]),
        "move": max(worst["losses"], worst["parameters"]),
    }
    found["errors"] = errors
    for mesh in MESHES:
        try:
            errors[mesh] = max(run_ranks(RANKS, partial(mesh_error, config, reference, mesh)))
            if not errors[mesh] <= MESH_BAR:
                found["meshes"][mesh] = f"an error of {errors[mesh]:.1e}"
        except Exception as failure:
            found["meshes"][mesh] = _reason(failure)
    if "tensor" not in found["meshes"]:
        divided = build_skeleton(config, num_attention_shards=SHARDS, num_mlp_shards=SHARDS)
        found["divided"] = what_is_cut(divided)
    for check, error in errors.items():
        if check not in MESHES and not error <= BAR:
            reasons[check] = f"an error of {error:.1e}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            different, found["reads"] = checkpoint_differences(
                [one for one, _ in ranks], Path(folder)
            )
            if different:
                names = ", ".join(sorted(set(different))[:3])
                reasons["checkpoint"] = f"{len(different)} tensors differ, as {names}"
        except Exception as error:
            reasons["checkpoint"] = _reason(error)
    try:
        found["packing"] = reference.packing()
    except Exception as error:
        found["packing"] = _reason(error)
    return found


def _reason(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return f"refused: {error.what}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """docs/models.md."""
    working = sum(not one["reasons"] for one in results.values())
    lines = [
        "# Models",
        "",
        "<!-- Generated by `python -m benchmarks.model_families`: do not edit. -->",
        "",
        f"The engine trains families of transformers {transformers.__version__} that have the "
        f"experts interface: {len(results)} modeling files, of which {working} work. Each was "
        "built tiny and compared in float64 with the library's own model in one process "
        "(losses, gradients and parameters within 1e-9): on one rank, with replicas on two "
        "ranks, with experts that move between steps, and through a Hugging Face checkpoint "
        "written by two ranks, loaded by `from_pretrained` and read back block by block. Nothing "
        "of this page was run with the published weights, or on CUDA.",
        "",
        "One step was made on a tensor group of two ranks with uneven runs of virtual shards "
        f"({tensor_ok(results)} families have equal gradients, within 1e-12, and divide all "
        "attention and dense MLPs), and on two pipeline stages "
        f"({pipeline_ok(results)} families).",
        "",
        "Families without the interface (Llama 4, DBRX, JetMoE, ...) are refused. Dense models are "
        "trained; their rows, shards and layers can move.",
        "",
        "- *tensor*: what a tensor group divides: `all` attention, dense MLPs and shared experts, "
        "or some; the rest every rank of the group computes as a whole. `no`: not on tensor "
        "groups.",
        "- *stages*: whether it runs on pipeline stages.",
        "- *router*: whether logits of all experts reach a load-balancing loss.",
        "- *read by*: what is read of a checkpoint for one expert: the expert, or its layer's.",
        "- *packing*: how documents of one row are kept apart: by `positions` that start again, by "
        "`masks` (`packed_arguments` makes them), or not at all (states or convolutions run along "
        "the row, or attention takes no positions).",
        "",
        "| family | model type | class | works | tensor | stages | read by | router | packing "
        "| what fails |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for family, one in results.items():
        reasons = "; ".join(
            why if what == "known" else f"{what}: {why}"
            for what, why in (one["reasons"] | one.get("meshes", {})).items()
        )
        cells = [
            family,
            f"`{one['type']}`",
            f"`{one['class']}`" if "class" in one else "",
            "no" if one["reasons"] else "yes",
            one.get("divided", "no"),
            "yes" if "pipeline" not in one.get("meshes", {"pipeline": ""}) else "no",
            one.get("reads", "-"),
            "yes" if one.get("routers") else "no",
            one.get("packing", "") or "-",
            reasons.replace("|", "/"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def tensor_ok(results: Mapping[str, Mapping[str, Any]]) -> int:
    """Families of which a tensor group divides all, with the gradients of one process."""
    return sum(one.get("divided") == "all" for one in results.values())


def pipeline_ok(results: Mapping[str, Mapping[str, Any]]) -> int:
    """Families that have the gradients of one process on two stages."""
    return sum("pipeline" not in one.get("meshes", {"pipeline": ""}) for one in results.values())


def results_of(chosen: Mapping[str, str], jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Check families in processes of their own."""
    with get_context("spawn").Pool(jobs, maxtasksperchild=8) as pool:
        yield from pool.imap_unordered(_check_named, chosen.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="not used: all data is made here")
    parser.add_argument(
        "--families", nargs="+", metavar="FAMILY", help="default: all, and the page"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args()
    known = families()
    chosen = {one: known[one] for one in options.families or known}
    results: dict[str, dict[str, Any]] = {}
    for family, found in results_of(chosen, options.jobs):
        results[family] = found
        failures = found["reasons"] | found.get("meshes", {})
        print(family, found.get("errors"), failures or "ok", file=sys.stderr, flush=True)
    results = {family: results[family] for family in sorted(results)}
    table = Table("family", *CHECKS[:-1], "checkpoint", "packing", "fails")
    for family, one in results.items():
        errors = [f"{one.get('errors', {}).get(what, float('nan')):.0e}" for what in CHECKS[:-1]]
        kept = "no" if "checkpoint" in one["reasons"] or "errors" not in one else "equal"
        fails = " ".join(one["reasons"] | one.get("meshes", {}))
        table.add_row(family, *errors, kept, one.get("packing", ""), fails)
    Console(width=150).print(table)
    failed = {family: one["reasons"] for family, one in results.items() if one["reasons"]}
    if not options.families:
        PAGE.write_text(page(results))
    print(
        json.dumps(
            {
                "bar": BAR,
                "families": len(results),
                "experts_ok": len(results) - len(failed),
                "tensor_ok": tensor_ok(results),
                "tensor_in_part": sum("divided" in one for one in results.values())
                - tensor_ok(results),
                "pipeline_ok": pipeline_ok(results),
                "failed": failed,
                "failed_meshes": {
                    family: one["meshes"] for family, one in results.items() if one.get("meshes")
                },
            }
        )
    )
    is_good = not set(failed) & set(REQUIRED)
    if not options.families:
        enough = (
            (len(results) - len(failed), ENOUGH),
            (tensor_ok(results), ENOUGH_OF["tensor"]),
            (pipeline_ok(results), ENOUGH_OF["pipeline"]),
        )
        is_good &= all(count >= least for count, least in enough)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
