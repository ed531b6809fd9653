"""One rank of a tiny MoE job on the real DeepSpeed, on CPU and gloo, watched by our adapter.

`python -m support.deepspeed_rank CASE.json RANK`: what the job is like stands in the file.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from support.foreign_ranks import Burning, Case, batches_of, begin

HIDDEN = 64


def main() -> None:
    case, rank = begin(sys.argv)
    os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    from pacekeeper.trainer.adapters import deepspeed as adapter_deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it runs a compiler
    deepspeed.init_distributed("gloo", verbose=False)
    is_pipeline = case["kind"] == "pipeline"
    engine, *_ = deepspeed.initialize(
        model=_pipeline(case) if is_pipeline else Model(case),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": case["accumulates"],
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": case["zero"]},
            "steps_per_print": 1_000_000,
        },
    )
    watch = adapter_deepspeed.watch(engine, job=case["job"], ring_dir=case["rings"])
    (_train_pipeline if is_pipeline else _train)(engine, case, rank)
    watch.close()
    assert not set(vars(engine)) & {"step", "train_batch", "_backward_epilogue"}
    torch.distributed.destroy_process_group()
    assert watch.reporter.pace.ring.num_errors == 0, watch.reporter.pace.ring.reason


class Model(nn.Module):
    """Embedding, a dense layer that may burn, one MoE layer, logits and loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE  # type: ignore[import-not-found,unused-ignore]

        self.embed = nn.Embedding(64, HIDDEN)
        self.dense = Burning(HIDDEN)
        expert = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
        self.moe = MoE(
            hidden_size=HIDDEN,
            expert=expert,
            num_experts=4,
            ep_size=case["world_size"],
            drop_tokens=False,
        )
        self.head = nn.Linear(HIDDEN, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dense(self.embed(tokens))
        x = nn.functional.scaled_dot_product_attention(x, x, x)
        out, auxiliary, _ = self.moe(x)
        logits = self.head(x + out)
        loss: Tensor = loss_of(logits, tokens) + 0.01 * auxiliary
        return loss


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    loss: Tensor = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    return loss


def _pipeline(case: Case) -> Any:
    from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found,unused-ignore]

    layers = [nn.Embedding(64, HIDDEN), Burning(HIDDEN), Burning(HIDDEN), nn.Linear(HIDDEN, 64)]
    return PipelineModule(
        layers, num_stages=case["world_size"], loss_fn=loss_of, partition_method="uniform"
    )


def _train(engine: Any, case: Case, rank: int) -> None:
    for step in range(case["steps"]):
        Burning.times = case["burns"][rank] if step >= case["slow_from"] else case["burns"][0]
        for tokens in batches_of(case, rank, step):
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
        if step in case["evaluates_after"]:
            engine.eval()
            with torch.no_grad():
                engine(torch.zeros(1, 512, dtype=torch.int64))
            engine.train()
            with torch.no_grad():  # in training mode, but no training
                engine(torch.zeros(1, 512, dtype=torch.int64))


def _train_pipeline(engine: Any, case: Case, rank: int) -> None:
    for step in range(case["steps"]):
        batches = batches_of(case, 0, step)
        engine.train_batch(iter([(tokens, tokens) for tokens in batches]))
        if step in case["evaluates_after"]:
            engine.eval_batch(iter([(tokens, tokens) for tokens in batches]))


if __name__ == "__main__":
    main()
