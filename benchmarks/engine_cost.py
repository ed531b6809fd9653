"""What the engine costs: ratios of forward and backward passes in one run, in interleaved pairs.

`python -m benchmarks.engine_cost`; about fifteen minutes on two cores. At three shapes:
- one process: the engine against the model of transformers with `grouped_mm`; bar 1.03;
- four ranks (gloo), every expert on exactly one: the engine against each rank computing as many
  rows with as many experts by itself, without dispatch; bar 1.25;
- `library_dispatch`: transformers' own expert parallelism (`AllToAllEP`) against the same, no bar;
- the same four ranks with an eighth of the experts (of 16: a quarter) on two ranks, equal rows per
  rank, and the gradients of replicas added up: against no replicas; bar 1.10.
Routing is set to be even, so that every variant computes the same number of rows. A pass ends when
the slowest rank has ended. Prints a table, then one line of JSON: the median of the pairs' ratios
and the upper end of its 95 % interval (by order statistics).
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.gpu.common import upper_place
from benchmarks.rank_processes import run_processes
from pacekeeper.core.layout.layout import ExpertReplica, Layout
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.micro_batches import cross_entropy
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.parallel.layouts import start_layout

RANKS = 4
ROWS, ROW_TOKENS, VOCABULARY = 4, 256, 512
SHAPES = {  # hidden size, experts, experts per token, layers
    "256": (256, 16, 2, 2),
    "512": (512, 32, 4, 2),
    "1024": (1024, 64, 8, 1),
}
BARS = {"one_process": 1.03, "dispatch": 1.25, "replicas": 1.10}
REPLICATED = 8  # one expert of so many
Pass = Callable[[], None]


def config(shape: str, num_experts: int | None = None) -> dict[str, Any]:
    """A Qwen3-MoE of this shape."""
    hidden, experts, chosen, layers = SHAPES[shape]
    return dict(
        model_type="qwen3_moe",
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        num_experts=num_experts or experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=hidden // 2,
        intermediate_size=hidden,
    )


def route_evenly(model: nn.Module) -> None:
    """Let every router choose the experts in turn, with its own weights for them."""
    for name, router in model.named_modules():
        if name.endswith("mlp.gate"):
            forward = router.forward

            def even(hidden: Tensor, forward: Any = forward) -> tuple[Tensor, Tensor, Tensor]:
                logits, weights, chosen = forward(hidden)
                turns = torch.arange(chosen.numel()).view_as(chosen) % logits.shape[1]
                return logits, logits.softmax(-1).gather(1, turns).to(weights.dtype), turns

            router.forward = even


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (ROWS, ROW_TOKENS + 1))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def forward_backward(model: nn.Module) -> Pass:
    """A forward and a backward pass over one batch."""
    inputs = batch()

    def run() -> None:
        model.zero_grad()
        logits = model(input_ids=inputs["input_ids"], use_cache=False).logits
        cross_entropy(logits, inputs).backward()

    return run


def library_model(shape: str, num_experts: int | None = None) -> Any:
    """The model of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config(shape, num_experts)
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    return AutoModelForCausalLM.from_config(made, experts_implementation="grouped_mm")


def library_pass(shape: str, num_experts: int | None = None) -> Pass:
    """Forward and backward of transformers' own model."""
    model = library_model(shape, num_experts)
    route_evenly(model)
    return forward_backward(model)


def library_dispatch_pass(shape: str) -> Pass:
    """Forward and backward pass of transformers' own expert parallelism, `AllToAllEP`."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import AllToAllEP

    model = library_model(shape)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
    count = model.config.num_experts // dist.get_world_size()
    own = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            for parameter, whole in list(module.named_parameters(recurse=False)):
                setattr(module, parameter, nn.Parameter(whole.detach()[own].clone()))
            module.num_experts = count
            module.forward = AllToAllEP(module, mesh["ep"], mesh["tp"])
    route_evenly(model)
    return forward_backward(model)


def engine_pass(shape: str, groups: EngineGroups | None = None) -> Pass:
    """Forward and backward pass of the engine; every expert on one rank."""
    engine = Engine.from_config(config(shape), groups=groups)
    route_evenly(engine.model)
    return forward_backward(engine.model)


def step_pass(shape: str, groups: EngineGroups, every: int) -> Pass:
    """A step of the engine; one expert of `every` has a replica on the next rank (0: none)."""
    _, num_experts, _, layers = SHAPES[shape]
    layout = start_layout([num_experts] * layers, groups.exchange.ranks)
    engine = Engine.from_config(config(shape), groups=groups, layout=replicated(layout, every))
    route_evenly(engine.model)
    engine.add_optimizer(torch.optim.SGD(engine.parameters(), lr=1e-6))
    inputs = batch()

    def run() -> None:
        engine.step([inputs])

    return run


def replicated(layout: Layout, every: int) -> Layout:
    """The layout with half of the rows of one expert of `every` on the next rank."""
    size = len(layout.ranks)

    def replicas(number: int, rank: int) -> tuple[ExpertReplica, ...]:
        # As many of each rank's experts: equal rows per rank.
        if not every or number // size % every:
            return (ExpertReplica(rank, 1.0),)
        return tuple(ExpertReplica(r, 0.5) for r in sorted((rank, (rank + 1) % size)))

    return replace(
        layout,
        experts=tuple(
            tuple(replicas(number, number % size) for number in range(len(placed)))
            for placed in layout.experts
        ),
    )


def interleaved(passes: dict[str, Pass], pairs: int, wait: Pass) -> dict[str, list[float]]:
    """Seconds of each variant, all of them in turn; `wait` is for the other ranks."""
    spent: dict[str, list[float]] = {name: [] for name in passes}
    for run in passes.values():
        run()
    for number in range(pairs):
        order = list(passes) if number % 2 else list(reversed(passes))
        for name in order:
            wait()
            began_s = time.perf_counter()
            passes[name]()
            wait()
            spent[name].append(time.perf_counter() - began_s)
    return spent


def ratio(spent: dict[str, list[float]], name: str, against: str) -> dict[str, Any]:
    """Median of the pairs' ratios and the end of its 95 % interval; the worse of both is judged."""
    ratios = sorted(a / b for a, b in zip(spent[name], spent[against], strict=True))
    return {
        "median": round(statistics.median(ratios), 4),
        "upper95": round(ratios[upper_place(len(ratios))], 4),
        "seconds": round(statistics.median(spent[name]), 4),
        "against_seconds": round(statistics.median(spent[against]), 4),
    }


def one_process(shape: str, pairs: int) -> dict[str, Any]:
    """The engine in one process against the library's model."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    passes = {"library": library_pass(shape), "engine": engine_pass(shape)}
    return {"one_process": ratio(interleaved(passes, pairs, lambda: None), "engine", "library")}


def rank_main(rank: int, shape: str, pairs: int, every: int, folder: str) -> None:
    """One of the four ranks; rank 0 writes the figures."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    groups = EngineGroups.from_torch(torch.device("cpu"))
    _, experts, _, _ = SHAPES[shape]
    found = {}
    alone = {
        "local": library_pass(shape, experts // RANKS),
        "dispatch": engine_pass(shape, groups),
        "library_dispatch": library_dispatch_pass(shape),
    }
    spent = interleaved(alone, pairs, dist.barrier)
    found["dispatch"] = ratio(spent, "dispatch", "local")
    found["library_dispatch"] = ratio(spent, "library_dispatch", "local")
    del alone
    steps = {"none": step_pass(shape, groups, 0), "replicas": step_pass(shape, groups, every)}
    found["replicas"] = ratio(interleaved(steps, pairs, dist.barrier), "replicas", "none")
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="not used: all data is made here")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--replicated", type=int, default=REPLICATED, help="one expert of so many")
    options = parser.parse_args()
    table = Table("shape", "variant", "median", "upper 95 %", "bar", "seconds", "against")
    found: dict[str, Any] = {}
    for shape in options.shapes:
        found[shape] = one_process(shape, options.pairs)
        with tempfile.TemporaryDirectory() as folder:
            given = (shape, options.pairs, options.replicated, folder)
            run_processes(rank_main, RANKS, *given)
            found[shape] |= json.loads(Path(folder, "found.json").read_text())
        for name, one in found[shape].items():
            bar = f"{BARS[name]:.2f}" if name in BARS else ""
            times = (one["seconds"], one["against_seconds"])
            table.add_row(
                shape,
                name,
                f"{one['median']:.3f}",
                f"{one['upper95']:.3f}",
                bar,
                *(f"{s * 1e3:.0f} ms" for s in times),
            )
    Console().print(table)
    load = round(os.getloadavg()[0], 1)
    is_within = all(
        found[shape][name]["upper95"] <= bar
        for shape in options.shapes
        for name, bar in BARS.items()
    )
    print(json.dumps({"pairs": options.pairs, "load_average": load, "bars": BARS, **found}))
    sys.exit(0 if is_within else 1)


if __name__ == "__main__":
    main()
