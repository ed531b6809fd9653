"""Runs of torchtitan's own Trainer on four CPU ranks, with and without expert replicas: float64.

`run` needs torchtitan, `use_cpu` of `torchtitan_cpu` first. The model is torchtitan's Qwen3 MoE
with two small layers and attention that runs on a CPU; data is drawn. A played agent offers drawn
placements. FOLDER/NAME.json has the steps of a run; gradients are compared with those of the run
that keeps them.
"""

import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import distribute_tensor

from pacekeeper.core.layout.layout import ExpertReplica, Layout, with_batch_shares
from pacekeeper.trainer.adapters import torchtitan
from pacekeeper.trainer.adapters.torchtitan_experts.checkpoint import to_home
from pacekeeper.trainer.adapters.torchtitan_experts.slots import ExpertSlots, local_of
from support.forked_ranks import fork_ranks
from support.plan_offers import offer
from support.torchtitan_cpu import fit_to_gloo, use_float64

RANKS, EXPERTS, SLOTS, LAYERS, CHOICES, LENGTH, WORDS, HIDDEN = 4, 8, 4, 2, 2, 16, 64, 32
PER_RANK = 2  # micro-batches of a step, where shares are equal
OVERRIDES = "pacekeeper.trainer.adapters.torchtitan_experts.overrides"
SHARED_STREAMS = "pacekeeper.trainer.adapters.batch_shares.torchtitan_loader.shared_streams"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        name: Of its files.
        steps: The last step.
        has_replicas: Whether experts have slots, and move before every third step.
        has_shares: Whether ranks run drawn numbers of micro-batches.
        is_parallel: Whether ranks share experts.
        starts_from: Name of the run whose checkpoint is loaded; "": weights are drawn.
        starts_at: The step of that checkpoint; 0: its first weights.
        beside: Name of the run whose gradients it is compared with; "": it keeps its own.
    """

    name: str
    steps: int
    has_replicas: bool = False
    has_shares: bool = False
    is_parallel: bool = True
    starts_from: str = ""
    starts_at: int = 0
    beside: str = ""


def drawn_placement(layout: Layout, seed: int, num_slots: int = SLOTS) -> Layout:
    """The next layout: each expert of a layer on drawn ranks, with drawn shares."""
    draw = random.Random(seed)
    placed = []
    for of_layer in layout.experts:
        free = Counter({rank: num_slots for rank in layout.ranks})
        on: list[set[int]] = []
        for _ in of_layer:
            on.append({draw.choice([rank for rank in free if free[rank] > 0])})
            free.subtract(on[-1])
        for ranks in draw.sample(on, len(on)):
            more = [rank for rank in free if free[rank] > 0 and rank not in ranks]
            chosen = draw.sample(more, min(len(more), draw.randint(0, 2)))
            ranks.update(chosen)
            free.subtract(chosen)
        placed.append(tuple(_drawn_shares(sorted(ranks), draw) for ranks in on))
    return replace(layout, generation=layout.generation + 1, experts=tuple(placed))


def _drawn_shares(ranks: list[int], draw: random.Random) -> tuple[ExpertReplica, ...]:
    weights = [draw.uniform(0.1, 1.0) for _ in ranks]
    return tuple(
        ExpertReplica(rank, weight / sum(weights))
        for rank, weight in zip(ranks, weights, strict=True)
    )


def drawn_shares(layout: Layout, seed: int) -> Layout:
    """The next layout, with drawn numbers of micro-batches, at least one for each rank."""
    draw = random.Random(seed)
    counts = Counter(layout.ranks)
    counts.update(draw.choices(layout.ranks, k=(PER_RANK - 1) * RANKS))
    shares = [counts[rank] / (PER_RANK * RANKS) for rank in layout.ranks]
    pipelines = with_batch_shares(layout.pipelines, shares)
    return replace(layout, generation=layout.generation + 1, pipelines=pipelines)


def run(one: Run, folder: Path) -> list[int]:
    """Run it in forks of this process; return their exit codes."""
    pids = fork_ranks(partial(_train, one, folder), folder / one.name, RANKS)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _train(one: Run, folder: Path, rank: int) -> None:
    from torchtitan.trainer import Trainer

    use_float64()
    trainer = Trainer(_config(one, folder))
    fit_to_gloo(trainer.model_parts)
    rings = folder / f"rings-{one.name}-{rank}"
    watch = torchtitan.watch(
        trainer,
        job=one.name,
        ring_dir=str(rings),
        moves_experts=one.has_replicas,
        shares_batches=one.has_shares,
    )
    told: list[dict[str, Any]] = []
    error = _Gradients(trainer, one, folder)
    original, log = trainer.train_step, trainer.metrics_processor.log

    def train_step(batches: Any) -> None:
        ring, plans = watch.reporter.pace.ring.path, watch.replicas or _shares_of(watch)
        if plans is not None and trainer.step % 3 == 0:
            assert ring is not None
            draw = drawn_shares if one.has_shares else drawn_placement
            offer(ring, draw(plans.layout, trainer.step), base=plans.layout.generation)
        original(batches)
        told[-1]["gradient_error"] = error.last
        told[-1]["generation"] = plans.layout.generation if plans else 1
        told[-1]["count"] = trainer.gradient_accumulation_steps

    def logged(step: int, loss: float, worst: float, norm: float, **more: Any) -> None:
        told.append({"step": step, "loss": loss, "norm": norm})
        log(step, loss, worst, norm, **more)

    trainer.train_step, trainer.metrics_processor.log = train_step, logged
    if not one.beside:
        _draw(trainer.model_parts[0])
        start = folder / f"{one.name}-saved" / "step-0"
        save(trainer.checkpointer.states["model"].state_dict(), checkpoint_id=start)
    trainer.train()
    if rank == 0:
        (folder / f"{one.name}.json").write_text(json.dumps(told))
    watch.close()
    trainer.close()
    dist.destroy_process_group()


def _draw(model: Any) -> None:
    """Draw all weights. On CPUs torchtitan draws the same numbers on each rank, for its part of a
    parameter: experts were equal, and routers could not tell them apart.
    """
    for number, parameter in enumerate(model.parameters()):
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        whole.normal_(std=0.2, generator=torch.Generator().manual_seed(number))
        whole = whole + 1.0 if whole.dim() == 1 else whole  # norms
        with torch.no_grad():
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))


def _shares_of(watch: Any) -> Any:
    """Its batch shares; None before the first step, in which they begin."""
    return watch.shares and watch.shares._shares


class _Gradients:
    """Keeps the gradients of each step, or compares them with those that another run kept.

    `last`: the largest difference of a gradient in the last step, over the largest gradient.
    """

    def __init__(self, trainer: Any, one: Run, folder: Path) -> None:
        self.last = 0.0
        self._trainer, self._is_kept = trainer, not one.beside
        self._stem = folder / f"gradients-{one.beside or one.name}"
        trainer.optimizers.register_step_pre_hook(lambda *_: self._look())

    def _look(self) -> None:
        path = f"{self._stem}-{self._trainer.step}.safetensors"
        found = _whole_gradients(self._trainer.model_parts[0])
        if self._is_kept:
            if dist.get_rank() == 0:
                save_file(found, path)
            return
        kept = load_file(path)
        largest = max(value.abs().max().item() for value in kept.values())
        worst = max((found[name] - kept[name]).abs().max().item() for name in kept)
        assert found.keys() == kept.keys()
        self.last = worst / largest


def _whole_gradients(model: Any) -> dict[str, Tensor]:
    placed: dict[str, Any] = {
        f"{name}.{key}": (part, key)
        for name, part in model.named_modules()
        if isinstance(part, ExpertSlots)
        for key in part.stacks()
    }
    found = {}
    for name, parameter in model.named_parameters():
        if name not in placed:
            found[name] = parameter.grad.full_tensor().contiguous()
            continue
        part, key = placed[name]
        own = to_home(part.placed, {key: local_of(parameter.grad)})[key].contiguous()
        parts = [torch.empty_like(own) for _ in range(RANKS)]
        dist.all_gather(parts, own)
        found[name] = torch.cat(parts)
    return found


def _config(one: Run, folder: Path) -> Any:
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.qwen3 import config_registry

    config = config_registry.qwen3_moe_debug()
    config.model_spec.model = _model()
    config.loss = CrossEntropyLoss.Config()
    config.dataloader = drawn_batches().Config()
    config.tokenizer = _NoTokenizer()
    config.optimizer.implementation = "foreach"
    config.training = TrainingConfig(
        local_batch_size=2, global_batch_size=2 * PER_RANK * RANKS, seq_len=LENGTH, steps=one.steps,
        disable_cuda_graphs=True, max_norm=0.2, mixed_precision_param="float32",
    )  # fmt: skip
    config.parallelism = ParallelismConfig(
        expert_parallel_degree=RANKS if one.is_parallel else 1, spmd_backend="partial_dtensor"
    )
    config.activation_checkpoint = None
    start = folder / f"{one.starts_from}-saved" / f"step-{one.starts_at}"
    config.checkpoint = CheckpointManager.Config(
        enable=True, folder=f"{one.name}-saved", interval=10, last_save_model_only=False,
        initial_load_path=str(start) if one.starts_from else None,
        initial_load_model_only=one.starts_at == 0,
    )  # fmt: skip
    config.dump_folder = str(folder)
    if one.has_shares:
        config.override.imports = [SHARED_STREAMS]
    if one.has_replicas:
        config.override.imports = [
            (f"{OVERRIDES}.expert_slots", {"slots": SLOTS}),
            f"{OVERRIDES}.replica_dispatcher",
        ]
    return config


def _model() -> Any:
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention

    layers = qwen3._build_qwen3_moe_layers(
        n_layers=LAYERS, dim=HIDDEN, n_heads=4, n_kv_heads=2, head_dim=8, moe_hidden_dim=HIDDEN,
        num_experts=EXPERTS, top_k=CHOICES, attn_backend="flex", moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=8, max_seq_len=4 * LENGTH, theta=1e4),
    )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return qwen3.Qwen3Model.Config(
        vocab_size=WORDS,
        dim=HIDDEN,
        norm=qwen3._qwen3_norm(HIDDEN),
        tok_embeddings=Embedding.Config(
            num_embeddings=WORDS, embedding_dim=HIDDEN, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(
            in_features=HIDDEN, out_features=WORDS, param_init=qwen3._LINEAR_INIT
        ),
        layers=layers,
    )


class _NoTokenizer:
    def build(self, **_: Any) -> None:
        return None

    def to_dict(self) -> Mapping[str, Any]:
        return {}


@cache
def drawn_batches() -> Any:
    """A loader of torchtitan's kind: drawn tokens, half of them of few words, so that experts get
    unequal numbers of rows.
    """
    from torchtitan.components.dataloader import BaseDataLoader

    class Drawn(BaseDataLoader):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, **named: Any) -> None:
            self._rank, self._num_ranks = named["dp_rank"], named["dp_world_size"]
            self._shape = named["local_batch_size"], named["seq_len"] + 1
            self._number = 0

        def __iter__(self) -> Iterator[Any]:
            while True:
                seed = self._number * self._num_ranks + self._rank
                draw = torch.Generator().manual_seed(seed)
                words = torch.randint(WORDS if seed % 2 else 4, self._shape, generator=draw)
                self._number += 1
                yield {"input": words[:, :-1].clone()}, words[:, 1:].clone()

        def state_dict(self) -> dict[str, Any]:
            return {f"dp_rank_{self._rank}": self._number}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self._number = state[f"dp_rank_{self._rank}"]

    return Drawn
