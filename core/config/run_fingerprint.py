"""What a run's numbers depend on, stored in checkpoints and checked on resume.

What makes the model must be equal. What only steers it (data, optimizer settings, versions) may be
changed; the change is logged. A checkpoint of one trainer is none of the other.
"""

import json
from collections.abc import Callable, Mapping
from math import isfinite

from pacekeeper.core.checkpoint.manifest import RunFingerprint

_FAMILY = "model.family"


def engine_fingerprint(
    *,
    family: str,
    state: str,
    config: Mapping[str, object],
    settings: Mapping[str, object],
    data: int,
    versions: Mapping[str, str],
) -> RunFingerprint:
    """The fingerprint of a run of the engine.

    Args:
        family: The model's `model_type`.
        state: Digest of names, shapes and types of all tensors that a checkpoint holds.
        config: The model's configuration.
        settings: Settings of the job that its numbers depend on.
        data: The fingerprint of the training data.
        versions: Of the libraries that compute.
    """
    model = {_FAMILY: family, "model.state": state}
    named = {
        **{f"config.{name}": value for name, value in sorted(config.items())},
        **{f"settings.{name}": value for name, value in sorted(settings.items())},
        **{f"version of {name}": value for name, value in sorted(versions.items())},
    }
    return model | {name: _plain(value) for name, value in named.items()} | {"data": data}


def model_differences(saved: RunFingerprint, own: RunFingerprint) -> tuple[str, ...]:
    """What makes the checkpoint's model another one, each as "name: there, here"."""
    families = [one.get(_FAMILY) for one in (saved, own)]
    if families[0] != families[1]:
        return (f"{families[0]} there, {families[1]} here",)
    return _differing(saved, own, _is_model)


def steering_differences(saved: RunFingerprint, own: RunFingerprint) -> tuple[str, ...]:
    """All other differences: the run will not continue identically."""
    return _differing(saved, own, lambda name: not _is_model(name))


def _is_model(name: str) -> bool:
    return name.startswith("model.")


def _differing(
    saved: RunFingerprint, own: RunFingerprint, is_wanted: Callable[[str], bool]
) -> tuple[str, ...]:
    return tuple(
        f"{name}: {saved.get(name)} there, {own.get(name)} here"
        for name in {**own, **saved}
        if is_wanted(name) and saved.get(name) != own.get(name)
    )


def _plain(value: object) -> int | float | str:
    """A value as a manifest can hold it, the same after it was read back."""
    if isinstance(value, str) or type(value) is int or (type(value) is float and isfinite(value)):
        return value
    return json.dumps(value, sort_keys=True, default=str)
