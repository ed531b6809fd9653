"""Of a scenario file: a job of stages and tensor groups, and the policies that know such jobs.

The job itself is described as for `pacekeeper plan partition` (docs/partition.md), in a file of its
own.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pacekeeper.controller.planning.model.problem import LayerCost
from pacekeeper.core.config.loader import read_table
from pacekeeper.core.errors import ConfigError
from pacekeeper.simulator.jobs.document_lengths import Lengths, read_lengths
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from pacekeeper.simulator.jobs.pipeline_assignment import Work
from pacekeeper.simulator.policies.base import PolicyOf
from pacekeeper.simulator.policies.pipeline.adaptra import Adaptra
from pacekeeper.simulator.policies.pipeline.greyhound import Greyhound
from pacekeeper.simulator.policies.pipeline.no_mitigation import Unmitigated
from pacekeeper.simulator.policies.pipeline.oobleck import Oobleck
from pacekeeper.simulator.policies.pipeline.pacekeeper import Repartition
from pacekeeper.simulator.policies.pipeline.recycle import ReCycle
from pacekeeper.simulator.policies.pipeline.resihp import ResiHP
from pacekeeper.simulator.scenario.partition_spec import read_problem

KINDS = ("none", "adaptra", "greyhound", "recycle", "oobleck", "resihp", "pacekeeper")
STRENGTHENED = ("recycle", "oobleck")
MOST = 10**9  # tokens or samples of a row: with more, sums are none any more


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTable:
    """[job] with `partition`: the file that describes it; what a row of a micro-batch is."""

    partition: str
    samples_per_row: float
    tokens_per_row: int

    def __post_init__(self) -> None:
        if not self.partition or "\0" in self.partition:
            raise ValueError(f"partition: expected a path, got {self.partition!r}")
        for name in ("samples_per_row", "tokens_per_row"):
            if not 0.0 < getattr(self, name) <= MOST:
                raise ValueError(f"{name}: expected above 0, at most {MOST:,}, got "
                                 f"{getattr(self, name)}")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePolicyTable:
    """[policies.NAME] of such a job. checkpoint_steps: 0: never."""

    kind: str
    checkpoint_steps: int = 0
    strengthened: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.checkpoint_steps < 0:
            raise ValueError(f"checkpoint_steps: expected at least 0, got {self.checkpoint_steps}")
        if self.strengthened and self.kind not in STRENGTHENED:
            raise ValueError(f"strengthened: only {' and '.join(STRENGTHENED)} have such a form")


def read_job(values: dict[str, Any], path: Path) -> PipelineJob:
    """The job of a scenario at `path`, all its devices healthy.

    Raises ConfigError that names file, key and what was expected, DataError for a file that is
    none.
    """
    where = f"{path}: [job]"
    table = read_table(PipelineTable, values, where=where)
    problem = read_problem(path.parent / table.partition, {}, None)
    if any(device.speed != 1.0 for device in problem.devices):
        raise ConfigError(
            f"{path.parent / table.partition}: [speeds]: a scenario begins with healthy devices",
            remedy="say in [failures] who becomes slow",
        )
    try:
        return PipelineJob(
            problem=problem,
            samples_per_row=table.samples_per_row,
            tokens_per_row=table.tokens_per_row,
        )
    except ValueError as error:
        raise ConfigError(f"{where} {error}") from None


def read_job_lengths(values: dict[str, Any], path: Path, job: PipelineJob) -> Lengths | None:
    """[lengths] of the scenario at `path`, cut into samples of the job; None where it says nothing.

    Raises as `read_lengths` does, and ConfigError where their squares take longer than the job's
    attention does.
    """
    sample_tokens = max(1, round(job.tokens_per_row / job.samples_per_row))
    batch_tokens = job.micro_batch_tokens
    lengths = read_lengths(values, path, sequence_tokens=sample_tokens, batch_tokens=batch_tokens)
    if lengths is None:
        return None
    share = lengths.quadratic_share(batch_tokens)
    layer = min(job.problem.model.layers, key=attention_share)
    if share > attention_share(layer):
        raise ConfigError(
            f"{path}: [lengths] doubling_tokens: squares of these documents would take {share:.0%} "
            f"of a layer's time, its attention takes {attention_share(layer):.0%} in all",
            remedy="expected more tokens",
        )
    return lengths


def attention_share(layer: LayerCost) -> float:
    """Of all that a layer computes but experts."""
    whole_s = layer.attention_s + layer.mlp_s + layer.replicated_s
    return layer.attention_s / whole_s if whole_s else 0.0


def policy_of(name: str, values: Any, where: str, ours: Repartition) -> PolicyOf[Work]:
    """Raises ConfigError that names `where`, the key and what was expected."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a table, got {values!r}")
    table = read_table(PipelinePolicyTable, values, where=where)
    steps = table.checkpoint_steps or None
    match table.kind:
        case "none":
            return Unmitigated(name=name, checkpoint_steps=steps)
        case "adaptra":
            return Adaptra(name=name, checkpoint_steps=steps)
        case "greyhound":
            return Greyhound(name=name, checkpoint_steps=steps)
        case "recycle":
            return ReCycle(name=name, checkpoint_steps=steps, is_strengthened=table.strengthened)
        case "oobleck":
            return Oobleck(name=name, checkpoint_steps=steps, is_strengthened=table.strengthened)
        case "resihp":
            return ResiHP(name=name, checkpoint_steps=steps)
        case _:
            return replace(ours, name=name, checkpoint_steps=steps)
