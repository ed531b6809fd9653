"""The corpus: real text, packed whole, the same whoever asks and whenever."""

import sysconfig
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.errors import HostError
from pacekeeper.trainer.toy.model.dataset import NO_TARGET, Corpus, split_paragraphs

CONFIG = TrainConfig(row_tokens=160, rows_per_step=8)
CORPUS = Corpus.from_stdlib(CONFIG)


def corpus(*rows: tuple[bytes, ...], row_tokens: int = 12, rows_per_step: int = 2) -> Corpus:
    return Corpus(rows=rows, row_tokens=row_tokens, rows_per_step=rows_per_step, seed=3)


def test_a_batch_shows_documents_positions_and_targets() -> None:
    batch = corpus((b"abcd", b"xyz"), (b"0123456789",)).batch(0, [1, 0])
    assert batch.tokens[1].tolist() == [*b"abcdxyz", 0, 0, 0, 0, 0]
    assert batch.targets[1].tolist() == [*b"bcd", -1, *b"yz", -1, -1, -1, -1, -1, -1]
    assert batch.documents[1].tolist() == [0, 0, 0, 0, 1, 1, 1, -1, -1, -1, -1, -1]
    assert batch.positions[1].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 0, 0, 0, 0]
    assert batch.tokens[0].tolist()[:10] == list(b"0123456789")
    assert batch.num_rows == 2
    assert batch.num_tokens == 4 + 3 + 10
    assert batch.sum_len_squared == 16 + 9 + 100


def test_an_empty_batch_has_the_shape_of_none() -> None:
    batch = CORPUS.batch(3, [])
    assert batch.tokens.shape == (0, CONFIG.row_tokens)
    assert (batch.num_rows, batch.num_tokens, batch.sum_len_squared) == (0, 0, 0)


@pytest.mark.parametrize("step", [0, 7, 100_000])
def test_the_global_counts_are_those_of_all_rows_wherever_they_are_computed(step: int) -> None:
    parts = [CORPUS.batch(step, rows) for rows in (range(3), range(3, 3), range(3, 8))]
    assert CORPUS.target_tokens(step) == sum(int((p.targets != NO_TARGET).sum()) for p in parts)
    assert CORPUS.num_tokens(step) == sum(part.num_tokens for part in parts)


def test_two_ranks_read_the_same_corpus_and_another_seed_another_order() -> None:
    assert Corpus.from_stdlib(CONFIG) == CORPUS
    other = Corpus.from_stdlib(replace(CONFIG, seed=1))
    assert other.rows[:50] != CORPUS.rows[:50]
    assert sum(len(d) for r in other.rows for d in r) == sum(len(d) for r in CORPUS.rows for d in r)


def test_rows_are_full_and_documents_of_very_different_length() -> None:
    lengths = torch.tensor([float(len(d)) for row in CORPUS.rows for d in row])
    assert lengths.std() > 0.3 * lengths.mean()
    assert float(lengths.sum()) > 0.95 * len(CORPUS.rows) * CONFIG.row_tokens
    assert all(sum(map(len, row)) <= CONFIG.row_tokens for row in CORPUS.rows)
    squares = torch.tensor([float(sum(len(d) ** 2 for d in CORPUS.row(0, i))) for i in range(200)])
    assert squares.max() > 2.0 * squares.min(), "rows of equal tokens differ in attention work"


def test_no_byte_of_a_document_is_lost_in_cutting_and_packing() -> None:
    packed = Counter(d for row in CORPUS.rows for d in row)
    source = Path(sysconfig.get_path("stdlib"), "abc.py").read_bytes()
    for paragraph in split_paragraphs(source):
        if len(paragraph) >= 16 and len(paragraph) % CONFIG.row_tokens >= 16:
            for start in range(0, len(paragraph), CONFIG.row_tokens):
                assert packed[paragraph[start : start + CONFIG.row_tokens]] >= 1


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 5))
def test_every_epoch_shows_every_row_once(num_rows: int, rows_per_step: int, epoch: int) -> None:
    rows = tuple((bytes([i, i]),) for i in range(num_rows))
    data = corpus(*rows, rows_per_step=rows_per_step)
    first = epoch * num_rows
    seen = [data.row(*divmod(number, rows_per_step)) for number in range(first, first + num_rows)]
    assert sorted(seen) == sorted(rows)


def test_epochs_come_in_different_orders() -> None:
    data = corpus(*((bytes([i, i]),) for i in range(101)), rows_per_step=1)
    orders = {tuple(data.row(epoch * 101 + i, 0) for i in range(101)) for epoch in range(4)}
    assert len(orders) == 4


def test_paragraphs_are_the_documents() -> None:
    source = b"import a\n\n\ndef f():\n    return 1\n  \n    # still f\n"
    assert split_paragraphs(source) == [b"import a", b"def f():\n\treturn 1", b"\t# still f"]


def test_a_python_without_its_source_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(HostError, match="no Python source"):
        Corpus.from_stdlib(CONFIG)


def test_a_module_that_can_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out, it would make another text of the same name on this node."""
    (tmp_path / "a.py").symlink_to(tmp_path / "gone.py")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(HostError, match=r"can not read .*a\.py, .*: No such file"):
        Corpus.from_stdlib(CONFIG)


def test_installed_packages_are_not_even_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site-packages" / "big").mkdir(parents=True)
    (tmp_path / "site-packages" / "big" / "a.py").write_text("not_in_the_corpus = True\n")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.py").write_text("this_is_in_the_corpus = True\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert Corpus.from_stdlib(CONFIG).rows == ((b"this_is_in_the_corpus = True",),)
