"""Replicas and shares on parts of torchtitan: `python -m support.torchtitan_stub_runs FOLDER`.

Four ranks (gloo, float64) train two MoE layers with our overrides beside one process that computes
the whole batch without any of our code; a played agent offers drawn placements, one of them too
large. Half way all ranks save, and a second job goes on from there with another placement.
FOLDER/told-RANK.json: what was seen. Beside it the same four ranks run drawn numbers of
micro-batches of FSDP2: FOLDER/shares-RANK.json.
"""

import json
import os
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pacekeeper.core.layout.layout import ExpertReplica, with_batch_shares
from pacekeeper.trainer.adapters.batch_shares.torchtitan import (
    SharedStreams,
    TrainerShares,
    micro_batches_of,
)
from pacekeeper.trainer.adapters.reporter import attach
from pacekeeper.trainer.adapters.torchtitan_experts.replicas import CAPABILITIES, ExpertReplicas
from pacekeeper.trainer.hooks import hooks
from support import torchtitan_stub
from support.forked_ranks import fork_ranks
from support.plan_offers import offer
from support.torchtitan_replicas import (
    CHOICES,
    EXPERTS,
    PER_RANK,
    RANKS,
    SLOTS,
    drawn_placement,
    drawn_shares,
)

HIDDEN, TOKENS, STEPS, HALF, TOO_LARGE, MAX_NORM = 6, 24, 14, 7, 5, 0.5
SHARED_STEPS = 8


class Layer(nn.Module):
    """A router and its experts; `experts` None: all of them, computed one by one."""

    def __init__(self, number: int, mesh: Any) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(number)
        self.gate = nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=draw))
        shapes = {"w1_EFD": (8, HIDDEN), "w2_EDF": (HIDDEN, 8), "w3_EFD": (8, HIDDEN)}
        drawn = {n: torch.randn(EXPERTS, *s, generator=draw) for n, s in shapes.items()}
        if mesh is None:
            self.whole = nn.ParameterDict(drawn)
            return
        from pacekeeper.trainer.adapters.torchtitan_experts import overrides

        settings = torchtitan_stub.GroupedExperts.Config(
            dim=HIDDEN, hidden_dim=8, num_experts=EXPERTS
        )
        dispatcher = torchtitan_stub.LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=CHOICES)
        self.routed_experts = nn.Module()
        routed: Any = self.routed_experts
        routed.inner_experts = overrides.expert_slots(settings, slots=SLOTS).build()
        routed.inner_experts.parallelize(SimpleNamespace(ep=RANKS, mesh=mesh))
        routed.token_dispatcher = overrides.replica_dispatcher(dispatcher).build()
        routed.token_dispatcher.wire_meshes(ep_mesh=mesh)
        first = dist.get_rank() * EXPERTS // RANKS
        with torch.no_grad():
            for name, own in routed.inner_experts.stacks().items():
                own.fill_(9.0)  # as any initialisation leaves free slots
                own[: EXPERTS // RANKS] = drawn[name][first : first + EXPERTS // RANKS]

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(x @ self.gate.T, dim=-1)
        chosen, ids = scores.topk(CHOICES, dim=-1)
        if hasattr(self, "whole"):
            weights = [self.whole[name] for name in ("w1_EFD", "w2_EDF", "w3_EFD")]
            every = torch.stack(
                [torchtitan_stub.swiglu(x, *each) for each in zip(*weights, strict=True)], dim=1
            )
            answers = every.gather(1, ids[..., None].expand(-1, -1, HIDDEN))
            summed: Tensor = x + (answers * chosen[..., None]).sum(1)
            return summed
        routed: Any = self.routed_experts
        counts = torch.zeros_like(scores).scatter_(1, ids, 1.0).sum(0)
        rows, sizes, routes = routed.token_dispatcher.dispatch(x, chosen, ids, counts)
        answers = routed.inner_experts(rows, sizes)
        combined: Tensor = routed.token_dispatcher.combine(answers, routes, x)
        return x + combined


class Model(nn.Module):
    top_k = CHOICES

    def __init__(self, mesh: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): Layer(n, mesh) for n in range(2)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Optimizers(torch.optim.Optimizer):
    """As torchtitan's container: an optimizer of optimizers."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)]
        super().__init__(list(model.parameters()), {})

    def __iter__(self) -> Iterator[Any]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()


def job_of(mesh: Any) -> Any:
    model = Model(mesh)
    return SimpleNamespace(
        model_parts=[model],
        optimizers=Optimizers(model),
        parallel_dims=SimpleNamespace(
            pp=1, dp_replicate=1, dp_shard=RANKS, cp=1, tp=1, ep=RANKS, mesh=mesh
        ),
        config=SimpleNamespace(
            compile=SimpleNamespace(enable=False, components=["model"]),
            training=SimpleNamespace(local_batch_size=1, seq_len=TOKENS),
        ),
        gradient_accumulation_steps=1,
    )


def batch(step: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(step * RANKS + rank)
    return torch.randn(TOKENS, HIDDEN, generator=draw) + (rank % 2)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x.roll(1, 0)).square().sum() / (TOKENS * RANKS)
    return loss


def clipped(model: nn.Module) -> float:
    """Clip as torchtitan does, parameters of experts apart."""
    parameters = list(model.parameters())
    kinds = ([], [])  # type: tuple[list[nn.Parameter], list[nn.Parameter]]
    for parameter in parameters:
        kinds[isinstance(parameter, DTensor)].append(parameter)
    square = torch.zeros(())
    for kind in kinds:
        norm = torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None])
        square += (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, MAX_NORM, square.sqrt())
    return square.sqrt().item()


def train_step(job: Any, step: int) -> tuple[float, float]:
    """Return loss and norm of the whole batch."""
    (model,) = job.model_parts
    own = loss_of(model, batch(step, dist.get_rank()))
    own.backward()
    total = own.detach().clone()
    dist.all_reduce(total)
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
    norm = clipped(model)
    job.optimizers.step()
    for parameter in model.parameters():
        parameter.grad = None
    return total.item(), norm


def alone() -> list[tuple[float, float]]:
    """Loss and norm of each step of one process."""
    model = Model()
    optimizer, told = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1), []
    for step in range(STEPS):
        loss = torch.stack([loss_of(model, batch(step, rank)) for rank in range(RANKS)]).sum()
        loss.backward()
        told.append((loss.item(), clipped(model)))
        optimizer.step()
        optimizer.zero_grad()
    return told


def rank_of(folder: Path, rank: int) -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    expected, told = alone(), []
    saved: dict[str, Any] = {}
    for name, steps in {"first": range(STEPS), "second": range(HALF, STEPS)}.items():
        job = job_of(mesh)
        replicas = ExpertReplicas(job)
        assert not _largest_in_free_slots(replicas)
        pace = hooks.attach(
            job=name, rank=rank, world_size=RANKS, ring_dir=str(folder / f"{rank}"), run_id=1,
            model=replicas.shape, capabilities=CAPABILITIES,
        )  # fmt: skip
        replicas.take_plans(pace, step=steps[0])
        for step in steps:
            _offer(pace, replicas, step, seed=step + len(steps))
            is_new = replicas.at_boundary(step=step)
            if name == "second" and step == HALF:
                for optimizer in job.optimizers:  # its state is made by a step without effect
                    _make_state(optimizer)
                job.model_parts[0].load_state_dict(saved["model"])
                next(iter(job.optimizers)).load_state_dict(saved["optimizer"])
            loss, norm = train_step(job, step)
            told.append(
                {
                    "job": name,
                    "step": step,
                    "is_new": is_new,
                    "loss_error": abs(loss / expected[step][0] - 1.0),
                    "norm_error": abs(norm / expected[step][1] - 1.0),
                    "is_clipped": norm > MAX_NORM,
                    "replicas": sum(len(r) for x in replicas.layout.experts for r in x),
                }
            )
            if name == "first" and step == HALF - 1:
                state = {
                    "model": job.model_parts[0].state_dict(),
                    "optimizer": next(iter(job.optimizers)).state_dict(),
                }
                saved = deepcopy(state)  # dense parameters in it go on
                told[-1]["shapes"] = sorted(
                    {len(v) for k, v in saved["model"].items() if "inner_experts" in k}
                )
        told[-1]["free"] = _largest_in_free_slots(replicas)
        pace.detach()
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def _largest_in_free_slots(replicas: ExpertReplicas) -> float:
    free = [
        stack[slot].abs().max().item()
        for layer in replicas._layers.values()
        for slot in set(range(SLOTS)) - set(layer.placed.slots.values())  # type: ignore[union-attr]
        for stack in layer.stacks().values()
    ]
    return max(free, default=0.0)


def _offer(pace: Any, replicas: ExpertReplicas, step: int, seed: int) -> None:
    plan = drawn_placement(replicas.layout, seed)
    if step == TOO_LARGE:
        everywhere = tuple(ExpertReplica(rank, 1 / RANKS) for rank in range(RANKS))
        plan = replace(plan, experts=tuple((everywhere,) * EXPERTS for _ in plan.experts))
    if step % 2:
        offer(pace.ring.path, plan, base=replicas.layout.generation)


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    (group,) = optimizer.param_groups
    for parameter in group["params"]:
        parameter.grad = torch.zeros_like(parameter)
    rate, group["lr"] = group["lr"], 0.0
    optimizer.step()
    group["lr"] = rate
    optimizer.zero_grad()


class Stream:
    """The batches of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.number = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while self.number < SHARED_STEPS * PER_RANK:
            draw = torch.Generator().manual_seed(self.number * RANKS + self.rank)
            self.number += 1
            x = torch.randn(3, HIDDEN, generator=draw)
            yield {"input": x}, torch.tensor([0, -100 if self.number % 2 else 1, 2])


class Trainer:
    """torchtitan's order of calls in a step."""

    def __init__(self, rank: int) -> None:
        self.step, self.gradient_accumulation_steps = 0, PER_RANK
        self.parallel_dims = SimpleNamespace(
            dp_shard=RANKS,
            get_mesh=lambda _: SimpleNamespace(get_local_rank=lambda: rank, size=lambda: RANKS),
        )
        self.model = dense_model()
        parts: list[Any] = [self.model[0], self.model]
        for part in parts:
            fully_shard(part)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        self.model_parts, self.passes = [self.model], 0
        settings = SimpleNamespace(build=lambda *, dp_rank, **_: Stream(dp_rank))
        self.dataloader = SharedStreams(
            SimpleNamespace(inner=settings), dp_world_size=RANKS, dp_rank=rank
        )

    def train_step(self, batches: Iterator[Any]) -> None:
        own = [next(batches) for _ in range(self.gradient_accumulation_steps)]
        tokens = torch.stack([(labels != -100).sum() for _, labels in own]).sum()
        dist.all_reduce(tokens)
        for given, labels in own:
            self.forward_backward_step(input_dict=given, labels=labels, global_valid_tokens=tokens)

    def forward_backward_step(
        self, *, input_dict: Any, labels: Tensor, global_valid_tokens: Tensor
    ) -> None:
        self.passes += 1
        dense_loss(self.model, input_dict["input"], labels, global_valid_tokens).backward()


def dense_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(HIDDEN, 16), nn.GELU(), nn.Linear(16, HIDDEN)).double()


def dense_loss(model: nn.Module, x: Tensor, labels: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), labels, reduction="sum") / tokens


def shares_of(folder: Path, rank: int) -> None:
    """Batch shares, other ones in each step, until the data ends."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    trainer: Any = Trainer(rank)
    model, streams = dense_model(), [iter(Stream(one)) for one in range(RANKS)]
    pace = attach(
        job="shares", device=torch.device("cpu"), rank=rank, world_size=RANKS,
        ring_dir=str(folder / f"{rank}"), micro_batches_per_step=micro_batches_of(trainer),
    )  # fmt: skip
    shares, batches = TrainerShares(trainer, pace), iter(trainer.dataloader)
    told = []
    for trainer.step in range(1, SHARED_STEPS + 1):
        trainer.passes = 0
        trainer.train_step(batches)
        every = [next(stream) for stream in streams for _ in range(PER_RANK)]
        count = torch.stack([(labels != -100).sum() for _, labels in every]).sum()
        torch.stack([dense_loss(model, x["input"], y, count) for x, y in every]).sum().backward()
        pairs = zip(trainer.model.parameters(), model.parameters(), strict=True)
        errors = [(one.grad.full_tensor() - other.grad).abs().max().item() for one, other in pairs]
        with torch.no_grad():
            for parameter in [*trainer.model.parameters(), *model.parameters()]:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        told.append({"passes": trainer.passes, "error": max(errors)})
        layout = shares._shares.layout  # type: ignore[union-attr]
        plan = drawn_shares(layout, trainer.step)
        if trainer.step == SHARED_STEPS - 1:  # a rank without a micro-batch
            pipelines = with_batch_shares(layout.pipelines, [0.0, *[1.0 / (RANKS - 1)] * 3])
            plan = replace(plan, pipelines=pipelines)
        offer(pace.ring.path, plan, base=layout.generation)  # type: ignore[arg-type]
    is_over = next(batches, None) is None
    shares.close()
    told.append({"is_over": is_over, "is_restored": "train_step" not in vars(trainer)})
    (folder / f"shares-{rank}.json").write_text(json.dumps(told))
    pace.detach()
    dist.destroy_process_group()


def main() -> int:
    """0 where all ended well."""
    torchtitan_stub.install()
    folder = Path(sys.argv[1])
    pids = fork_ranks(partial(rank_of, folder), folder / "experts", RANKS)
    pids += fork_ranks(partial(shares_of, folder), folder / "shares", RANKS)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids)


if __name__ == "__main__":
    sys.exit(main())
