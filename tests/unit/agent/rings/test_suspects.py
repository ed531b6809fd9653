"""What agents tell ranks of suspects: the newest word, to rings of any age."""

from pathlib import Path

from pacekeeper.agent.rings.collector import Intake
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.trainer.hooks.ring_writer import Ring


def attachment(rank: int) -> Attachment:
    return Attachment(job="job", rank=rank, world_size=4, pid=100)


def test_suspects_are_those_that_were_told_last_and_nobody_else(tmp_path: Path) -> None:
    intake = Intake(directory=tmp_path)
    intake.prepare()
    first = Ring.create(tmp_path, attachment(0))
    intake.look(0.0)
    intake.tell_suspects("job", frozenset({2, 3, 4_000_000_000}))
    intake.tell_suspects("job", frozenset({1}), life=5)  # of another life
    intake.ask_probe("job", 9)
    late = Ring.create(tmp_path, attachment(1))
    intake.look(1.0)
    for rank in (first, late):
        assert (rank.command().suspect_ranks, rank.command().probe) == (frozenset({2, 3}), 9)
    intake.tell_suspects("job", frozenset())
    assert first.command().suspect_ranks == late.command().suspect_ranks == frozenset()
