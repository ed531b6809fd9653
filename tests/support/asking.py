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
from pacekeeper.core.layout.codec import decode_layout
from pacekeeper.protos import status_pb2, status_pb2_grpc


def quick_job(directory: Path, *, step_s: float, replicas: int = 2) -> Path:
    """Settings of a trainer with short emulated steps, and arithmetic that is smaller by more."""
    path = directory / "train.toml"
    path.write_text(
        "[train]\nnum_layers = 2\nhidden_size = 32\nexpert_hidden_size = 32\nrow_tokens = 48\n"
        f"emulated_step_s = {step_s}\nreplicas = {replicas}\n"
    )
    return path


@contextmanager
def quick_fleet(directory: Path, *, seed: int, replicas: int = 2) -> Iterator[Fleet]:
    """The demo's fleet with a quick job, for ever."""
    with (
        claim_run_dir(directory / "run") as folder,
        Fleet(
            run_dir=folder,
            job="loop",
            steps=1_000_000,
            seed=seed,
            clock="emulated",
            train_file=quick_job(directory, step_s=0.06, replicas=replicas),
        ) as fleet,
    ):
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
        """Incidents that are no advice on how the work is spread."""
        return [i for i in self.incidents() if not i.kind.endswith("_imbalance")]

    def layout(self) -> Any:
        request = status_pb2.GetLayoutRequest(job="loop")
        return decode_layout(self.stub.GetLayout(request, timeout=30.0).layout_json)
