"""What tells a run from another: the model must be the same, the rest is only reported."""

import json
from typing import Any

from pacekeeper.core.checkpoint.manifest import RunFingerprint
from pacekeeper.core.config.run_fingerprint import (
    engine_fingerprint,
    model_differences,
    steering_differences,
)


def engine_run(**changes: Any) -> RunFingerprint:
    given: dict[str, Any] = {
        "family": "mixtral",
        "state": "1f",
        "config": {"hidden_size": 64, "rope": {"theta": 1e4}, "tied": True, "scale": None},
        "settings": {"seed": 1},
        "data": 5,
        "versions": {"torch": "2.13"},
    }
    return engine_fingerprint(**given | changes)


def test_runs_of_the_engine_are_told_apart_by_their_state_and_steered_by_the_rest() -> None:
    own = engine_run()
    assert {type(value) for value in own.values()} <= {int, float, str}
    assert json.loads(json.dumps(own)) == own
    assert model_differences(own, own) == steering_differences(own, own) == ()
    assert len(model_differences(engine_run(state="2f"), own)) == 1
    other = engine_run(data=6, versions={"torch": "2.15"}, config={"hidden_size": 64})
    assert model_differences(other, own) == ()
    names = [text.partition(":")[0] for text in steering_differences(other, own)]
    assert sorted(names) == [
        "config.rope", "config.scale", "config.tied", "data", "version of torch",
    ]  # fmt: skip


def test_another_family_is_named_alone() -> None:
    other = engine_run(family="olmoe", state="2f")
    assert model_differences(other, engine_run()) == ("olmoe there, mixtral here",)
