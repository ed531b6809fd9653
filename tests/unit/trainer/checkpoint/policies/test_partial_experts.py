"""Tokens are counted by the ranks of a layer's stage, and known to all where it matters."""

from dataclasses import replace
from pathlib import Path

from pacekeeper.core.checkpoint.manifest import CheckpointId, Piece
from pacekeeper.core.layout.diff import moves_layers
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.policies.partial_experts import ExpertTokenLedger, PartialSaves
from pacekeeper.trainer.checkpoint.reader import complete_ids, read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from support.checkpoints import TINY
from support.layouts import groups_of, pipelines_of
from support.thread_ranks import ThreadRanks

THREE = replace(
    TINY,
    num_layers=3,
    num_experts=4,
    rows_per_step=4,
    experts_per_checkpoint=1,
    lost_tokens_limit=0.0,
    steps=100,
    clock="cpu",
    replicas=1,
)

THREE_LAYERS = (4, 4, 4)


def staged(num_stages: int, generation: int = 2) -> Layout:
    return even_layout(
        ranks=range(4),
        num_layers=3,
        num_experts=4,
        replicas=1,
        num_virtual_shards=THREE.num_heads,
        num_stages=num_stages,
        generation=generation,
    )


def handed_over(layout: Layout) -> Layout:
    """The second layer goes from the first of two stages to the other."""
    first, second = groups_of(layout)
    shares = [share for _, share in layout.batch_shares]
    return replace(
        layout,
        generation=layout.generation + 1,
        pipelines=pipelines_of([(0, 1, first), (1, 3, second)], shares),
        experts=(layout.experts[0], layout.experts[2], layout.experts[2]),
    )


def routed(job: ThreadRanks) -> tuple[tuple[int, ...], ...]:
    """Of each expert, as the newest checkpoint says."""
    storage = open_storage(f"{job.config.checkpoint_dir}/{job.config.job}")
    return read_manifest(storage, complete_ids(storage)[0]).account.routed


def run(directory: Path, num_stages: int, *, is_moved: bool) -> ThreadRanks:
    config = replace(THREE, checkpoint_dir=str(directory / "kept"), num_stages=num_stages)
    job = ThreadRanks(config=config, layout=staged(num_stages), directory=directory)
    job.train(2)
    if is_moved:
        job.move(handed_over(job.layout))
    job.train(2)
    return job


def test_a_manifest_counts_all_layers_though_each_stage_counts_its_own(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 1, is_moved=False)
    cut = run(tmp_path / "cut", 2, is_moved=False)
    assert routed(cut) == routed(whole)
    assert all(min(counts) > 0 for counts in routed(whole))
    for job in (whole, cut):
        job.close()


def test_who_takes_a_layer_over_goes_on_counting_where_the_others_were(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 1, is_moved=False)
    moved = run(tmp_path / "moved", 2, is_moved=True)
    assert routed(moved) == routed(whole)
    saved = [rank.checkpoints.partial.books for rank in moved.ranks.values()]
    layer = [books.saved[1] for number, books in enumerate(saved) if number in (1, 3)]
    assert layer[0] == layer[1], "the new hosts know how much of it is saved"
    for job in (whole, moved):
        job.close()


def test_the_need_of_an_expert_is_told_by_who_runs_its_layer() -> None:
    layout = staged(2)
    order = replace(THREE, expert_order="load")
    saves = {rank: PartialSaves(order, THREE_LAYERS) for rank in layout.ranks}
    for rank, partial in saves.items():
        partial._begun = CheckpointId(run_id=1, generation=2, step=1)
        own = range(2) if rank in layout.ranks_of_layer(0) else range(2, 3)
        partial.count({layer: [10, 10, 10, 10] for layer in own})
        partial.count({layer: [0, 0, 0, 5] if layer else [0, 5, 0, 0] for layer in own})
    words = [saves[rank].encode_vote(layout, has_failed=False) for rank in layout.ranks]
    for partial in saves.values():
        partial.receive_votes(words)
        choice = partial.choose(layout, 1, [Piece(block) for block in layout.blocks()])
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
    layout = staged(2)
    assert moves_layers(layout, handed_over(layout))
    assert not moves_layers(layout, replace(layout, generation=9))
    assert moves_layers(layout, staged(1)), "everybody runs all"
