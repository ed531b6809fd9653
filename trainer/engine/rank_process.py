"""One rank of `pacekeeper launch` under torchrun: its place, its store, and the elastic worker.

torchrun gives the place in the environment, and ends all ranks when one fails: nothing is survived.
Ranks that it starts again resume from the newest checkpoint. All errors leave as exceptions.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pacekeeper.core.addresses import join_address
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ConfigError, UnreachableError
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.trainer.elastic.agreement.kv_store import connect_store
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from pacekeeper.trainer.elastic.launcher import STOP_SIGNALS
from pacekeeper.trainer.elastic.loop import train
from pacekeeper.trainer.elastic.rendezvous import newest_run_id, next_run_id
from pacekeeper.trainer.groups.devices import choose_device, log_device, num_devices

MEETING_S = 120.0  # for which ranks wait for each other; nodes are started one after the other
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_NEEDS_OUR_LAUNCHER = ("snapshot_period_steps", "max_restarts")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank's place in the job and on its node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def is_a_rank(environment: Mapping[str, str]) -> bool:
    """Whether this process was started as a rank, by torchrun or the like."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def place_from(environment: Mapping[str, str]) -> RankPlace:
    """Read a rank's place from the variables that torchrun sets.

    Raises:
        ConfigError: One is missing or no number.
    """
    if missing := [name for name in _VARIABLES if name not in environment]:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, but not {', '.join(missing)}",
            remedy="start the ranks by torchrun, or unset RANK and WORLD_SIZE",
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        text = environment.get(name, environment["WORLD_SIZE"])
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(f"{name}: expected a number from 0 on, got {text!r}")
        numbers[name.lower()] = int(text)
    place = RankPlace(**numbers)
    if place.rank >= place.world_size:
        raise ConfigError(f"RANK: expected less than WORLD_SIZE = {place.world_size}")
    return place


def run_rank(
    config: EngineConfig,
    ring_dir: str,
    run_dir: str,
    faults_dir: str,
    environment: Mapping[str, str],
) -> None:
    """Train as the rank that the environment names, until the end or a signal to stop.

    SIGTERM, SIGINT and SIGHUP end all ranks after the current step.

    Raises:
        PacekeeperError: It cannot start or go on.
    """
    default = EngineConfig()
    for name in _NEEDS_OUR_LAUNCHER:
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(
                f"[engine] {name}: expected {getattr(default, name)!r} under torchrun, which ends "
                f"all ranks when one fails, got {getattr(config, name)!r}",
                remedy="start it by `pacekeeper launch`",
            )
    from pacekeeper.trainer.elastic.engine_worker import EngineWorker  # imports transformers

    place, devices = place_from(environment), num_devices()
    device = choose_device(config.wanted_device, devices, place.local_world_size)
    if place.local_rank == 0:
        log_device(device, config.wanted_device, devices=devices, ranks=place.local_world_size)
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    address = join_address(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
    try:
        found, *_ = next(iter(rendezvous("env://", timeout=timedelta(seconds=MEETING_S))))
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise UnreachableError(
            f"rank {place.rank}: no store at the rendezvous: {str(error).splitlines()[0]}",
            remedy="start node 0 first, and give all nodes its address",
        ) from None
    run_id = first_run_id = 0
    if place.rank == 0:  # the first run's number stands in the store through all attempts
        run_id = next_run_id(newest_run_id(config))
        first = connect_store(address).compare_set("pacekeeper/first_run_id", "", str(run_id))
        first_run_id = int(first) if int(first) != run_id else 0
    store = PrefixStore("pacekeeper", found)
    run_id, first_run_id, node_of = _meet(store, place, run_id, first_run_id)
    spec = RankSpec(
        config=replace(config, device=device),
        rank=place.rank,
        world_size=place.world_size,
        node_of=node_of,
        stores=(address,) * (max(node_of.values()) + 1),
        ring_dir=ring_dir,
        run_dir=run_dir,
        faults_dir=faults_dir,
        run_id=run_id,
        first_run_id=first_run_id,
        store_prefix=f"pacekeeper-{attempt}",
    )
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
    stops = [one for one in STOP_SIGNALS if one != signal.SIGHUP or not is_deaf]
    train(spec, EngineWorker, stop_signals=stops)
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(
    store: PrefixStore, place: RankPlace, run_id: int, first_run_id: int
) -> tuple[int, int, dict[int, int]]:
    """Wait until all ranks are there; return the lowest one's numbers, and the node of each rank.

    Raises:
        UnreachableError: The store is gone, or ranks do not come.
        ConfigError: The ranks were started as ranks of jobs of different sizes.
    """
    patience = timedelta(seconds=MEETING_S)
    own = (place.world_size, run_id, first_run_id, place.rank - place.local_rank)
    store.set(f"rank/{place.rank}", " ".join(map(str, own)))
    keys = [f"rank/{rank}" for rank in range(place.world_size)]
    try:
        store.wait(keys[:1], patience)
        world_size, run_id, first_run_id, _ = map(int, store.get(keys[0]).split())
        if world_size != place.world_size:
            raise ConfigError(
                f"rank {place.rank} is of a job of {place.world_size} ranks, rank 0 of one of "
                f"{world_size}",
                remedy="give all nodes the same --nnodes and --nproc-per-node",
            )
        store.wait(keys, patience)
        first_of = [int(store.get(key).split()[3]) for key in keys]  # the lowest on its node
    except (dist.DistError, RuntimeError) as error:
        if not isinstance(error, dist.DistStoreError):
            raise UnreachableError(f"rank {place.rank}: the rendezvous is gone") from None
        late = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise UnreachableError(
            f"ranks {format_ranks(late)} did not come within {MEETING_S:.0f} s",
            remedy="start all nodes, with the same --nnodes and --nproc-per-node",
        ) from None
    nodes = {first: node for node, first in enumerate(sorted(set(first_of)))}
    return run_id, first_run_id, {rank: nodes[first] for rank, first in enumerate(first_of)}
