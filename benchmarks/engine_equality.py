"""Whether the engine trains as one process does, on any layout: worst relative errors in float64.

`python -m benchmarks.engine_equality`; a few minutes. The reference is the model of transformers
with its own experts, torch's AdamW and gradient clipping, in one process. Against it, per family:
- `one_process`: the engine in one process;
- `four_ranks`: each expert on one of four ranks, uneven rows, one rank with none in some steps;
- `replicas`: the same with two replicas of each expert;
- `moves`: 50 steps with 20 changes of the layout to random replicas and shares, activations
  checkpointed;
- `meshes`: 200 steps with 40 changes to random stages, tensor groups, runs of shards, pipelines,
  schedules (1F1B, zero bubble), batch shares, replicas, and in every second layout or so owners of
  optimizer state and shares of the rows by stage;
- `all_at_once`: the same on eight ranks and four layers, always two pipelines of two stages of
  tensor groups of two; their ranks, runs, cuts, shares and replicas are drawn at each change;
- `without_moments`: a negative control, moves that forget the optimizer's state: it must fail.
An error is the largest of a tensor (of one expert), relative to the tensor's largest value.
Gradients are compared at every step, parameters at the end. Prints a table, then one line of JSON;
ends with 1 where an error exceeds 1e-9 or the control does not.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.random_meshes import random_mesh, random_replicas
from benchmarks.rank_processes import run_processes
from benchmarks.wide_floats import use_float64
from pacekeeper.core.layout.layout import BlockKind, Layout
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.micro_batches import MicroBatch, cross_entropy
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.skeleton import build_skeleton
from pacekeeper.trainer.parallel.layouts import start_layout

BAR = 1e-9
SHARDS = 4
NUM_EXPERTS, ROWS, ROW_TOKENS, VOCABULARY = 6, 8, 12, 96
STEPS = {
    "one_process": 6,
    "four_ranks": 6,
    "replicas": 6,
    "moves": 50,
    "meshes": 200,
    "all_at_once": 200,
    "without_moments": 12,
}
MOVES = {"moves": 20, "meshes": 40, "all_at_once": 40, "without_moments": 4}
MESHES: dict[str, tuple[int, int] | None] = {"meshes": None, "all_at_once": (2, 2)}
FEW, MANY = (4, 2), (8, 4)  # ranks, layers
CLIP, SEED = 0.5, 18
LEARNING_RATE = 3e-4  # AdamW amplifies rounding: with ten times as much, 50 steps reach 1e-6
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    num_experts_per_tok=2,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(num_experts=NUM_EXPERTS, head_dim=16, moe_intermediate_size=32),
    "mixtral": dict(num_local_experts=NUM_EXPERTS, intermediate_size=32),
    "deepseek_v3": dict(
        n_routed_experts=NUM_EXPERTS,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        intermediate_size=64,
        moe_intermediate_size=32,
        kv_lora_rank=16,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    "gpt_oss": dict(
        num_local_experts=NUM_EXPERTS,
        head_dim=16,
        intermediate_size=32,
    ),
    "olmoe": dict(num_experts=NUM_EXPERTS, intermediate_size=32),
}


def size_of(mode: str) -> tuple[int, int]:
    """Ranks and layers."""
    return MANY if mode == "all_at_once" else FEW


def config(family: str, num_layers: int) -> dict[str, Any]:
    """A tiny model of a family."""
    found = {"model_type": family, "num_hidden_layers": num_layers, **COMMON, **FAMILIES[family]}
    if family == "gpt_oss":
        found["layer_types"] = ["sliding_attention", "full_attention"] * (num_layers // 2)
    return found


def rows_of(step: int) -> Tensor:
    """The global batch: the same whatever the layout."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (ROWS, ROW_TOKENS + 1), generator=generator)


def own_rows(step: int, rank: int, size: int) -> list[MicroBatch]:
    """A rank's micro-batches: uneven, and none for one rank in every third step."""
    chosen = random.Random(step)
    cuts = sorted(chosen.randint(0, ROWS) for _ in range(size - 1))
    if size > 1 and step % 3 == 0:
        cuts[step % (size - 1)] = cuts[step % (size - 1) - 1] if step % (size - 1) else 0
    begin, end = [0, *cuts, ROWS][rank : rank + 2]
    return [micro_batch(part) for part in rows_of(step)[begin:end].split(3) if len(part)]


def micro_batch(rows: Tensor) -> MicroBatch:
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def optimizer_of(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1)


def reference(family: str, num_layers: int, steps: int, file: Path) -> list[float]:
    """Train in one process with the library's experts; write gradients and final parameters."""
    engine = Engine.from_config(config(family, num_layers), seed=SEED, dtype=torch.float64)
    names = {name: p for name, p in engine.model.named_parameters() if p.requires_grad}
    for one in engine.skeleton.experts:
        if one is not None:
            library.use_library_experts(one.module)
    optimizer = optimizer_of(list(names.values()))
    kept: dict[str, Tensor] = {}
    losses = []
    for step in range(steps):
        tokens = rows_of(step)
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        logits = engine.model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = cross_entropy(logits, batch) / batch["labels"].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(names.values()), CLIP)
        for name, p in names.items():
            kept[f"{step}/{name}"] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        optimizer.step()
        losses.append(loss.item())
        if step + 1 in STEPS.values():
            kept |= {f"after {step + 1}/{name}": p.detach().clone() for name, p in names.items()}
    save_file(kept, file)
    return losses


def layouts(mode: str, engine_layout: Layout) -> Iterator[Layout | None]:
    """The layout to change to before each step, or None."""
    counts = [len(placed) for placed in engine_layout.experts]
    chosen = random.Random(7)
    steps, moves = STEPS[mode], MOVES.get(mode, 0)
    at = set(chosen.sample(range(1, steps), moves))
    layout = engine_layout
    for step in range(steps):
        if step in at and mode in MESHES:
            layout = random_mesh(
                range(size_of(mode)[0]),
                counts,
                SHARDS,
                layout.generation + 1,
                chosen,
                layout.shared_mlp_layers,
                shape=MESHES[mode],
            )
        elif step in at:
            layout = replace(
                layout,
                generation=layout.generation + 1,
                experts=tuple(
                    tuple(random_replicas(range(size_of(mode)[0]), chosen) for _ in placed)
                    for placed in layout.experts
                ),
            )
        yield layout if step in at else None


def first_layout(family: str, mode: str, size: int) -> Layout:
    shards = SHARDS if mode in MESHES else 1
    model = config(family, size_of(mode)[1])
    skeleton = build_skeleton(model, num_attention_shards=shards, num_mlp_shards=shards)
    counts = [one.num_experts if one else 0 for one in skeleton.experts]
    if mode in MESHES:
        shared, chosen = skeleton.shared_mlp_layers, random.Random(SEED)
        return random_mesh(range(size), counts, SHARDS, 1, chosen, shared, shape=MESHES[mode])
    return start_layout(counts, range(size), 2 if mode == "replicas" else 1)


def train(
    family: str, mode: str, groups: EngineGroups | None, file: Path, losses: list[float]
) -> dict[str, float]:
    """Train on the engine; this rank's worst errors against the reference."""
    rank = groups.exchange.rank if groups else 0
    size = len(groups.exchange.ranks) if groups else 1
    engine = Engine.from_config(
        config(family, size_of(mode)[1]),
        seed=SEED,
        dtype=torch.float64,
        groups=groups,
        layout=first_layout(family, mode, size),
        num_slots=NUM_EXPERTS,
        max_grad_norm=CLIP,
        checkpoint_activations=mode == "moves",
    )
    engine.add_optimizer(optimizer := optimizer_of(engine.parameters()))
    found = {"loss": 0.0, "gradients": 0.0, "parameters": 0.0}
    with safe_open(file, "pt") as kept:

        def compare(what: str, when: str, values: Mapping[str, Tensor]) -> None:
            for block in engine.store.blocks():
                for name, part in engine.store.parts(block).items():
                    if name not in values:
                        continue
                    got, expected = part.of(values[name]), kept.get_tensor(f"{when}/{name}")
                    if block.kind is BlockKind.EXPERT:
                        expected = expected[block.index]
                    elif part.cut is not None:
                        expected = part.cut.piece(expected, block.index, part.cut.num_shards)
                    scale = expected.abs().max().clamp(min=1e-30)
                    found[what] = max(found[what], ((got - expected).abs().max() / scale).item())

        def on_step(*_: object) -> None:
            own = {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}
            compare("gradients", str(engine.num_steps), own)

        optimizer.register_step_pre_hook(on_step)
        for step, layout in enumerate(layouts(mode, engine.layout)):
            if layout is not None:
                before = [dict(held) for held in engine.store.slots]
                engine.apply(layout)
                if mode == "without_moments":
                    forget_arrived(engine, optimizer, before)
            result = engine.step(
                [micro_batch(rows_of(step)[list(own)]) for own in engine.micro_batches(ROWS, 3)]
                if mode in MESHES
                else own_rows(step, rank, size)
            )
            error = abs(result.loss.item() - losses[step]) / losses[step]
            found["loss"] = max(found["loss"], error)
        ends = {name: p.detach() for name, p in engine.model.named_parameters()}
        compare("parameters", f"after {STEPS[mode]}", ends)
    return found


def forget_arrived(
    engine: Engine, optimizer: torch.optim.Optimizer, before: list[dict[int, int]]
) -> None:
    """Zero the optimizer's state of the experts that just came."""
    for layer, (had, has) in enumerate(zip(before, engine.store.slots, strict=True)):
        for expert, slot in has.items():
            if expert not in had:
                for parameter in engine.store.stacked(layer).values():
                    for state in optimizer.state[parameter].values():
                        if state.shape == parameter.shape:
                            state[slot] = 0.0


def rank_main(rank: int, family: str, modes: list[str], folder: str) -> None:
    """One of the ranks: all modes of a family that have as many."""
    use_float64()
    store, size = f"file://{folder}/store", size_of(modes[0])[0]
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    groups = EngineGroups.from_torch(torch.device("cpu"))
    losses = json.loads(Path(folder, "losses.json").read_text())
    found = {}
    for mode in modes:
        if mode == "one_process":
            continue
        own = train(family, mode, groups, Path(folder, "reference"), losses)
        worst = groups.control.all_gather(torch.tensor(list(own.values()))).amax(0)
        found[mode] = dict(zip(own, worst.tolist(), strict=True))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def reference_main(_: int, family: str, modes: list[str], folder: str) -> None:
    """The reference, and the engine in one process."""
    use_float64()
    file = Path(folder, "reference")
    losses = reference(family, size_of(modes[0])[1], max(STEPS[mode] for mode in modes), file)
    Path(folder, "losses.json").write_text(json.dumps(losses))
    if "one_process" in modes:
        found = {"one_process": train(family, "one_process", None, file, losses)}
        Path(folder, "alone.json").write_text(json.dumps(found))


def compare_family(family: str, modes: list[str]) -> dict[str, dict[str, float]]:
    """The worst errors of each mode."""
    found: dict[str, dict[str, float]] = {}
    for size in (FEW, MANY):
        alike = [mode for mode in modes if size_of(mode) == size]
        if not alike:
            continue
        with tempfile.TemporaryDirectory() as folder:
            run_processes(reference_main, 1, family, alike, folder)
            run_processes(rank_main, size[0], family, alike, folder)
            for name in ("found.json", "alone.json"):
                if (file := Path(folder, name)).exists():
                    found |= json.loads(file.read_text())
    return {mode: found[mode] for mode in modes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="not used: all data is made here")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--modes", nargs="+", choices=list(STEPS), default=list(STEPS))
    options = parser.parse_args()
    table = Table("family", "mode", "loss", "gradients", "parameters", "")
    results: dict[str, Any] = {}
    is_equal = True
    for family in options.families:
        results[family] = compare_family(family, options.modes)
        for mode, errors in results[family].items():
            is_within = max(errors.values()) <= BAR
            is_right = is_within != (mode == "without_moments")
            is_equal &= is_right
            figures = (f"{errors[what]:.1e}" for what in ("loss", "gradients", "parameters"))
            table.add_row(family, mode, *figures, "ok" if is_right else "NOT")
    Console().print(table)
    print(json.dumps({"bar": BAR, "equal": is_equal, **results}))
    sys.exit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
