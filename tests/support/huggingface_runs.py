"""Runs of Hugging Face's own Trainer with our adapter: `python -m support.huggingface_runs`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

from pacekeeper.trainer.adapters.huggingface import Pacekeeper
from support.forked_ranks import STEPS, Lengths, Pace, run_all

LAYERS, EXPERTS, CHOICES, TOKENS = 2, 4, 2, 16
CONFIG = MixtralConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=EXPERTS,
    num_experts_per_tok=CHOICES,
    max_position_embeddings=128,
)


class Paced(MixtralForCausalLM):  # type: ignore[misc]
    """A tiny Mixtral on a device that takes its time."""

    def __init__(self, pace: Pace | None) -> None:
        super().__init__(CONFIG)
        self.pace = pace

    def forward(self, input_ids: Any = None, **rest: Any) -> Any:
        found = super().forward(input_ids=input_ids, **rest)
        if self.training and self.pace is not None:
            self.pace.take(input_ids)
        return found


def trainer(
    model: Paced, folder: Path, watch: Pacekeeper, lengths: Lengths | None = None, **options: Any
) -> Trainer:
    rows = [Lengths(0, is_uneven=False).batch() for _ in range(4)]
    samples: Sequence[Any] = [
        {name: row[name][0, :TOKENS] for name in row} for row in rows * (2 * STEPS)
    ]
    arguments = TrainingArguments(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        save_strategy=options.pop("save_strategy", "no"),
        per_device_train_batch_size=2,
        **options,
    )
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=samples,
        eval_dataset=samples[:4],
        data_collator=lengths.batch if lengths is not None else None,
        callbacks=[watch],
    )


def rank_of(job: str, rings: Path, folder: Path, rank: int) -> None:
    """The first becomes slow; the other has long sequences on one rank, and accumulates."""
    becomes_slow = job == "slow"
    passes = 1 if becomes_slow else 2
    pace = Pace(rank, becomes_slow=becomes_slow, passes_per_step=passes)
    trainer(
        Paced(pace),
        folder / f"{job}-{rank}",
        Pacekeeper(job=job, ring_dir=str(rings)),
        Lengths(rank, is_uneven=not becomes_slow),
        max_steps=STEPS,
        gradient_accumulation_steps=passes,
        ddp_backend="gloo",
        eval_strategy="steps",
        eval_steps=20,
    ).train()


def alone(folder: Path) -> None:
    """Accumulates, evaluates, saves, goes on from what was saved; a ring that can not be."""
    rings = str(folder / "alone")
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "include_num_input_tokens_seen": "all",
    }
    first = Pacekeeper(job="first", ring_dir=rings)
    trainer(
        Paced(None), folder / "saved", first, max_steps=3, save_strategy="steps", save_steps=2,
        **options,
    ).train()  # fmt: skip
    resumed = trainer(
        Paced(None), folder / "saved", Pacekeeper(job="resumed", ring_dir=rings), max_steps=5,
        **options,
    )  # fmt: skip
    resumed.train(resume_from_checkpoint=str(folder / "saved" / "checkpoint-2"))
    nowhere = Pacekeeper(
        job="nowhere", ring_dir=str(folder / "saved" / "checkpoint-2" / "config.json")
    )
    trainer(Paced(None), folder / "nowhere", nowhere, max_steps=2).train()


if __name__ == "__main__":
    sys.exit(run_all(rank_of, alone))
