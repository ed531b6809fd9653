"""Whatever stands in a file for `plan`: it is read, or one line says what is wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from pacekeeper.cli.planning.inputs import parse_device_values, read_loads, read_replica_ranks
from pacekeeper.core.errors import ConfigError, DataError

DEEP = "[" * 100_000 + "]" * 100_000
HUGE = b"{'descr': '<f8', 'fortran_order': False, 'shape': (100000000, 100000000), }"


def test_numbers_of_all_files_are_floats(tmp_path: Path) -> None:
    for name, text in (("a.json", "[[1, 2.5]]"), ("a.csv", "1,2.5\n")):
        (tmp_path / name).write_text(text)
        assert read_loads(tmp_path / name) == [[1.0, 2.5]]
    np.save(tmp_path / "a.npy", np.array([[1, 2]]))
    assert read_loads(tmp_path / "a.npy") == [[1.0, 2.0]]
    assert all(type(x) is float for x in read_loads(tmp_path / "a.npy")[0])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("deep.json", DEEP.encode(), "nested"),
        ("huge.json", b"[[1" + b"0" * 400 + b", 2]]", "1e308"),
        ("text.json", b"loads", ".npy"),
        ("empty.npy", b"", ".npy"),
        ("zip.npy", b"PK\x03\x04abc", ".npy"),
        (
            "huge.npy",
            b"\x93NUMPY\x01\x00\x76\x00" + HUGE.ljust(117) + b"\n",
            ".npy",
        ),
        ("mixed.json", b"[[1, true]]", "layer"),
    ],
)
def test_loads_that_are_none_are_told_in_one_line(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as found:
        read_loads(tmp_path / name)
    assert name in str(found.value) and "\n" not in str(found.value)


def test_an_archive_of_several_arrays_is_not_loads(tmp_path: Path) -> None:
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, a=np.ones(3), b=np.ones(3))
    with pytest.raises(DataError, match="npz"):
        read_loads(tmp_path / "several.npy")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(DEEP, id="deep"),
        pytest.param(json.dumps({"replicas": [[[{"device": float("inf")}]]]}), id="infinite"),
        pytest.param("[]", id="no plan"),
        pytest.param('{"replicas": 1}', id="no list"),
    ],
)
def test_an_earlier_plan_that_is_none_is_told_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(DataError, match=r"plan\.json"):
        read_replica_ranks(tmp_path / "plan.json", 4)


@pytest.mark.parametrize("device", [4, -1])
def test_an_earlier_plan_of_other_devices_is_told(device: int, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"replicas": [[[{"device": device}]]]}))
    with pytest.raises(DataError, match=rf"plan\.json.*{device}"):
        read_replica_ranks(tmp_path / "plan.json", 4)


def test_a_device_has_one_value() -> None:
    assert parse_device_values("1=0.5", 2, 1.0, "--speeds") == (1.0, 0.5)
    with pytest.raises(ConfigError, match="--speeds"):
        parse_device_values("1=0.5,1=0.5", 2, 1.0, "--speeds")
