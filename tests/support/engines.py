"""Engines of tiny models, on ranks that are threads, beside plain training in one process."""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from pacekeeper.core.layout.layout import ExpertReplica, Layout
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.micro_batches import MicroBatch, cross_entropy
from pacekeeper.trainer.engine.values import EngineOptions
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.hooks.hooks import Hooks
from pacekeeper.trainer.model import library
from support.rank_threads import ThreadGroup
from support.tiny_models import tiny_config

VOCABULARY, ROWS, TOKENS = 96, 7, 10
BUILDING = threading.Lock()  # building changes torch's default type, for all threads


def rows_of(step: int, num_rows: int = ROWS) -> Tensor:
    """Rows of a step's global batch, with the token after each row."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (num_rows, TOKENS + 1), generator=generator)


def micro_batches(rows: Tensor, size: int = 3) -> list[MicroBatch]:
    parts = rows.split(size) if len(rows) else ()
    return [{"input_ids": part[:, :-1], "labels": part[:, 1:]} for part in parts]


def own_batches(engine: Engine, rows: Tensor, size: int = 3) -> list[MicroBatch]:
    """What an engine computes of a global batch [rows, tokens + 1], with its stage shares."""
    own = engine.micro_batches(len(rows), size)
    return [{"input_ids": rows[list(p), :-1], "labels": rows[list(p), 1:]} for p in own]


def engine_of(
    family: str,
    group: ThreadGroup | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    layout: Layout | None = None,
    hooks: Hooks | None = None,
    shards: int = 1,
    sizes: Mapping[str, Any] | None = None,
    **options: Any,
) -> Engine:
    """An engine of a tiny model, the same weights each time; `sizes`: of its configuration."""
    from pacekeeper.trainer.model.initialization import SeededInitialization
    from pacekeeper.trainer.model.skeleton import build_skeleton

    with BUILDING:
        skeleton = build_skeleton(
            tiny_config(family, **sizes or {}),
            dtype,
            num_attention_shards=layout.num_attention_shards if layout else shards,
            num_mlp_shards=layout.num_mlp_shards if layout else shards,
        )
        source = SeededInitialization(skeleton, 5)
    groups = None
    if group is not None:
        groups = EngineGroups(exchange=group, gradients=group, control=group, snapshots=group)
    return Engine(
        skeleton,
        source,
        groups=groups,
        layout=layout,
        hooks=hooks,
        options=EngineOptions(**options),
    )


def adamw(engine: Engine) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3, weight_decay=0.1)
    engine.add_optimizer(optimizer)
    return optimizer


class PlainRun:
    """Losses, and final parameters, of training in one process with the library's experts."""

    def __init__(
        self,
        family: str,
        steps: int,
        max_grad_norm: float,
        *,
        rows: Callable[[int], Tensor] = rows_of,
        sizes: Mapping[str, Any] | None = None,
    ) -> None:
        engine = engine_of(family, sizes=sizes)
        for one in engine.skeleton.experts:
            if one is not None:
                library.use_library_experts(one.module)
        self.parameters = dict(engine.model.named_parameters())
        optimizer = torch.optim.AdamW(engine.model.parameters(), lr=1e-3, weight_decay=0.1)
        self.losses, self.norms = [], []
        for step in range(steps):
            (batch,) = micro_batches(given := rows(step), len(given))
            logits = engine.model(input_ids=batch["input_ids"], use_cache=False).logits
            loss = cross_entropy(logits, batch) / batch["labels"].numel()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(engine.model.parameters(), max_grad_norm)
            optimizer.step()
            self.losses.append(loss.item())
            self.norms.append(float(norm))


def random_layout(layout: Layout, chosen: Random) -> Layout:
    """The next generation: any replicas with any shares."""

    def replicas() -> tuple[ExpertReplica, ...]:
        ranks = sorted(chosen.sample(layout.ranks, chosen.randint(1, len(layout.ranks))))
        weights = [chosen.random() for _ in ranks]
        total = sum(weights)
        return tuple(ExpertReplica(r, w / total) for r, w in zip(ranks, weights, strict=True))

    return replace(
        layout,
        generation=layout.generation + 1,
        experts=tuple(tuple(replicas() for _ in placed) for placed in layout.experts),
    )


def held_tensors(engine: Engine) -> Iterator[tuple[str, int | None, Tensor]]:
    """(name, expert or None, tensor) of every parameter part that a rank holds."""
    slots: dict[str, Mapping[int, int]] = {
        name: engine.store.slots[layer]
        for layer in range(engine.skeleton.num_layers)
        for name in engine.store.stacked(layer)
    }
    for name, parameter in engine.model.named_parameters():
        if name in slots:
            for expert, slot in slots[name].items():
                yield name, expert, parameter.detach()[slot]
        else:
            yield name, None, parameter.detach()
