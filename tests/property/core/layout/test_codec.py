"""A layout's text is exact and canonical; any other text is a ValueError, nothing else."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.layout.codec import decode_layout, encode_layout, layout_crc
from pacekeeper.core.layout.layout import Layout, even_layout
from support.layouts import layouts

EVEN = even_layout(ranks=range(2), num_layers=1, num_experts=2, replicas=1)


@given(layouts())
def test_the_codec_is_exact_and_canonical(layout: Layout) -> None:
    data = encode_layout(layout)
    assert decode_layout(data) == layout
    assert encode_layout(decode_layout(data)) == data


def test_the_bytes_are_the_format() -> None:
    # Stored and sent: another text for the same layout needs another FORMAT.
    assert encode_layout(EVEN) == (
        b'{"batch_shares":[[0,0.5],[1,0.5]],"experts":[[[[0,1.0]],[[1,1.0]]]],"format":1,'
        b'"generation":1,"num_virtual_shards":1,'
        b'"stages":[{"groups":[[[0,0,1]],[[1,0,1]]],"layers":[0,1]}]}'
    )
    slow = encode_layout(replace(EVEN, speeds=((1, 0.5),)))
    assert b'"num_virtual_shards":1,"speeds":[[1,0.5]],"stages"' in slow


@given(layouts())
def test_the_checksum_names_the_content(layout: Layout) -> None:
    assert layout_crc(layout) == layout_crc(decode_layout(encode_layout(layout)))
    assert layout_crc(layout) != layout_crc(replace(layout, generation=2))


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_layout(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted([*json.loads(encode_layout(EVEN)), "speeds"])), json_values)
def test_a_layout_with_any_other_value_in_it_is_refused_or_valid(key: str, value: object) -> None:
    document = {**json.loads(encode_layout(EVEN)), key: value}
    try:
        decoded = decode_layout(json.dumps(document).encode())
    except ValueError:
        return
    assert all(decoded.holders(block) for block in decoded.blocks())


@given(layouts(), st.data())
def test_a_damaged_layout_is_refused_or_valid(layout: Layout, data: st.DataObject) -> None:
    text = bytearray(encode_layout(layout))
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_layout(bytes(text))
    except ValueError:
        return
    assert decoded.ranks


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"format":1', b'"format":7', "layout format 7, this side reads 1"),
        (b'"generation":1', b'"generation":Infinity', "not a layout"),
        (b'"generation":1', b'"other":1', "not a layout: KeyError"),
        (b'"stages":[', b'"stages":' + b"[" * 100_000, "not a layout"),
    ],
)
def test_what_is_wrong_is_said(old: bytes, new: bytes, words: str) -> None:
    text = encode_layout(EVEN)
    assert old in text
    with pytest.raises(ValueError, match=words):
        decode_layout(text.replace(old, new))
