"""Answers become plain values for programs, whatever protobuf of the allowed ones is installed."""

from types import SimpleNamespace
from typing import Any

import pytest

from pacekeeper.protos import status_pb2
from pacekeeper.protos.convert.plain import message_to_dict

FIELD_KINDS = {"TYPE_MESSAGE": 11, "type": 5, "has_presence": False}


@pytest.mark.parametrize(
    ("lists", "plain"),
    [
        pytest.param(
            {"label": 3, "LABEL_REPEATED": 3}, {"label": 1, "LABEL_REPEATED": 3}, id="5.29"
        ),
        pytest.param({"is_repeated": True}, {"is_repeated": False}, id="7"),
    ],
)
def test_a_list_is_told_by_what_the_descriptors_of_each_protobuf_have(
    lists: dict[str, Any], plain: dict[str, Any]
) -> None:
    fields = [
        SimpleNamespace(name="ranks", **FIELD_KINDS, **lists),
        SimpleNamespace(name="step", **FIELD_KINDS, **plain),
    ]
    message = SimpleNamespace(DESCRIPTOR=SimpleNamespace(fields=fields), ranks=(1, 2), step=3)
    assert message_to_dict(message) == {"ranks": [1, 2], "step": 3}


def test_an_answer_of_the_installed_protobuf_has_every_field() -> None:
    job = status_pb2.Job(name="a", ranks=[status_pb2.Rank(rank=1)], advice=["x", "y"])
    told = message_to_dict(job)
    assert set(told) == set(job.DESCRIPTOR.fields_by_name)
    assert (told["ranks"][0]["rank"], told["advice"], told["loss"]) == (1, ["x", "y"], None)
