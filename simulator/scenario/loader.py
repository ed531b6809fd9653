"""A scenario file: which failures meet which job under which policies; one TOML file, checked.

Paths in it are relative to the file. Every table and key is described in docs/simulator.md.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pacekeeper.core.config.loader import read_table
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.errors import ConfigError
from pacekeeper.simulator.cluster.history import History
from pacekeeper.simulator.cluster.membership import capped
from pacekeeper.simulator.engine.event_loop import SimulationResult, simulate
from pacekeeper.simulator.jobs.data_parallel import JobModel
from pacekeeper.simulator.jobs.document_lengths import read_lengths
from pacekeeper.simulator.jobs.expert_routing import Routing, even_routing, read_routing
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from pacekeeper.simulator.policies.base import Job, Policy, PolicyOf
from pacekeeper.simulator.policies.checkpoint_restart import Regrouping, Restarting
from pacekeeper.simulator.policies.lazarus import Lazarus
from pacekeeper.simulator.policies.pacekeeper import Pacekeeper
from pacekeeper.simulator.policies.pipeline.pacekeeper import Repartition
from pacekeeper.simulator.scenario.failures import (
    KEYS_OF_SOURCE,
    Failures,
    check_path,
    recorded,
)
from pacekeeper.simulator.scenario.pipeline import policy_of, read_job, read_job_lengths

TABLES = ("scenario", "failures", "job", "routing", "lengths", "policies")
# Keys that mean something, by kind: any other one would be a wish that nobody hears.
KEYS_OF_KIND = {
    "none": ("group_size",),
    "checkpoint": ("group_size", "checkpoint_steps"),
    "checkpoint_fast": ("group_size", "checkpoint_steps"),
    "lazarus": ("checkpoint_steps", "review_steps"),
    "pacekeeper": ("checkpoint_steps", "review_steps", "failure_probability"),
}
KINDS = tuple(KEYS_OF_KIND)
# What is more would be played for days, or not fit into memory.
MOST_HOSTS = 20_000_000  # layers x experts x nodes
MOST_TURNS = 50_000_000  # checkpoints and reviews of one policy


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """[routing]; no file: every expert gets as much."""

    file: str = ""
    every_steps: int = 50

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ValueError(f"every_steps: expected at least 1, got {self.every_steps}")
        check_path(self.file)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTable:
    """[policies.NAME]; 0: the policy's own value."""

    kind: str
    group_size: int = 0
    checkpoint_steps: int = 0
    review_steps: int = 0
    failure_probability: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        is_grouped = self.kind in ("none", "checkpoint", "checkpoint_fast")
        if is_grouped and self.group_size < 1:
            raise ValueError(f"group_size: expected at least 1, got {self.group_size}")
        for name in ("checkpoint_steps", "review_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if not 0.0 <= self.failure_probability <= 1.0:
            raise ValueError(
                f"failure_probability: expected 0 to 1, got {self.failure_probability}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """[scenario]"""

    seeds: int = 3
    first_seed: int = 0

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.first_seed < 0:
            raise ValueError("seeds, first_seed: expected at least 1 and 0")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is to be played. `recorded` is None where failures are drawn."""

    name: str
    play: Play
    failures: Failures
    recorded: History | None
    job: JobModel | PipelineJob
    routing: Routing
    policies: Mapping[str, PolicyOf[Any]]

    def history(self, seed: int) -> History:
        """Of one seed: which faults are drawn, or which of the nodes the job gets."""
        failures = self.failures
        history = failures.drawn(seed) if self.recorded is None else self.recorded
        if failures.max_nodes:
            history = capped(history, max_nodes=failures.max_nodes, seed=seed)
        return history


def read_scenario(path: Path) -> Scenario:
    """The scenario in a file, its data read. Raises ConfigError that names file, key and what was
    expected, and DataError for damaged data."""
    where = str(path)
    document = _document(path)
    if unknown := [table for table in document if table not in TABLES]:
        expected = ", ".join(f"[{name}]" for name in TABLES)
        raise ConfigError(f"{where}: unknown table [{unknown[0]}]", remedy=f"expected {expected}")
    tables = {name: _table(document, name, where) for name in TABLES}
    failures = read_table(Failures, tables["failures"], where=f"{where}: [failures]")
    if not tables["policies"]:
        raise ConfigError(f"{where}: no policy", remedy="expected at least one [policies.NAME]")
    read = _pipelined if "partition" in tables["job"] else _data_parallel
    job, routing, policies = read(path, tables, failures)
    _check_used(
        tables["failures"], "source", failures.source, KEYS_OF_SOURCE, where=f"{where}: [failures]"
    )
    history = recorded(failures, path)
    if history is not None and isinstance(job, JobModel):
        _check_size(job, max((number for _, number in history.num_there()), default=0), where)
    duration_s = failures.duration_s if history is None else history.duration_s
    step_s = job.baseline_step_s if isinstance(job, PipelineJob) else job.balanced_step_s
    _check_turns(step_s, policies, duration_s, where)
    return Scenario(
        name=path.stem,
        play=read_table(Play, tables["scenario"], where=f"{where}: [scenario]"),
        failures=failures,
        recorded=history,
        job=job,
        routing=routing,
        policies=policies,
    )


def run_scenario(
    scenario: Scenario, *, seeds: int | None = None
) -> dict[str, list[SimulationResult]]:
    """Outcomes by policy and seed; of one seed all policies meet the same history and luck."""
    first = scenario.play.first_seed
    job: Job[Any] = scenario.job
    found: dict[str, list[SimulationResult]] = {name: [] for name in scenario.policies}
    for seed in range(first, first + (seeds or scenario.play.seeds)):
        history = scenario.history(seed)
        for name, policy in scenario.policies.items():
            outcome = simulate(history, job, scenario.routing, policy, seed=seed)
            found[name].append(outcome)
    return found


Read = tuple[JobModel | PipelineJob, Routing, Mapping[str, PolicyOf[Any]]]


def _data_parallel(path: Path, tables: Mapping[str, dict[str, Any]], failures: Failures) -> Read:
    where = str(path)
    job = read_table(JobModel, tables["job"], where=f"{where}: [job]")
    _check_size(job, failures.num_nodes, where)
    asked = read_table(RoutingTable, tables["routing"], where=f"{where}: [routing]")
    if asked.file:
        routing = read_routing(
            path.parent / asked.file, num_experts=job.num_experts, num_layers=job.num_layers
        ).thinned(asked.every_steps)
    elif "every_steps" in tables["routing"]:
        raise ConfigError(f"{where}: [routing] every_steps: expected a file of recorded loads, too")
    else:
        routing = even_routing(job.num_layers, job.num_experts)
    lengths = read_lengths(
        tables["lengths"],
        path,
        sequence_tokens=job.tokens_per_sample,
        batch_tokens=job.tokens_per_step(1),
    )
    ours = Pacekeeper(lengths=lengths, nodes_per_rack=failures.nodes_per_rack)
    policies = {
        name: _policy(name, values, job, where, ours) for name, values in tables["policies"].items()
    }
    return job, routing, policies


def _pipelined(path: Path, tables: Mapping[str, dict[str, Any]], failures: Failures) -> Read:
    """All its devices are there from the beginning on, and each is a node of the history."""
    job = read_job(tables["job"], path)
    if tables["routing"]:
        raise ConfigError(f"{path}: [routing]: a pipelined job spreads its experts evenly")
    if failures.source == "spot" or failures.max_nodes:
        raise ConfigError(
            f"{path}: [failures]: a pipelined job begins with all its devices",
            remedy='expected source = "drawn" or "faults", without max_nodes',
        )
    if failures.num_nodes != len(job.problem.devices):
        raise ConfigError(
            f"{path}: [failures] num_nodes: {failures.num_nodes}, the job has "
            f"{len(job.problem.devices)} devices"
        )
    ours = Repartition(lengths=read_job_lengths(tables["lengths"], path, job))
    policies = {
        name: policy_of(name, values, f"{path}: [policies.{name}]", ours)
        for name, values in tables["policies"].items()
    }
    return job, job.routing, policies


def _check_size(job: JobModel, num_nodes: int, where: str) -> None:
    num_hosts = job.num_layers * job.num_experts * max(1, num_nodes)
    if num_hosts > MOST_HOSTS:
        raise ConfigError(
            f"{where}: {job.num_layers} layers of {job.num_experts} experts on {num_nodes} nodes",
            remedy=f"their product can be {MOST_HOSTS:,} at most",
        )


def _check_turns(
    step_s: float, policies: Mapping[str, PolicyOf[Any]], duration_s: float, where: str
) -> None:
    steps = duration_s / step_s
    for name, policy in policies.items():
        period = min(policy.checkpoint_steps or MOST_TURNS, policy.review_steps or MOST_TURNS)
        if steps > MOST_TURNS * period:
            raise ConfigError(
                f"{where}: [policies.{name}] has a checkpoint or a review every {period} of "
                f"{steps:.3g} steps",
                remedy=f"expected at most {MOST_TURNS:,} of them; see [job] balanced_step_s",
            )


def _check_used(
    values: Mapping[str, Any],
    by: str,
    value: str,
    known: Mapping[str, tuple[str, ...]],
    *,
    where: str,
) -> None:
    """Has every key a meaning beside this value of the key `by`?"""
    for key in values:
        if key != by and key not in known[value]:
            others = " or ".join(repr(other) for other, keys in known.items() if key in keys)
            raise ConfigError(
                f"{where} {key}: says nothing with {by} = {value!r}",
                remedy=f"leave it out; it belongs to {by} = {others}",
            )


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _table(document: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    values = document.get(name, {})
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {name}: expected a table, got {values!r}")
    return values


def _policy(name: str, values: Any, job: JobModel, where: str, ours: Pacekeeper) -> Policy:
    where = f"{where}: [policies.{name}]"
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a table, got {values!r}")
    table = read_table(PolicyTable, values, where=where)
    _check_used(values, "kind", table.kind, KEYS_OF_KIND, where=where)
    if table.group_size and table.group_size * job.slots_per_node < job.num_experts:
        raise ConfigError(
            f"{where} group_size: {table.group_size} nodes of {job.slots_per_node} slots can not "
            f"hold {job.num_experts} experts"
        )
    given = {
        key: getattr(table, key) for key in ("checkpoint_steps", "review_steps")
        if getattr(table, key)
    }  # fmt: skip
    match table.kind:
        case "none":
            return Restarting(name=name, group_size=table.group_size, checkpoint_steps=None)
        case "checkpoint":
            return replace(Restarting(name=name, group_size=table.group_size), **given)
        case "checkpoint_fast":
            return replace(Regrouping(name=name, group_size=table.group_size), **given)
        case "lazarus":
            return replace(Lazarus(name=name), **given)
        case _:
            known = PolicyConfig()
            likelihood = table.failure_probability or known.failure_probability
            config = replace(known, failure_probability=likelihood)
            return replace(ours, name=name, config=config, **given)
