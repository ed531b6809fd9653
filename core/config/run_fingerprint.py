"""What a run's numbers depend on, besides layout and time: checkpoints say it, a resume checks it.

Pure. What shapes the model must be the same. What only steers it (data order, optimizer) may be
changed by whoever wants to; then the run is another one, which is said.
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
    """Of a run; `corpus_crc` names the training text."""
    return {name: getattr(config, name) for name in (*_MODEL, *_STEERING)} | {"corpus": corpus_crc}


def model_differences(saved: RunFingerprint, own: RunFingerprint) -> tuple[str, ...]:
    """Why a checkpoint is of another model: one "name: there, here" each. Empty: it is ours."""
    return _differing(saved, own, _MODEL)


def steering_differences(saved: RunFingerprint, own: RunFingerprint) -> tuple[str, ...]:
    """What else differs, so that the run will not be the one that was saved."""
    return _differing(saved, own, (*_STEERING, "corpus"))


def _differing(saved: RunFingerprint, own: RunFingerprint, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(
        f"{name}: {saved.get(name)} there, {own.get(name)} here"
        for name in names
        if saved.get(name) != own.get(name)
    )
