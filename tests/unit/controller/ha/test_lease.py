"""The lease's record as etcd and Kubernetes keep it: it comes back, anything else is refused."""

import json
from typing import Any

import pytest

from pacekeeper.controller.ha.lease import Record, decode_record, encode_record

RECORD = Record(
    term=7,
    holder="c0",
    life="ab12",
    address="h:1",
    duration_s=5.0,
    copies=("x", "y"),
    floor=3,
    renewals=12,
)


def test_what_is_written_is_read() -> None:
    assert decode_record(encode_record(RECORD)) == RECORD


@pytest.mark.parametrize(
    "change",
    [
        {"term": -1},
        {"term": 1 << 60},
        {"term": True},
        {"term": "7"},
        {"duration_s": float("nan")},
        {"holder": None},
        {"copies": "x"},
        {"copies": [1]},
        {"more": 1},
    ],
)
def test_what_is_no_record_of_ours_is_refused(change: dict[str, Any]) -> None:
    told = json.loads(encode_record(RECORD)) | change
    with pytest.raises(ValueError):
        decode_record(json.dumps(told))


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", "{", '{"term": 1}', "[" * 9999, "x" * 99999]
)
def test_what_is_nothing_of_the_kind_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode_record(text)
