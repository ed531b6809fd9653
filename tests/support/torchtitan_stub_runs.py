"""Expert replicas on parts of torchtitan: `python -m support.torchtitan_stub_runs FOLDER`.

Four ranks (gloo, float64) train two MoE layers with our overrides beside one process that computes
the whole batch without any of our code; a played agent offers drawn placements, one of them too
large. Half way all ranks save, and a second job goes on from there with another placement.
FOLDER/told-RANK.json: what was seen.
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
from torch.distributed.tensor import DTensor

from pacekeeper.core.layout.layout import ExpertReplica
from pacekeeper.trainer.adapters.torchtitan_experts.replicas import CAPABILITIES, ExpertReplicas
from pacekeeper.trainer.hooks import hooks
from support import torchtitan_stub
from support.forked_ranks import fork_ranks
from support.plan_offers import offer
from support.torchtitan_replicas import CHOICES, EXPERTS, RANKS, SLOTS, drawn_placement

HIDDEN, TOKENS, STEPS, HALF, TOO_LARGE, MAX_NORM = 6, 24, 14, 7, 5, 0.5


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


def main() -> int:
    """0 where all ended well."""
    torchtitan_stub.install()
    folder = Path(sys.argv[1])
    pids = fork_ranks(partial(rank_of, folder), folder / "stub", RANKS)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids)


if __name__ == "__main__":
    sys.exit(main())
