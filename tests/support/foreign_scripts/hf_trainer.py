"""Hugging Face's Trainer on a tiny Mixtral: `hf_trainer.py FOLDER`."""

import sys

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

ROWS, TOKENS, ACCUMULATES, STEPS, LAYERS, CHOICES = 2, 16, 2, 4, 2, 2


def main() -> None:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=CHOICES,
        max_position_embeddings=128,
    )
    ids = torch.arange(TOKENS)
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=2,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUMULATES,
        gradient_checkpointing=True,
    )
    samples = [{"input_ids": ids, "labels": ids}] * 40
    Trainer(
        model=MixtralForCausalLM(config),
        args=arguments,
        train_dataset=samples,
        eval_dataset=samples[:4],
    ).train()


if __name__ == "__main__":
    main()
