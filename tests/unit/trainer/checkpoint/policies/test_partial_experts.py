"""Tokens of experts: what one rank does not know, the others say where it matters."""

from dataclasses import replace

from pacekeeper.core.checkpoint.manifest import CheckpointId, Piece
from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.layout.diff import moves_layers
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint.policies.partial_experts import ExpertTokenLedger, PartialSaves
from support.trainees import Job

THREE = JobConfig(steps=100, experts_per_checkpoint=1, lost_tokens_limit=0.0)
THREE_LAYERS = (4, 4, 4)
LAYOUT = even_layout(ranks=range(3), num_layers=3, num_experts=4, replicas=1)
GROWN = even_layout(ranks=range(4), num_layers=3, num_experts=4, replicas=1, generation=2)


def test_a_rank_that_joins_goes_on_counting_where_the_others_are() -> None:
    job = Job(config=THREE, layout=LAYOUT)
    job.train(2)
    job.join([3], GROWN)
    job.train(2)
    books = [one.checkpoints.partial.books for one in job.ranks.values()]
    assert {repr(one.encode()) for one in books} == {repr(books[0].encode())}
    assert all(min(counts) > 0 for counts in books[3].routed)


def test_the_need_of_an_expert_is_told_by_who_knows_most_of_its_layer() -> None:
    order = replace(THREE, expert_order="load")
    saves = {rank: PartialSaves(order, THREE_LAYERS) for rank in LAYOUT.ranks}
    for rank, partial in saves.items():
        partial._begun = CheckpointId(run_id=1, generation=1, step=1)
        own = [rank]
        partial.count({layer: [10, 10, 10, 10] for layer in own})
        partial.count({layer: [0, 0, 0, 5] if layer else [0, 5, 0, 0] for layer in own})
    words = [saves[rank].own_vote(LAYOUT, has_failed=False) for rank in LAYOUT.ranks]
    for partial in saves.values():
        partial.receive_votes(words)
        choice = partial.choose(LAYOUT, 1, [Piece(block) for block in LAYOUT.blocks()])
        experts = [p.block for p in choice.pieces if p.block.kind is BlockKind.EXPERT]
        assert sorted(experts) == [
            Block(BlockKind.EXPERT, layer, expert) for layer, expert in ((0, 1), (1, 3), (2, 3))
        ]


def test_the_most_that_anybody_says_is_true() -> None:
    one, other = (ExpertTokenLedger(THREE_LAYERS, 100) for _ in range(2))
    one.count({0: [1, 2, 3, 4], 1: [5, 5, 5, 5]})
    other.count({2: [9, 0, 0, 1]})
    one.saved[0] = [1, 1, 1, 1]
    other.fall_back({Block(BlockKind.EXPERT, 2, 0): 2})
    all_encoded = [one.encode(), other.encode()]
    for books in (one, other):
        books.merge(all_encoded)
        assert books.routed == [[1, 2, 3, 4], [5, 5, 5, 5], [9, 0, 0, 1]]
        assert books.saved == [[1, 1, 1, 1], [0, 0, 0, 0], [9, 0, 0, 1]]
        assert books.lost == [0, 0, 7] and books.num_faults == 1


def test_a_copy_of_a_course_that_was_left_loses_less_than_nothing_nowhere() -> None:
    books = ExpertTokenLedger(THREE_LAYERS, 100)
    books.count({0: [5, 0, 0, 0]})
    assert books.fall_back({Block(BlockKind.EXPERT, 0, 0): 8}) == 0


def test_layers_move_where_a_rank_runs_one_that_it_did_not() -> None:
    assert moves_layers(LAYOUT, GROWN), "a rank came"
    assert not moves_layers(LAYOUT, replace(LAYOUT, generation=9))
