"""What the launcher of one node is started with: settings, and the numbers of node and ranks."""

import contextlib
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pacekeeper.core.addresses import split_address
from pacekeeper.core.config.engine import PATHS, EngineConfig
from pacekeeper.core.errors import HostError
from pacekeeper.core.telemetry.shm_ring import MAX_RANKS
from pacekeeper.trainer.elastic.agreement.job_key import UNSIGNED, JobKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What a node that joins is given in place of numbers by rule: its first rank's number.

    `world_size`: ranks the job began with; `node_of`: of all that were members before.
    """

    first_rank: int
    world_size: int
    node_of: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """What a supervisor is started with. Ranks of node i: i * ranks_per_node and following.

    Unless it has a `seat` in a job that is running. `key`: of the job, the same on all nodes.
    """

    config: EngineConfig
    node_rank: int
    num_nodes: int
    ranks_per_node: int
    rendezvous: str
    ring_dir: str
    run_dir: str
    faults_dir: str = ""
    seat: Seat | None = None
    key: JobKey = UNSIGNED

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ValueError("a job needs at least one node and one rank per node")
        if self.world_size > MAX_RANKS:
            raise ValueError(f"{self.world_size} ranks: a job has at most {MAX_RANKS}")
        if not 0 <= self.node_rank < self.num_nodes:
            raise ValueError(f"node-rank: expected 0 to {self.num_nodes - 1}, got {self.node_rank}")
        try:
            split_address(self.rendezvous)
        except ValueError as error:
            raise ValueError(f"rendezvous: {error}") from None

    @property
    def ranks(self) -> range:
        first = self.node_rank * self.ranks_per_node
        if self.seat is not None:
            first = self.seat.first_rank
        return range(first, first + self.ranks_per_node)

    @property
    def node_of(self) -> dict[int, int]:
        """The node of every rank of the job."""
        if self.seat is not None:
            return {**self.seat.node_of, **dict.fromkeys(self.ranks, self.node_rank)}
        return {rank: rank // self.ranks_per_node for rank in range(self.world_size)}

    @property
    def world_size(self) -> int:
        """Ranks that the job begins with."""
        if self.seat is not None:
            return self.seat.world_size
        return self.num_nodes * self.ranks_per_node

    @property
    def terms(self) -> dict[str, object]:
        """What must be equal on all launchers of the job."""
        settings = asdict(self.config)
        for name in ("device", *PATHS):  # node 0's holds for all, and places on one node
            del settings[name]
        return settings | {"num-nodes": self.num_nodes, "ranks-per-node": self.ranks_per_node}


RANK_BYTES = 128 << 20  # of its own, beside torch itself: 135 to 143 MB with the smallest models


_OTHER_FILES = 32  # a rank's open files beside one connection to each other rank


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """None: this system does not tell."""

    memory_bytes: int | None
    open_files: int | None


def node_limits(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> NodeLimits:
    """Of this node and this process, as they are now."""
    free = [_available(proc), _cgroup_free(cgroup)]
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeLimits(
        memory_bytes=min((b for b in free if b is not None), default=None),
        open_files=None if soft == resource.RLIM_INFINITY else soft,
    )


def check_startable(ranks_per_node: int, world_size: int, limits: NodeLimits) -> None:
    """Raises HostError where so many ranks can not run here."""
    needed = ranks_per_node * RANK_BYTES
    if limits.memory_bytes is not None and needed > limits.memory_bytes:
        raise HostError(
            f"{ranks_per_node} ranks need {needed / 2**30:.1f} GiB of memory at the least, "
            f"{limits.memory_bytes / 2**30:.1f} GiB are available",
            remedy=f"at most {limits.memory_bytes // RANK_BYTES} with --ranks-per-node",
        )
    files = world_size + _OTHER_FILES
    if limits.open_files is not None and files > limits.open_files:
        raise HostError(
            f"each of {world_size} ranks needs {files} open files, {limits.open_files} are allowed",
            remedy=f"raise the limit with `ulimit -n {files}`, or start fewer ranks",
        )


def _available(proc: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cgroup_free(cgroup: Path) -> int | None:
    """Room below the limit of this process's memory group, where there is one (containers)."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((cgroup / "memory.max").read_text())
        return max(0, limit - int((cgroup / "memory.current").read_text()))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What a rank's process is started with. `node_of`: the number of each rank's node; `stores`:
    address of each node's store; `first_run_id`: of the launch which began the job (0: this one).
    `world_size`: ranks the job began with; a newcomer is none of them. `store_prefix`: of the job's
    keys where torchrun started it, which has one store and ends all ranks with the first that
    fails; empty: our launcher did. `key`: of this run.
    """

    config: EngineConfig
    rank: int
    world_size: int
    node_of: Mapping[int, int]
    stores: tuple[str, ...]
    ring_dir: str
    run_dir: str
    faults_dir: str = ""
    run_id: int = 0
    first_run_id: int = 0
    is_newcomer: bool = False
    store_prefix: str = ""
    key: JobKey = UNSIGNED
