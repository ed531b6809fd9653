"""A layout's text is exact and canonical; any other text is a ValueError, nothing else."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.layout.codec import decode_layout, encode_layout, layout_crc
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica, Layout, Pipeline, ShardRun, Stage
from support.layouts import groups_of, layouts, pipelines_of

EVEN = even_layout(ranks=range(2), num_layers=1, num_experts=2, replicas=1)


@given(layouts())
def test_the_codec_is_exact_and_canonical(layout: Layout) -> None:
    data = encode_layout(layout)
    assert decode_layout(data) == layout
    assert encode_layout(decode_layout(data)) == data


def test_the_bytes_are_the_format() -> None:
    # Stored and sent: another text for the same layout needs another FORMAT.
    assert encode_layout(EVEN) == (
        b'{"experts":[[[[0,1.0]],[[1,1.0]]]],"format":2,"generation":1,'
        b'"num_attention_shards":1,"num_mlp_shards":1,"pipelines":['
        b"[0.5,[[0,1,[0],[1]]]],[0.5,[[0,1,[1],[1]]]]]}"
    )
    slow = encode_layout(replace(EVEN, speeds=((1, 0.5),)))
    assert slow.endswith(b',"speeds":[[1,0.5]]}')
    runs = (ShardRun(1, 0, 1), ShardRun(0, 1, 1)), (ShardRun(1, 0, 2), ShardRun(0, 2, 4))
    stage = Stage(first_layer=0, end_layer=1, attention=runs[0], mlp=runs[1])
    wide = replace(
        EVEN,
        num_mlp_shards=4,
        pipelines=(Pipeline(stages=(stage,), batch_share=1.0),),
        shared_mlp_layers=(0,),
    )
    assert b"[1.0,[[0,1,[1,0],[1,0],[2,2]]]]" in encode_layout(wide)
    assert encode_layout(wide).endswith(b',"shared_mlp_layers":[0]}')


@given(layouts())
def test_any_layout_of_format_1_is_read(layout: Layout) -> None:
    text = {
        "format": 1,
        "generation": layout.generation,
        "num_virtual_shards": layout.num_attention_shards,
        "stages": [
            {
                "layers": [span.start, span.stop],
                "groups": [[[run.rank, run.first, run.end] for run in group] for group in groups],
            }
            for span, groups in zip(layout.spans, groups_of(layout), strict=True)
        ],
        "experts": [[[[r.rank, r.share] for r in on] for on in one] for one in layout.experts],
        "batch_shares": layout.batch_shares,
        "speeds": layout.speeds,
        "standing_by": layout.standing_by,
    }
    assert decode_layout(json.dumps(text).encode()) == layout


def test_a_layout_of_format_1_is_read() -> None:
    """Stages of groups of [rank, first, end], one per pipeline; shares by their first ranks."""
    groups = [[[[0, 0, 3], [2, 3, 4]], [[1, 0, 4]]], [[[5, 0, 4]], [[4, 0, 2], [3, 2, 4]]]]
    experts = [[], [[[4, 0.25], [5, 0.75]]], []]
    text = {
        "format": 1,
        "generation": 7,
        "num_virtual_shards": 4,
        "stages": [
            {"layers": [0, 1], "groups": groups[0]},
            {"layers": [1, 3], "groups": groups[1]},
        ],
        "experts": experts,
        "batch_shares": [[0, 0.25], [1, 0.75]],
        "speeds": [[3, 0.5]],
        "standing_by": [9],
    }
    runs = [[tuple(ShardRun(*run) for run in group) for group in stage] for stage in groups]
    layout = Layout(
        generation=7,
        num_attention_shards=4,
        num_mlp_shards=4,
        pipelines=pipelines_of([(0, 1, runs[0]), (1, 3, runs[1])], [0.25, 0.75]),
        experts=((), ((ExpertReplica(4, 0.25), ExpertReplica(5, 0.75)),), ()),
        speeds=((3, 0.5),),
        standing_by=(9,),
    )
    assert decode_layout(json.dumps(text).encode()) == layout
    for broken in (
        {"batch_shares": [[0, 0.25], [5, 0.75]]},
        {"stages": [{"layers": [0, 3], "groups": groups[0][:1]}]},
        {"num_virtual_shards": 3},
    ):
        with pytest.raises(ValueError):
            decode_layout(json.dumps(text | broken).encode())


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
        (b'"format":2', b'"format":7', "layout format 7, this side reads 1 to 2"),
        (b'"generation":1', b'"generation":Infinity', "not a layout"),
        (b'"generation":1', b'"other":1', "not a layout: KeyError"),
        (b'"pipelines":[', b'"pipelines":' + b"[" * 100_000, "not a layout"),
        (b"[0],[1]]", b"[0],[1],[1],[1]]", "two kinds of runs"),
        (b"[0],[1]]", b"[0],[1,0]]", "1 ranks and runs for 2"),
    ],
)
def test_what_is_wrong_is_said(old: bytes, new: bytes, words: str) -> None:
    text = encode_layout(EVEN)
    assert old in text
    with pytest.raises(ValueError, match=words):
        decode_layout(text.replace(old, new))
