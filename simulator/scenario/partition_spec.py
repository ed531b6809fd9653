"""What describes a job of stages and tensor groups to us, in a file; and earlier plans for one.

A description (of `pacekeeper plan partition` and of scenarios) is TOML or JSON: [model],
[[layers]], [devices], [links], [home], and where wanted [speeds] and [prices]. Docs:
docs/partition.md.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pacekeeper.controller.planning.model.partition import Partition, Pipeline, StageShard
from pacekeeper.controller.planning.model.problem import (
    Device,
    LayerCost,
    Links,
    ModelCost,
    MovePrices,
    PartitionProblem,
)
from pacekeeper.core.config.loader import read_table
from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.core.layout.layout import ShardRun
from pacekeeper.core.layout.pipeline_schedule import RUN_SCHEDULES, Schedule
from pacekeeper.core.telemetry.shm_ring import MAX_RANKS
from pacekeeper.simulator.baselines.initial_partition import baseline_partition

TABLES = ("model", "layers", "devices", "links", "home", "speeds", "prices")
NEEDED = ("model", "layers", "devices", "links", "home")
# What json and tomllib raise at what is damaged, or endlessly nested.
UNREADABLE = (ValueError, RecursionError, OverflowError)
# Far beyond any job: what stands in a file must not fill the memory.
MAX_LAYERS = 10_000
MAX_PARTS = 65_536  # of rows, micro-batches, stages and so on


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """[model]: `ModelCost` without its layers."""

    num_attention_shards: int
    num_mlp_shards: int
    boundary_bytes: float
    embedding_s: float = 0.0
    embedding_bytes: float = 0.0
    head_s: float = 0.0
    head_bytes: float = 0.0
    launch_s: float = 0.0
    gradient_share: float = 2.0 / 18.0
    backward_ratio: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTable:
    """[devices]: ranks count node by node, all with as much memory."""

    num_nodes: int
    ranks_per_node: int
    memory_bytes: float

    def __post_init__(self) -> None:
        if min(self.num_nodes, self.ranks_per_node) < 1:
            raise ValueError("num_nodes, ranks_per_node: expected at least 1")
        if self.num_nodes * self.ranks_per_node > MAX_RANKS:
            raise ValueError(f"num_nodes, ranks_per_node: expected at most {MAX_RANKS} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineTable:
    """[home]: how the healthy job is divided (`baseline_partition`), and its schedule.

    `may_change_schedule`: a plan may choose the other schedule.
    """

    tensor: int
    data: int
    stages: int
    rows_per_batch: int
    num_microbatches: int
    pipelines_per_expert_group: int = 0
    schedule: str = str(Schedule.ONE_F_ONE_B)
    may_change_schedule: bool = False

    def __post_init__(self) -> None:
        known = list(map(str, RUN_SCHEDULES))
        if self.schedule not in known:
            raise ValueError(f"schedule: expected {' or '.join(known)}, got {self.schedule!r}")
        for name in ("tensor", "data", "stages", "rows_per_batch", "num_microbatches"):
            if not 1 <= getattr(self, name) <= MAX_PARTS:
                raise ValueError(f"{name}: expected 1 to {MAX_PARTS}, got {getattr(self, name)}")


def read_problem(
    path: Path, speeds: Mapping[int, float], present: Partition | None
) -> PartitionProblem:
    """The job that `path` describes; `speeds` come before those in the file.

    Raises DataError where the file can not be read, ConfigError for what it says.
    """
    document = _document(path)
    unknown = sorted(document.keys() - set(TABLES))
    if unknown:
        known = ", ".join(f"[{table}]" for table in TABLES)
        raise ConfigError(
            f"{path}: unknown table [{unknown[0]}]", remedy=f"expected one of {known}"
        )
    for name in NEEDED:
        if name not in document:
            raise ConfigError(f"{path}: [{name}]: missing")
    model = _model(path, document)
    table = read_table(DeviceTable, _table(path, document, "devices"), where=f"{path}: [devices]")
    links = read_table(Links, _table(path, document, "links"), where=f"{path}: [links]")
    baseline = read_table(BaselineTable, _table(path, document, "home"), where=f"{path}: [home]")
    prices = read_table(MovePrices, _table(path, document, "prices"), where=f"{path}: [prices]")
    paces = {**_speeds(path, _table(path, document, "speeds")), **speeds}
    number = table.num_nodes * table.ranks_per_node
    strangers = sorted(rank for rank in paces if not 0 <= rank < number)
    if strangers:
        raise ConfigError(f"speeds: expected ranks 0 to {number - 1}, got {strangers[0]}")
    try:
        devices = tuple(
            Device(
                rank=rank,
                node=rank // table.ranks_per_node,
                memory_bytes=table.memory_bytes,
                speed=paces.get(rank, 1.0),
            )
            for rank in range(number)
        )
        division = asdict(baseline)
        schedule = Schedule(division.pop("schedule"))
        may_change_schedule = division.pop("may_change_schedule")
        return PartitionProblem(
            model=model,
            devices=devices,
            links=links,
            baseline=baseline_partition(model, links, devices, schedule=schedule, **division),
            present=present,
            may_change_schedule=may_change_schedule,
            prices=prices,
        )
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_partition(path: Path) -> Partition:
    """The partition of a plan that `--json` printed. Raises DataError where the file is none."""
    try:
        document = json.loads(path.read_text())
        return Partition(
            pipelines=tuple(_pipeline(one) for one in document["pipelines"]),
            schedule=Schedule(document.get("schedule", Schedule.ONE_F_ONE_B)),
        )
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except (*UNREADABLE, KeyError, TypeError) as error:
        why = f"{path}: no plan ({type(error).__name__}: {error})"
        raise DataError(why, remedy="give what --json printed") from None


def _document(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except UNREADABLE as error:
        raise DataError(f"{path}: {error}", remedy="expected TOML, or .json") from None
    if not isinstance(document, dict):
        raise DataError(f"{path}: expected tables, got {type(document).__name__}")
    return document


def _table(path: Path, document: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [{name}]: expected a table, got {type(table).__name__}")
    return table


def _model(path: Path, document: Mapping[str, Any]) -> ModelCost:
    known = read_table(ModelTable, _table(path, document, "model"), where=f"{path}: [model]")
    tables = document["layers"]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: [[layers]]: expected one table for each kind of layer")
    layers: list[LayerCost] = []
    for at, table in enumerate(tables):
        where = f"{path}: [[layers]] {at}:"
        values = dict(table)
        count = values.pop("count", 1)
        if type(count) is not int or not 1 <= count <= MAX_LAYERS - len(layers):
            raise ConfigError(
                f"{where} count: expected a number of layers, {MAX_LAYERS} in all at most, "
                f"got {count!r}"
            )
        layers += [read_table(LayerCost, values, where=where)] * count
    try:
        return ModelCost(layers=tuple(layers), **asdict(known))
    except ValueError as error:
        raise ConfigError(f"{path}: [model]: {error}") from None


def _speeds(path: Path, table: Mapping[str, Any]) -> dict[int, float]:
    try:
        return {int(rank): float(speed) for rank, speed in table.items()}
    except (TypeError, ValueError):
        raise ConfigError(f"{path}: [speeds]: expected RANK = NUMBER, got {dict(table)}") from None


def _pipeline(document: Any) -> Pipeline:
    return Pipeline(
        cells=tuple(
            StageShard(
                first_layer=cell["first_layer"],
                end_layer=cell["end_layer"],
                attention=tuple(_run(run) for run in cell["attention"]),
                mlp=tuple(_run(run) for run in cell["mlp"]),
            )
            for cell in document["cells"]
        ),
        micro_batches=tuple(document["micro_batches"]),
        expert_group=document["expert_group"],
    )


def _run(document: Any) -> ShardRun:
    return ShardRun(document["rank"], document["first"], document["end"])
