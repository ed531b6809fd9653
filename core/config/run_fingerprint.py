"""The settings and data that a run's numbers depend on, stored in checkpoints and checked on
resume.

Settings that shape the model must be equal. Settings that only steer it (data order, optimizer) may
be changed; the change is logged.
"""

from collections.abc import Iterable

from pacekeeper.core.checkpoint.manifest import RunFingerprint
from pacekeeper.core.config.train import TrainConfig

_MODEL = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "expert_hidden_size",
    "num_experts",
    "experts_per_token",
    "row_tokens",
    "dtype",
)
_STEERING = (
    "seed",
    "rows_per_step",
    "learning_rate",
    "weight_decay",
    "warmup_steps",
    "balance_loss",
)


def run_fingerprint(config: TrainConfig, corpus_crc: int) -> RunFingerprint:
    """The fingerprint of a run; `corpus_crc` identifies the training text."""
    return {name: getattr(config, name) for name in (*_MODEL, *_STEERING)} | {"corpus": corpus_crc}


def model_differences(saved: RunFingerprint, own: RunFingerprint) -> tuple[str, ...]:
    """Settings that make the checkpoint's model another one, each as "name: there, here"."""
    return _differing(saved, own, _MODEL)


def steering_differences(saved: RunFingerprint, own: RunFingerprint) -> tuple[str, ...]:
    """All other differences: the run will not continue identically."""
    return _differing(saved, own, (*_STEERING, "corpus"))


def _differing(saved: RunFingerprint, own: RunFingerprint, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(
        f"{name}: {saved.get(name)} there, {own.get(name)} here"
        for name in names
        if saved.get(name) != own.get(name)
    )
