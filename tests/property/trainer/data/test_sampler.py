"""The global batch of a step is one and the same under any layout."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.layout.apportion import apportion
from pacekeeper.trainer.data.sampler import Sampler
from pacekeeper.trainer.data.shard import Shard
from pacekeeper.trainer.data.token_stream import TokenStream

END = 3


@st.composite
def streams(draw: st.DrawFn) -> TokenStream:
    parts = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=60), min_size=1))
    arrays = [np.array(part, dtype=np.uint16) for part in parts]
    shards = tuple(Shard(path=None, tokens=a, end_of_document=END) for a in arrays)  # type: ignore[arg-type]
    bounds = np.cumsum([0, *map(len, arrays)])
    return TokenStream(shards, bounds, 0, int(bounds[-1]), 10)


def all_tokens(stream: TokenStream) -> list[int]:
    return [int(token) for shard in stream.shards for token in shard.tokens]


@given(
    stream=streams(),
    row_tokens=st.integers(1, 20),
    rows_per_step=st.integers(1, 12),
    step=st.integers(0, 10**9),
    shares=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5).filter(any),
    seed=st.integers(0, 5),
)
def test_shares_do_not_change_the_batch(
    stream: TokenStream,
    row_tokens: int,
    rows_per_step: int,
    step: int,
    shares: list[float],
    seed: int,
) -> None:
    if stream.num_tokens <= row_tokens:
        return
    sampler = Sampler(stream=stream, row_tokens=row_tokens, rows_per_step=rows_per_step, seed=seed)
    whole = sampler.batch(step, range(rows_per_step))
    bounds = np.cumsum([0, *apportion(rows_per_step, shares)]).tolist()
    parts = [sampler.batch(step, range(first, end)) for first, end in pairwise(bounds)]
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))


@given(stream=streams(), row_tokens=st.integers(1, 20))
def test_rows_are_the_stream_and_documents_end_at_their_token(
    stream: TokenStream, row_tokens: int
) -> None:
    """Against a plain walk over the tokens."""
    if stream.num_tokens <= row_tokens:
        return
    sampler = Sampler(stream=stream, row_tokens=row_tokens, rows_per_step=1, is_shuffled=False)
    tokens = all_tokens(stream)
    begins = set(stream.bounds.tolist()) | {i + 1 for i, t in enumerate(tokens) if t == END}
    for row in range(sampler.num_rows):
        batch = sampler.batch(row, [0])
        first, position = row * row_tokens, 0
        for place in range(row_tokens):
            if place and first + place in begins:
                position = 0
            assert batch.input_ids[0, place] == tokens[first + place]
            assert batch.position_ids[0, place] == position
            target = -100 if first + place + 1 in begins else tokens[first + place + 1]
            assert batch.labels[0, place] == target
            position += 1


@given(stream=streams(), held_out=st.floats(0.01, 0.99), row_tokens=st.integers(1, 10))
def test_rows_for_evaluation_are_never_trained_on(
    stream: TokenStream, held_out: float, row_tokens: int
) -> None:
    if not 0 < round(stream.num_tokens * held_out) < stream.num_tokens:
        return
    ranges = []
    for part in stream.split(held_out):
        if part.num_tokens > row_tokens:
            sampler = Sampler(stream=part, row_tokens=row_tokens, rows_per_step=1)
            rows = [sampler.row_numbers(step, [0])[0] for step in range(sampler.num_rows)]
            firsts = [part.first + int(row) * row_tokens for row in rows]
            ranges.append({t for first in firsts for t in range(first, first + row_tokens + 1)})
    if len(ranges) == 2:
        assert not ranges[0] & ranges[1]
