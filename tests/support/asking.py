"""Asks a controller of real processes, and waits for what it should say."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from pacekeeper.cli.demo.fleet import Fleet
from pacekeeper.cli.demo.recorder import read_step_log
from pacekeeper.cli.demo.run_dir import claim_run_dir
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.layout.codec import decode_layout
from pacekeeper.protos import status_pb2, status_pb2_grpc
from support.engine_jobs import small_job, write_model


def quick_job(directory: Path, *, seed: int, replicas: int = 2) -> EngineConfig:
    """A small model, for ever, with kernels of a larger one and short emulated steps.

    The noise of its devices follows from the seed: with 3 or 10 a rank is slow for some steps.
    """
    write_model(directory / "shapes", hidden_size=2048, moe_intermediate_size=1024, head_dim=128)
    return small_job(
        directory,
        job="loop",
        steps=1_000_000,
        seed=seed,
        rows_per_step=32,
        rows_per_microbatch=32,
        learning_rate=0.001,
        balance_weight=0.01,
        replicas=replicas,
        emulate=True,
        emulated_step_s=0.06,
        emulated_model=str(directory / "shapes"),
        emulated_row_tokens=1024,
    )


@contextmanager
def quick_fleet(
    directory: Path,
    config: EngineConfig,
    prepare: Callable[[Path, EngineConfig], object] = lambda *_: None,
) -> Iterator[Fleet]:
    """The demo's fleet with a job, once `prepare` has written what the job needs."""
    with claim_run_dir(directory / "run") as folder:
        prepare(folder, config)
        with Fleet(run_dir=folder, config=config) as fleet:
            yield fleet


def assert_no_step_is_lost(fleet: Fleet, ranks: Iterable[int]) -> None:
    """Each rank's log holds every step once, in order."""
    for rank in ranks:
        steps = [s.step for s in read_step_log(fleet.run_dir / "train" / f"steps-{rank}.jsonl")]
        assert steps == list(range(len(steps)))


def until(what: str, holds: Callable[[], bool], seconds: float = 150.0) -> None:
    """Wait for the world; the limit is for a broken one only."""
    give_up_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up_s, f"never: {what}"
        time.sleep(0.05)


class Asking:
    """The status service; a controller that is away answers nothing."""

    def __init__(self, address: str) -> None:
        self.stub = status_pb2_grpc.StatusServiceStub(grpc.insecure_channel(address))

    def job(self) -> Any:
        try:
            return self.stub.GetJob(status_pb2.GetJobRequest(job="loop"), timeout=30.0).job
        except grpc.RpcError:
            return status_pb2.Job()

    def incidents(self) -> list[Any]:
        try:
            answer = self.stub.ListIncidents(status_pb2.ListIncidentsRequest(), timeout=30.0)
        except grpc.RpcError:
            return []
        return list(answer.incidents)

    def faults(self) -> list[Any]:
        """Incidents that accuse a rank: neither advice, nor what all ranks of a busy host share."""
        return [i for i in self.incidents() if i.HasField("rank")]

    def layout(self) -> Any:
        request = status_pb2.GetLayoutRequest(job="loop")
        return decode_layout(self.stub.GetLayout(request, timeout=30.0).layout_json)
