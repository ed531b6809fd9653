"""The JSON form of a layout, used in plan files, in the store and on the wire."""

import json
import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypedDict

from pacekeeper.core.layout.layout import (
    ExpertReplica,
    Layout,
    Pipeline,
    ShardRun,
    Stage,
    StateOwner,
)
from pacekeeper.core.layout.pipeline_schedule import Schedule

FORMAT = 2
OLDEST_FORMAT = 1  # stages of groups, the same cuts for all pipelines, one run for both kinds


def encode_layout(layout: Layout) -> bytes:
    """Canonical JSON: equal layouts give equal bytes, so a digest names a layout.

    A pipeline is [batch share, [stages]], with stage shares [batch share, [stages], [share of the
    rows at each stage]]; a stage is [first layer, end layer, [ranks], [attention
    shards of each], [MLP shards of each]]; the last is left out where it equals the one before.
    Fields with their default are left out.
    """
    document: dict[str, Any] = {
        "format": FORMAT,
        "generation": layout.generation,
        "num_attention_shards": layout.num_attention_shards,
        "num_mlp_shards": layout.num_mlp_shards,
        "pipelines": [
            [pipeline.batch_share, list(map(_stage, pipeline.stages)), *_listed(pipeline)]
            for pipeline in layout.pipelines
        ],
        "experts": [
            [[[replica.rank, replica.share] for replica in replicas] for replicas in layer]
            for layer in layout.experts
        ],
    }
    if layout.shared_mlp_layers:
        document["shared_mlp_layers"] = list(layout.shared_mlp_layers)
    if layout.state_owners:
        document["state_owners"] = [list(owner.ranks) for owner in layout.state_owners]
    if layout.speeds:
        document["speeds"] = [[rank, speed] for rank, speed in layout.speeds]
    if layout.standing_by:
        document["standing_by"] = list(layout.standing_by)
    if layout.schedule is not Schedule.ONE_F_ONE_B:
        document["schedule"] = str(layout.schedule)
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def decode_layout(data: bytes) -> Layout:
    """Parse the layout in `data`, in this format or an older one.

    Raises:
        ValueError: the bytes are not a layout; the message gives the reason.
    """
    try:
        document: Any = json.loads(data)
        match document["format"]:
            case 2:
                mesh = _mesh(document)
            case 1:
                mesh = _mesh_of_format_1(document)
            case other:
                reads = f"{OLDEST_FORMAT} to {FORMAT}"
                raise ValueError(f"layout format {other}, this side reads {reads}")
        return Layout(
            generation=int(document["generation"]),
            **mesh,
            experts=tuple(
                tuple(
                    tuple(ExpertReplica(int(rank), float(s)) for rank, s in replicas)
                    for replicas in layer
                )
                for layer in document["experts"]
            ),
            shared_mlp_layers=tuple(map(int, document.get("shared_mlp_layers", ()))),
            state_owners=tuple(
                StateOwner(int(owner), int(mirrors[0]) if mirrors else None)
                for owner, *mirrors in document.get("state_owners", ())
            ),
            speeds=tuple((int(r), float(s)) for r, s in document.get("speeds", ())),
            standing_by=tuple(map(int, document.get("standing_by", ()))),
            schedule=Schedule(document.get("schedule", Schedule.ONE_F_ONE_B)),
        )
    except (
        AttributeError,
        TypeError,
        KeyError,
        IndexError,
        OverflowError,  # an infinite number where a count belongs
        RecursionError,  # nested beyond any layout
        UnicodeDecodeError,
        json.JSONDecodeError,
    ) as error:
        raise ValueError(f"not a layout: {error!r}") from None


class _Mesh(TypedDict):
    num_attention_shards: int
    num_mlp_shards: int
    pipelines: tuple[Pipeline, ...]


def _stage(stage: Stage) -> list[Any]:
    counts = [[run.end - run.first for run in runs] for runs in (stage.attention, stage.mlp)]
    is_equal = counts[0] == counts[1]
    return [stage.first_layer, stage.end_layer, list(stage.group), *counts[: 2 - is_equal]]


def _listed(pipeline: Pipeline) -> list[list[float]]:
    return [list(pipeline.stage_shares)] if pipeline.stage_shares else []


def _mesh(document: Any) -> _Mesh:
    pipelines = []
    for share, of_pipeline, *of_stages in document["pipelines"]:
        if len(of_stages) > 1:
            raise ValueError("a pipeline has shares of two kinds at most")
        stages = []
        for first, end, ranks, *counts in of_pipeline:
            attention, mlp = (_runs(ranks, of_kind) for of_kind in (counts[0], counts[-1]))
            if len(counts) > 2:
                raise ValueError(f"a stage has two kinds of runs, got {len(counts)}")
            stages.append(
                Stage(first_layer=int(first), end_layer=int(end), attention=attention, mlp=mlp)
            )
        pipelines.append(
            Pipeline(
                stages=tuple(stages),
                batch_share=float(share),
                stage_shares=tuple(map(float, *of_stages)) if of_stages else (),
            )
        )
    return {
        "num_attention_shards": int(document["num_attention_shards"]),
        "num_mlp_shards": int(document["num_mlp_shards"]),
        "pipelines": tuple(pipelines),
    }


def _runs(ranks: Sequence[int], counts: Sequence[int]) -> tuple[ShardRun, ...]:
    if len(ranks) != len(counts):
        raise ValueError(f"a stage has {len(ranks)} ranks and runs for {len(counts)}")
    ends = list(accumulate(map(int, counts)))
    runs = zip(map(int, ranks), [0, *ends[:-1]], ends, strict=True)
    return tuple(ShardRun(rank, first, end) for rank, first, end in runs)


def _mesh_of_format_1(document: Any) -> _Mesh:
    stages = document["stages"]
    shares = document["batch_shares"]
    pipelines = []
    for at, (leader, share) in enumerate(shares):
        made = []
        for stage in stages:
            if len(stage["groups"]) != len(shares):
                raise ValueError("a pipeline has one group in every stage: their numbers differ")
            runs = tuple(ShardRun(int(r), int(n), int(end)) for r, n, end in stage["groups"][at])
            first, end = map(int, stage["layers"])
            made.append(Stage(first_layer=first, end_layer=end, attention=runs, mlp=runs))
        pipelines.append(Pipeline(stages=tuple(made), batch_share=float(share)))
        if pipelines[-1].leader != leader:
            raise ValueError("batch shares must name the first rank of each data-parallel group")
    shards = int(document["num_virtual_shards"])
    return {
        "num_attention_shards": shards,
        "num_mlp_shards": shards,
        "pipelines": tuple(pipelines),
    }


def layout_crc(layout: Layout) -> int:
    """CRC32 of a layout's JSON form: two processes compare it to check that they agree."""
    return zlib.crc32(encode_layout(layout))
