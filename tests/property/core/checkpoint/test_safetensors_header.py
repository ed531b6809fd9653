"""Headers of tensor files: what is encoded is decoded; nothing damaged ever places a tensor."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.checkpoint.safetensors_header import (
    DTYPE_BYTES,
    LENGTH_BYTES,
    TensorSpec,
    decode_header,
    encode_header,
)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__"
)
specs = st.lists(
    st.builds(
        TensorSpec,
        name=names,
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
        shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    max_size=6,
    unique_by=lambda spec: spec.name,
)


def total(tensors: list[TensorSpec]) -> int:
    return sum(tensor.size_bytes for tensor in tensors)


@given(specs, st.dictionaries(names, names, max_size=2))
def test_tensors_lie_one_after_the_other_behind_the_header(
    tensors: list[TensorSpec], metadata: dict[str, str]
) -> None:
    header = encode_header(tensors, metadata)
    assert len(header) % 8 == 0
    placed = decode_header(header, len(header) + total(tensors))
    assert sorted(t.spec.name for t in placed) == sorted(t.name for t in tensors)
    at = len(header)
    for tensor in placed:
        assert (tensor.first_byte, tensor.end_byte) == (at, at + tensor.spec.size_bytes)
        at = tensor.end_byte
    full = [t.spec for t in placed if t.spec.size_bytes]
    assert full == [t for t in tensors if t.size_bytes], "in the order they were given"


@given(specs, st.data())
def test_a_file_of_another_length_is_refused(
    tensors: list[TensorSpec], data: st.DataObject
) -> None:
    header = encode_header(tensors, {})
    size = len(header) + total(tensors)
    other = data.draw(st.integers(0, size + 20).filter(lambda n: n != size))
    with pytest.raises(ValueError, match=r"header|end at byte"):
        decode_header(header, other)


@given(specs, st.binary(min_size=1, max_size=4), st.data())
def test_damage_is_refused_or_places_tensors_without_gap(
    tensors: list[TensorSpec], junk: bytes, data: st.DataObject
) -> None:
    header = bytearray(encode_header(tensors, {}))
    at = data.draw(st.integers(0, len(header) - 1))
    header[at : at + len(junk)] = junk
    size = len(header) + total(tensors)
    try:
        placed = decode_header(bytes(header), size)
    except ValueError:
        return
    spans = [(t.first_byte, t.end_byte) for t in placed]
    assert all(one[1] == other[0] for one, other in pairwise(spans))
    assert not spans or spans[-1][1] == size


def sealed(document: object) -> bytes:
    text = json.dumps(document).encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F99", "shape": [1], "data_offsets": [0, 8]}, "dtype F99"),
        ({"dtype": "F64", "shape": [-1], "data_offsets": [0, 8]}, r"shape \[-1\]"),
        ({"dtype": "F64", "shape": [True], "data_offsets": [0, 8]}, r"shape \[True\]"),
        ({"dtype": "F64", "shape": [2], "data_offsets": [0, 8]}, "8 bytes for F64 of shape"),
        ({"dtype": "F64", "shape": [1], "data_offsets": [1, 9]}, "begins at byte"),
        ({"dtype": "F64", "shape": [1]}, "not a header"),
        (["F64"], "not a header"),
    ],
)
def test_an_impossible_tensor_is_refused_with_its_reason(entry: object, words: str) -> None:
    header = sealed({"w": entry})
    with pytest.raises(ValueError, match=words):
        decode_header(header, len(header) + 8)


def test_a_name_that_stands_twice_is_refused() -> None:
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = f'{{"w":{entry},"w":{entry}}}'.encode()
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    with pytest.raises(ValueError, match="twice"):
        decode_header(header, len(header))


def test_the_library_of_that_format_reads_our_files() -> None:
    safetensors = pytest.importorskip("safetensors")
    tensors = [
        TensorSpec(name="expert.0.1/w1", dtype="F64", shape=(2, 3)),
        TensorSpec(name="head.0.0/norm", dtype="F32", shape=(4,)),
    ]
    data = encode_header(tensors, {"checkpoint": "x"}) + bytes(range(64))
    read = dict(safetensors.deserialize(data))
    assert [read[t.name]["dtype"] for t in tensors] == ["F64", "F32"]
    assert [tuple(read[t.name]["shape"]) for t in tensors] == [(2, 3), (4,)]
    assert bytes(read["head.0.0/norm"]["data"]) == bytes(range(48, 64))
