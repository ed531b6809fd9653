"""One rank of `pacekeeper launch` under torchrun: its place, device, process groups, training.

torchrun gives the place in the environment. All errors leave as exceptions. Nothing is survived.
"""

import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ConfigError, UnreachableError
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.kernel_laws.noise import DEVICE_NOISE, NO_NOISE
from pacekeeper.core.telemetry.attachment import Clock
from pacekeeper.trainer.adapters import reporter
from pacekeeper.trainer.emulation.faults import Burner, FaultInjector, fault_targets
from pacekeeper.trainer.groups.devices import choose_device, num_devices
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.hooks.compute_timers import CpuClock, SegmentClock
from pacekeeper.trainer.hooks.hooks import RUN_ID_VARIABLE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MEETING_S = 120.0  # for which ranks wait for each other; nodes are started one after the other
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_NEEDS_OUR_LAUNCHER = (
    "checkpoint_dir",
    "snapshot_period_steps",
    "replica_check_period_steps",
    "max_restarts",
    "resume",
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolders:
    """Where a rank writes: records for the agent of its node, and the step log.

    `faults_dir` holds orders of faults to inject; "": none are.
    """

    ring_dir: str
    run_dir: str
    faults_dir: str = ""


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


def run_rank(config: EngineConfig, folders: RunFolders, environment: Mapping[str, str]) -> None:
    """Train as the rank that the environment names, until the end or a signal to stop.

    SIGTERM, SIGINT and SIGHUP end all ranks after the current step.

    Raises:
        PacekeeperError: It cannot start or go on.
    """
    # They import transformers, which launchers lack.
    from pacekeeper.trainer.emulation.engine_device import EngineDevice
    from pacekeeper.trainer.engine.training import train

    _require_supported(config)
    asked: list[int] = []
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda given, _: asked.append(given))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    place = place_from(environment)
    kind = choose_device(config.wanted_device, num_devices(), place.local_world_size)
    device = torch.device(kind, place.local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in environment:
        torch.set_num_threads(max((os.cpu_count() or 1) // place.local_world_size, 1))
    if place.world_size == 1:
        groups = EngineGroups.single_process()
    else:
        _meet(place, kind)
        groups = EngineGroups.from_torch(device)
    emulated, faults, burner = None, None, Burner()
    timing: tuple[Clock, SegmentClock] | None = None
    if config.emulate:
        law = DEVICE_NOISE if config.emulated_noise else NO_NOISE
        emulated = EngineDevice.seeded(config.seed * 1000 + place.rank, law)
        timing = Clock.EMULATED, emulated
    elif folders.faults_dir:
        timing = Clock.CPU, CpuClock(burn=burner)
    if folders.faults_dir:
        faults = FaultInjector(
            directory=Path(folders.faults_dir),
            rank=place.rank,
            targets=fault_targets(emulated, burner),
        )
    hooks = reporter.attach(
        job=config.job,
        device=device,
        rank=place.rank,
        world_size=place.world_size,
        ring_dir=folders.ring_dir,
        timing=timing,
    )
    train(
        config,
        groups,
        device=device,
        ranks_on_node=place.local_world_size,
        run_dir=Path(folders.run_dir),
        hooks=hooks,
        emulated=emulated,
        faults=faults,
        is_stop_asked=lambda: bool(asked),
    )
    hooks.detach()
    if place.world_size > 1:
        dist.destroy_process_group()


def _require_supported(config: EngineConfig) -> None:
    default = EngineConfig()
    for name in _NEEDS_OUR_LAUNCHER:
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(
                f"[engine] {name}: expected {getattr(default, name)!r} under torchrun, which ends "
                f"all ranks when one fails, got {getattr(config, name)!r}",
                remedy="start it by `pacekeeper launch`",
            )


def _meet(place: RankPlace, kind: str) -> None:
    """Initialise torch.distributed when all ranks are there.

    Raises:
        UnreachableError: There is no store, or ranks do not come.
        ConfigError: The ranks were started as ranks of jobs of different sizes.
    """
    patience = timedelta(seconds=MEETING_S)
    try:
        found, _, _ = next(iter(rendezvous("env://", timeout=patience)))
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise UnreachableError(
            f"rank {place.rank}: no store at the rendezvous: {str(error).splitlines()[0]}",
            remedy="start node 0 first, and give all nodes its address",
        ) from None
    store = PrefixStore("pacekeeper", found)
    own_run_id = os.environ.get(RUN_ID_VARIABLE) or str(int(time.time() * 1000))
    store.set(f"rank/{place.rank}", f"{place.world_size} {own_run_id}")
    try:
        store.wait(["rank/0"], patience)
        world_size, run_id = store.get("rank/0").decode().split()
        if int(world_size) != place.world_size:
            raise ConfigError(
                f"rank {place.rank} is of a job of {place.world_size} ranks, rank 0 of one of "
                f"{world_size}",
                remedy="give all nodes the same --num-nodes and --ranks-per-node",
            )
        store.wait([f"rank/{rank}" for rank in range(place.world_size)], patience)
    except (dist.DistError, RuntimeError) as error:
        if not isinstance(error, dist.DistStoreError):
            raise UnreachableError(f"rank {place.rank}: the rendezvous is gone") from None
        late = [r for r in range(place.world_size) if not store.check([f"rank/{r}"])]
        raise UnreachableError(
            f"ranks {format_ranks(late)} did not come within {MEETING_S:.0f} s",
            remedy="start all nodes, with the same --num-nodes and --ranks-per-node",
        ) from None
    os.environ[RUN_ID_VARIABLE] = run_id  # one launch, as the controller sees it
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=PrefixStore("groups", store),
        rank=place.rank,
        world_size=place.world_size,
    )
