"""The simulated job of stages and tensor groups: what it is, what a step of it takes, what moves.

A node of its history is one device, numbered as its rank. This is the simulated world's truth:
`pipeline_step.py` and `simulator/baselines/step_simulation.py`, at the devices' true speeds.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.state_transfer import (
    lacking_bytes,
    lost_bytes,
    move_s,
)
from pacekeeper.simulator.baselines.step_simulation import walked
from pacekeeper.simulator.jobs.data_parallel import Dispatch
from pacekeeper.simulator.jobs.expert_routing import Array, Routing, even_routing
from pacekeeper.simulator.jobs.pipeline_assignment import Handed, Planned, Work, cells_of
from pacekeeper.simulator.jobs.pipeline_step import partition_step_s


@dataclass(frozen=True, kw_only=True)
class PipelineJob:
    """`problem`: model, links and devices as specified, as the baseline. Its rows are what a
    micro-batch is made of: `samples_per_row` of them, `tokens_per_row` each.

    Experts, if it has any, are spread evenly. Raises ValueError for counts not above 0.
    """

    problem: PartitionProblem
    samples_per_row: float
    tokens_per_row: int

    def __post_init__(self) -> None:
        if not self.samples_per_row > 0.0 or self.tokens_per_row < 1:
            raise ValueError("a row has tokens, and is a part of a sample at least")

    @property
    def baseline(self) -> Partition:
        return self.problem.baseline

    @property
    def num_layers(self) -> int:
        return len(self.problem.model.layers)

    @property
    def num_experts(self) -> int:
        """As its routing sees it."""
        return 1

    @property
    def routing(self) -> Routing:
        """The only one there is for it."""
        return even_routing(self.num_layers, self.num_experts)

    @cached_property
    def micro_batch_tokens(self) -> int:
        """Of a mean micro-batch of the baseline."""
        sizes = [rows for pipeline in self.baseline.pipelines for rows in pipeline.micro_batches]
        return max(1, round(sum(sizes) / len(sizes) * self.tokens_per_row))

    @property
    def state_bytes(self) -> int:
        """Everything once: what a checkpoint holds."""
        model = self.problem.model
        layers = sum(
            layer.attention_bytes + layer.mlp_bytes + layer.replicated_bytes + layer.expert_bytes
            for layer in model.layers
        )
        return round(layers + model.embedding_bytes + model.head_bytes)

    def has_room(self, num_nodes: int) -> bool:
        """Whether the memory of the living holds the model their planner says."""
        return num_nodes > 0

    def is_alive(self, work: Work, living: Collection[int]) -> bool:
        """Does a living rank hold each shard of each layer?"""
        cells = set(cells_of(work, self.problem).values())
        return lost_bytes(cells, self.as_is({}, living=living)) == 0.0

    def samples_per_step(self, work: Work) -> float:
        """The same whatever it runs on."""
        return self.problem.rows_per_step * self.samples_per_row

    @cached_property
    def baseline_step_s(self) -> float:
        """Of a healthy step of the baseline."""
        return partition_step_s(self.baseline, self.problem)

    def paced_s(self, work: Work) -> float:
        """Of a step at full pace: that of the baseline, for fewer or more ranks."""
        return self.baseline_step_s * len(self.baseline.ranks) / len(work.ranks)

    @property
    def samples_per_node_s(self) -> float:
        """Samples that a healthy device trains in a second of the baseline."""
        samples = self.problem.rows_per_step * self.samples_per_row
        return samples / (self.baseline_step_s * len(self.baseline.ranks))

    def step_s(
        self, work: Work, parts: Array, speed: Mapping[int, float], dispatch: Dispatch
    ) -> float:
        """Seconds, with these ranks at other speeds than 1.0."""
        problem = self.as_is(speed)
        match work:
            case Planned():
                return partition_step_s(work.partition, problem)
            case Handed():
                return walked(
                    work.groups,
                    work.ends,
                    problem,
                    delta=work.delta,
                    counts=work.counts,
                    order=work.order,
                ).step_s

    def as_is(
        self,
        speed: Mapping[int, float],
        *,
        living: Collection[int] | None = None,
        present: Partition | None = None,
    ) -> PartitionProblem:
        """The planner's problem: ranks at these speeds, 1.0 if not named; who does not live at 0.

        `living`: all, if not given. `present`: what runs now.
        """
        there = None if living is None else set(living)
        devices = tuple(
            replace(
                device,
                speed=speed.get(device.rank, 1.0) if there is None or device.rank in there else 0.0,
            )
            for device in self.problem.devices
        )
        return replace(self.problem, devices=devices, present=present)

    def move_s(self, old: Work, new: Work) -> float:
        """Until a rank has what it lacks, new groups included; 0 where nothing changes."""
        return 0.0 if old == new else move_s(self._lacking(old, new), self.problem)

    def copied_bytes(self, old: Work, new: Work) -> int:
        """What all ranks together lack."""
        return round(sum(self._lacking(old, new).values()))

    def _lacking(self, old: Work, new: Work) -> dict[int, float]:
        problem = self.problem
        return lacking_bytes(cells_of(old, problem), cells_of(new, problem), problem)
