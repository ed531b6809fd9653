"""What agents tell ranks of suspects: the newest word, to rings of any age."""

from pathlib import Path

from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.trainer.hooks.ring_writer import Ring


def attachment(rank: int) -> Attachment:
    return Attachment(job="job", rank=rank, world_size=4, pid=100)


def test_suspects_are_those_that_were_told_last_and_nobody_else(tmp_path: Path) -> None:
    collector = RingCollector(directory=tmp_path)
    collector.prepare()
    first = Ring.create(tmp_path, attachment(0))
    collector.poll(0.0)
    collector.set_suspects("job", frozenset({2, 3, 4_000_000_000}))
    collector.set_suspects("job", frozenset({1}), run_id=5)  # of another life
    collector.request_probe("job", 9)
    late = Ring.create(tmp_path, attachment(1))
    collector.poll(1.0)
    for rank in (first, late):
        assert (rank.command().suspect_ranks, rank.command().probe) == (frozenset({2, 3}), 9)
    collector.set_suspects("job", frozenset())
    assert first.command().suspect_ranks == late.command().suspect_ranks == frozenset()
