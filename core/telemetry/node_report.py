"""What a node and the controller tell each other, as plain values: messages without the wire."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.microbatch_table import MicroBatchTable
from pacekeeper.core.telemetry.records import Record
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample

MAX_RECORDS_PER_REPORT = 4096  # that an agent sends at once


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """Everything new of one job on one node.

    Records of one kind are in the order they were read; how kinds lie among each other means
    nothing, since the wire carries each kind in its own columns. `layouts` are layout files the
    trainer wrote: (generation, canonical JSON). All of it belongs to one `life` of the job (see
    `core.topology.Attachment`). `micro_batches`: those that do not stand among the records; each
    kind of report has them in one of the two.
    """

    job: str
    life: int = 0
    attached: tuple[Attachment, ...] = ()
    records: tuple[Record, ...] = ()
    micro_batches: tuple[MicroBatchTable, ...] = ()
    layouts: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHealth:
    """What an agent says of itself. Counters since the agent's start.

    `num_devices`: those that answer, MIG instances among them.
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
    """Samples as bytes, read when somebody looks; `sampled_s`: when they were told, by the node's
    monotonic clock.
    """

    sampled_s: float

    def read(self) -> T: ...


class LazyNodeData(Protocol):
    """What a report tells of its node, of which nobody has looked at anything yet; `sampled_s` as
    of its parts.
    """

    sampled_s: float

    @property
    def devices(self) -> LazySamples[tuple[DeviceSample, ...]] | None: ...

    @property
    def host(self) -> LazySamples[HostSample] | None: ...

    def health(self) -> AgentHealth: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One batch of one agent; `sequence` ascends by one within one life of the agent.

    `unread`: in place of devices, host and health, where those may wait.
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
    """A plan on its way to the ranks of one life of a job; `sha256` is the digest of `data`."""

    job: str
    generation: int
    base_generation: int
    data: bytes
    sha256: bytes
    life: int = 0
