"""Where each rank runs is told as it is now, though most of the text was made long ago."""

from dataclasses import replace

from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.state.job_parts import LayoutState
from pacekeeper.controller.state.state import JobState, RankState, RankStatus, State
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.telemetry.attachment import Attachment
from support.scrapes import samples

LAYOUT = even_layout(ranks=range(4), num_layers=2, num_experts=4, replicas=2, num_stages=2)


def rank(number: int, node: str = "a", uuid: str = "") -> RankState:
    attachment = Attachment(
        job="train", rank=number, world_size=4, pid=1, device_uuid=uuid or f"GPU-{number}"
    )
    return RankState(attachment=attachment, node=node)


def told(metrics: ControllerMetrics, job: JobState | None) -> dict[str, tuple[str, ...]]:
    """Of each rank: node, device, stage, pipeline."""
    metrics.update(State(jobs={"train": job} if job else {}))
    wanted = ("node", "UUID", "stage", "pipeline")
    found = [labels for name, labels, _ in samples(metrics) if name == "pacekeeper_rank_info"]
    assert all(labels["job_name"] == "train" and labels["role"] == "train" for labels in found)
    return {labels["rank"]: tuple(labels[name] for name in wanted) for labels in found}


def test_each_living_rank_is_told_with_its_place() -> None:
    ranks = {number: rank(number) for number in range(4)}
    ranks[3] = replace(ranks[3], status=RankStatus.DEAD)
    places = {number: LAYOUT.place_of(number) for number in range(3)}
    assert told(
        ControllerMetrics(),
        JobState(name="train", ranks=ranks, layouts=LayoutState(current=LAYOUT)),
    ) == {
        str(n): ("a", f"GPU-{n}", str(stage), str(pipeline))
        for n, (stage, pipeline) in places.items()
    }


def test_what_changes_is_told_anew() -> None:
    metrics = ControllerMetrics()
    job = JobState(name="train", ranks={0: rank(0), 1: rank(1)})
    assert told(metrics, job) == {"0": ("a", "GPU-0", "", ""), "1": ("a", "GPU-1", "", "")}
    moved = replace(job.ranks[0], node="b")
    job = replace(job, ranks={0: moved, 1: rank(1, uuid="GPU-9")})
    assert told(metrics, job) == {"0": ("b", "GPU-0", "", ""), "1": ("a", "GPU-9", "", "")}
    job = replace(job, layouts=replace(job.layouts, current=LAYOUT))
    assert told(metrics, job)["0"][2:] == tuple(map(str, LAYOUT.place_of(0)))
    job = replace(job, ranks={0: job.ranks[0]})
    assert list(told(metrics, job)) == ["0"]
    assert told(metrics, None) == {}
    assert metrics._ranks._jobs == {}, "nothing is remembered of a job that is gone"
