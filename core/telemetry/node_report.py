"""The messages between an agent and the controller, as values without their wire form.

`protos/convert` translates them. Samples may stay encoded until they are read.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.microbatch_table import MicroBatchTable
from pacekeeper.core.telemetry.records import Record
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.core.telemetry.sign_of_life import RankPhase, RankStack

MAX_RECORDS_PER_REPORT = 4096  # that an agent sends at once


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """All news of one job on one node, of one run of the job (see `Attachment`).

    Attributes:
        records: in reading order within one kind; the order between kinds has no meaning, because
            the wire carries each kind in columns of its own.
        micro_batches: those that are not among `records`; a report uses one of the two.
        layouts: layout files that the trainer wrote, as (generation, canonical JSON).
        phases: ranks that stand still, and those that move again.
        stacks: dumps that the controller asked for.
    """

    job: str
    run_id: int = 0
    attached: tuple[Attachment, ...] = ()
    records: tuple[Record, ...] = ()
    micro_batches: tuple[MicroBatchTable, ...] = ()
    layouts: tuple[tuple[int, bytes], ...] = ()
    phases: tuple[RankPhase, ...] = ()
    stacks: tuple[RankStack, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHealth:
    """The state of an agent; counters since its start.

    `num_devices`: devices that answer, including MIG instances.
    """

    nvml: str = "ok"
    num_devices: int = 0
    records_read: int = 0
    records_lost: int = 0
    records_corrupt: int = 0
    batches_dropped: int = 0
    unreadable: tuple[str, ...] = ()


T = TypeVar("T", covariant=True)


class LazySamples(Protocol[T]):
    """Encoded samples, decoded on first use; `sampled_s` is of the node's monotonic clock."""

    sampled_s: float

    def read(self) -> T: ...


class LazyNodeData(Protocol):
    """The part of a report about the node, decoded on first use; `sampled_s` as of its samples."""

    sampled_s: float

    @property
    def devices(self) -> LazySamples[tuple[DeviceSample, ...]] | None: ...

    @property
    def host(self) -> LazySamples[HostSample] | None: ...

    def health(self) -> AgentHealth: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One batch of one agent; `sequence` ascends by one within one incarnation of the agent.

    `unread` replaces devices, host and health where decoding can wait.
    """

    sequence: int
    sent_mono_s: float
    jobs: tuple[JobReport, ...] = ()
    devices: tuple[DeviceSample, ...] = ()
    host: HostSample | None = None
    health: AgentHealth = AgentHealth()
    unread: LazyNodeData | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan for the ranks of one run of a job; `sha256` is the digest of `data`."""

    job: str
    generation: int
    base_generation: int
    data: bytes
    sha256: bytes
    run_id: int = 0
