"""One rank of a tiny MoE job with the real loop and MoE layer of torchtitan, on CPU and gloo.

`python -m support.torchtitan_rank CASE.json RANK`. Its Trainer can not be constructed without a
GPU. So its own methods run here on one that was given its parts by hand: `train`, `train_step`,
`forward_backward_step` and what they call are torchtitan's, and so is the MoE layer, its dispatcher
and its experts; configuration, optimizer and metrics are stand-ins.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from support.foreign_ranks import Case, Device, batches_of, begin

HIDDEN = 32


def main() -> None:
    case, rank = begin(sys.argv)
    torch.distributed.init_process_group("gloo")

    from pacekeeper.trainer.adapters import torchtitan

    trainer = trainer_of(case, rank)
    before = dict(vars(trainer))
    watch = torchtitan.watch(trainer, job=case["job"], ring_dir=case["rings"])
    assert not watch.untimed, watch.untimed
    trainer.step = 100  # a checkpoint was loaded
    trainer.config.training.steps += 100
    trainer.train()
    watch.close()
    assert trainer.forward_backward_step.__func__ is type(trainer).forward_backward_step
    assert set(vars(trainer)) == set(before)
    torch.distributed.destroy_process_group()
    assert watch.reporter.pace.ring.num_errors == 0, watch.reporter.pace.ring.reason


class Model(nn.Module):
    """Embedding, a dense layer, torchtitan's MoE with half of its experts, logits."""

    def __init__(self, size: int, device: Device) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.device = device
        moe = _moe(size)
        device.takes_rows_of(moe.routed_experts.inner_experts)
        self.layers = nn.ModuleDict({"1": nn.ModuleDict({"moe": moe})})
        self.head = nn.Linear(HIDDEN, 64)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        self.device.takes_sequences(tokens)
        x = self.dense(self.embed(tokens))
        logits: Tensor = self.head(x + self.layers["1"]["moe"](x))  # type: ignore[index]
        return logits


def _moe(size: int) -> Any:
    from torchtitan.models.common import (  # type: ignore[import-not-found,unused-ignore]
        config_utils,
        moe,
    )

    router = config_utils.make_router_config(
        dim=HIDDEN, num_experts=4, top_k=2, gate_param_init={"weight": nn.init.normal_}
    )
    experts = moe.GroupedExperts.Config(dim=HIDDEN, hidden_dim=HIDDEN, num_experts=4 // size)
    dispatcher = config_utils.make_token_dispatcher_config(
        num_experts=4, top_k=2, comm_backend="standard"
    )
    routed = moe.RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher)
    layer = config_utils.make_moe_config(
        num_experts=4, router=router, routed_experts=routed, load_balance_coeff=None
    ).build()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    layer.tokens_per_expert_E.zero_()
    layer.routed_experts.token_dispatcher.ep_mesh = init_device_mesh("cpu", (size,))
    return layer


def trainer_of(case: Case, rank: int) -> Any:
    from torchtitan.distributed import (  # type: ignore[import-not-found,unused-ignore]
        utils as dist_utils,
    )
    from torchtitan.trainer import Trainer  # type: ignore[import-not-found,unused-ignore]

    dist_utils.set_spmd_backend("partial_dtensor")
    trainer: Any = object.__new__(Trainer)
    device = Device(case, rank)
    model = Model(case["world_size"], device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    nothing = SimpleNamespace
    trainer.device = torch.device("cpu")
    trainer.step = trainer.ntokens_seen = 0
    trainer.model_parts, trainer.model_config = [model], None
    trainer.gradient_accumulation_steps = case["accumulates"]
    trainer.num_pipeline_parallel_microbatches = 1
    trainer.parallel_dims = _alone()
    trainer.optimizers, trainer.train_context = optimizer, contextlib.nullcontext
    trainer.lr_schedulers = nothing(get_metrics=dict, step=lambda: None)
    trainer.gc_handler = nothing(run=lambda step: None)
    trainer.checkpointer = nothing(
        load=lambda step: None, save=lambda *a, **k: None, maybe_wait_for_staging=lambda: None
    )
    trainer.metrics_processor = nothing(
        should_log=lambda step: step % 2 == 0,
        log=lambda *args, **kwargs: None,
        ntokens_since_last_log=0,
        data_loading_times=[],
    )
    trainer.loss_fn = lambda logits, labels, tokens: (
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        None,
    )
    trainer.fwd_bwd_fn = trainer._forward_backward_body
    trainer.validator = nothing(
        should_validate=lambda step: step - 100 in case["evaluates_after"],
        validate=lambda parts, step: _validate(model),
    )
    profiler = contextlib.nullcontext(nothing(step=lambda: None))
    trainer.config = nothing(
        training=nothing(steps=case["steps"], disable_cuda_graphs=True, max_norm=1.0),
        compile=nothing(enable=False, components=["model", "loss"]),
        parallelism=nothing(spmd_backend="partial_dtensor"),
        checkpoint=nothing(load_step=-1),
        profiler=nothing(build=lambda **more: profiler),
        validator=nothing(enable=True),
        comm=nothing(train_timeout_seconds=60),
        dump_folder="",
    )
    dist_utils.set_pg_timeouts = lambda **more: None  # of process groups newer than torch 2.13
    dist_utils.clip_grad_norm_ = lambda parameters, *a, **k: nn.utils.clip_grad_norm_(
        parameters, 1.0
    )
    trainer.dataloader = _Batches(case, rank, device)
    return trainer


def _alone() -> Any:
    """Sizes as torchtitan's ParallelDims has them: a rank whose experts alone are shared."""
    return SimpleNamespace(
        pp=1, tp=1, cp=1, ep=2, dp_replicate=1, dp_shard=2,
        pp_enabled=False, dp_enabled=False, cp_enabled=False, dp_cp_enabled=False, ep_enabled=True,
        get_optional_mesh=lambda name: None,
    )  # fmt: skip


class _Batches:
    def __init__(self, case: Case, rank: int, device: Device) -> None:
        self._case, self._rank, self._device = case, rank, device

    def __iter__(self) -> Iterator[Any]:
        for step in range(self._case["steps"]):
            self._device.begin_step(step)
            for tokens in batches_of(self._case, self._rank, step):
                yield {"input": tokens}, tokens


def _validate(model: Model) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 64, dtype=torch.int64))
    model.train()


if __name__ == "__main__":
    main()
