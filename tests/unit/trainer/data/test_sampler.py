"""Rows by step: epochs, evaluation in order, and requests that cannot be met."""

from pathlib import Path

import pytest

from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.trainer.data.sampler import Sampler
from pacekeeper.trainer.data.token_stream import TokenStream, open_tokens
from support.token_files import write_tokens


@pytest.fixture
def stream(tmp_path: Path) -> TokenStream:
    """Tokens 0 to 64: 16 rows of 4 tokens and the last one's target."""
    return open_tokens([write_tokens(tmp_path / "a.bin", range(65))])


def sampler(stream: TokenStream, **changes: int) -> Sampler:
    settings = {"row_tokens": 4, "rows_per_step": 3} | changes
    return Sampler(stream=stream, **settings)  # type: ignore[arg-type]


def test_each_row_comes_once_per_epoch(stream: TokenStream) -> None:
    one = sampler(stream)
    assert one.num_rows == 16
    rows = [row for step in range(16) for row in one.row_numbers(step, range(3)).tolist()]
    epochs = [rows[first : first + 16] for first in range(0, 48, 16)]
    assert all(sorted(epoch) == list(range(16)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_batch_has_the_rows_and_their_targets(stream: TokenStream) -> None:
    one = sampler(stream)
    batch = one.batch(2, [2, 0])
    firsts = one.row_numbers(2, [2, 0]) * 4
    assert batch.input_ids.tolist() == [[f, f + 1, f + 2, f + 3] for f in firsts]
    assert batch.labels.tolist() == [[f + 1, f + 2, f + 3, f + 4] for f in firsts]


def test_the_tail_fills_no_row(stream: TokenStream) -> None:
    assert (sampler(stream, row_tokens=63).num_rows, sampler(stream, row_tokens=64).num_rows) == (
        1,
        1,
    )


def test_a_batch_larger_than_an_epoch_has_whole_epochs(stream: TokenStream) -> None:
    rows = sampler(stream, rows_per_step=40).row_numbers(0, range(40)).tolist()
    assert sorted(rows[:16]) == sorted(rows[16:32]) == list(range(16))
    assert rows[:16] != rows[16:32]


def test_evaluation_reads_all_rows_in_order(stream: TokenStream) -> None:
    one = Sampler(stream=stream, row_tokens=4, rows_per_step=5, is_shuffled=False)
    counts = [one.num_first_places(step) for step in range(5)]
    assert counts == [5, 5, 5, 1, 0]
    rows = [r for step, n in enumerate(counts) for r in one.row_numbers(step, range(n)).tolist()]
    assert rows == list(range(16))


def test_no_places_are_an_empty_batch(stream: TokenStream) -> None:
    batch = sampler(stream).batch(0, range(0))
    assert batch.labels.shape == (0, 4)


@pytest.mark.parametrize(("step", "place"), [(-1, 0), (0, 3), (0, -1)])
def test_places_outside_a_step_are_rejected(stream: TokenStream, step: int, place: int) -> None:
    with pytest.raises(ValueError):
        sampler(stream).batch(step, [place])


def test_a_stream_too_short_for_a_row_is_rejected(stream: TokenStream) -> None:
    with pytest.raises(DataError) as caught:
        sampler(stream, row_tokens=65)
    assert str(stream.shards[0].path) in str(caught.value)


@pytest.mark.parametrize("name", ["row_tokens", "rows_per_step"])
def test_rows_of_nothing_are_rejected(stream: TokenStream, name: str) -> None:
    with pytest.raises(ConfigError):
        sampler(stream, **{name: 0})
