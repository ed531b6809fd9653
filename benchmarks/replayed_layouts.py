"""The layouts of a recorded run, replayed in float64: whether other losses are due to rounding.

The engine trains on gloo processes from the run's settings, and changes to each layout before the
step at which the run did; beside it trains one process on the whole batch at once.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.rank_processes import run_processes
from benchmarks.wide_floats import use_float64
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.job import (
    batch_of,
    engine_options,
    learning_rate,
    make_optimizer,
    prepare_job,
)
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.model.initialization import SeededInitialization
from pacekeeper.trainer.model.skeleton import build_skeleton


def replay_difference(
    config: EngineConfig, layouts: Mapping[int, Layout], folder: Path, *, steps: int
) -> float:
    """Return the largest relative difference of a step's loss from that of one process.

    Args:
        config: Of the run; its model and data are where it says.
        layouts: By the first step on each; one of them from step 0.
        folder: For the processes; it must not exist.
        steps: Of the run.
    """
    folder.mkdir(parents=True)
    texts = {step: encode_layout(layout) for step, layout in layouts.items()}
    run_processes(
        _alone, 1, replace(config, rows_per_microbatch=config.rows_per_step), folder, steps
    )
    run_processes(_rank, len(layouts[0].ranks), config, texts, folder, steps)
    found: list[list[float]] = [
        json.loads((folder / name).read_text()) for name in ("ranks", "alone")
    ]
    return largest_difference(*found)


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference of a step's loss."""
    return max(abs(one / other - 1.0) for one, other in zip(losses, others, strict=True))


def _alone(_: int, config: EngineConfig, folder: Path, steps: int) -> None:
    use_float64()
    alone = replace(config, num_stages=1, tensor_size=1, replicas=1)
    layout = prepare_job(alone, (0,)).layout
    losses = _losses(alone, {0: layout}, EngineGroups.single_process(), steps)
    (folder / "alone").write_text(json.dumps(losses))


def _rank(
    rank: int, config: EngineConfig, texts: Mapping[int, bytes], folder: Path, steps: int
) -> None:
    use_float64()
    layouts = {step: decode_layout(text) for step, text in texts.items()}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(layouts[0].ranks)
    )
    groups = EngineGroups.from_torch(torch.device("cpu"))
    losses = _losses(config, layouts, groups, steps)
    if rank == 0:
        (folder / "ranks").write_text(json.dumps(losses))
    dist.destroy_process_group()


def _losses(
    config: EngineConfig, layouts: Mapping[int, Layout], groups: EngineGroups, steps: int
) -> list[float]:
    ranks, first = groups.exchange.ranks, layouts[0]
    job = prepare_job(config, tuple(ranks))
    skeleton = build_skeleton(
        config.model,
        torch.float64,
        num_attention_shards=first.num_attention_shards,
        num_mlp_shards=first.num_mlp_shards,
    )
    engine = Engine(
        skeleton,
        SeededInitialization(skeleton, config.seed),
        layout=first,
        groups=groups,
        options=engine_options(config, job, torch.device("cpu")),
    )
    optimizer = make_optimizer(config, engine)
    engine.add_optimizer(optimizer)
    losses = []
    for step in range(steps):
        if step and step in layouts:
            engine.apply(layouts[step])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        rows = engine.micro_batches(config.rows_per_step, config.rows_per_microbatch)
        losses.append(engine.step(batch_of(config, job.sampler, step, rows)).loss.item())
    return losses
