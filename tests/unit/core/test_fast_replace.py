"""A value with some fields changed is what `dataclasses.replace` would make of it."""

from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from pacekeeper.controller.state.job_parts import StepProgress
from pacekeeper.controller.state.state import JobState, NodeState, State
from pacekeeper.core.fast_replace import fast_replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    left: int
    right: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("no range")


def test_all_other_fields_stay_the_same_objects() -> None:
    pair = Pair(left=1, right=[2])
    changed = fast_replace(pair, left=3)
    assert changed == replace(pair, left=3) and changed.right is pair.right
    assert pair == Pair(left=1, right=[2])
    with pytest.raises(FrozenInstanceError):
        changed.left = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    "value",
    [
        State(),
        JobState(name="a", progress=StepProgress(step=4)),
        NodeState(name="n", agent_life="x"),
    ],
)
def test_it_makes_what_replace_makes_of_what_the_controller_knows(value: object) -> None:
    assert fast_replace(value) == value and fast_replace(value) is not value


def test_a_name_that_is_no_field_is_refused() -> None:
    with pytest.raises(TypeError, match="Pair has no field 'up'"):
        fast_replace(Pair(left=1), up=2)


def test_a_class_with_a_rule_of_its_own_is_not_for_it() -> None:
    with pytest.raises(AssertionError, match="Checked has a rule of its own"):
        fast_replace(Checked(low=0, high=1), low=2)
