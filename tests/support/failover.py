"""Controllers on one database, as processes; a fast lease, so that tests are quick."""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.controllers import ControllerProcess, until
from support.ports import free_port

FAST = "[lease]\nduration_s = 2.5\nrenew_s = 0.4\nmargin_s = 0.5\n"
SERVING = health_pb2.HealthCheckResponse.SERVING


class Pair:
    """Two controllers on one PostgreSQL database.

    Args:
        urls: How each of them reaches it.
        environments: Further variables of each of them; None: none.
    """

    def __init__(
        self,
        folder: Path,
        urls: str | tuple[str, str],
        settings: str = FAST,
        *,
        environments: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        self._folder = folder
        self._urls = (urls, urls) if isinstance(urls, str) else urls
        self._environments = environments
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]  # of agents
        self.apis = [f"127.0.0.1:{free_port()}" for _ in range(2)]  # of commands
        self.processes: list[ControllerProcess | None] = [None, None]
        for index in range(2):
            (folder / f"c{index}").mkdir()
            audit = f'[access]\naudit = "{folder}/c{index}/audit.jsonl"\n'
            (folder / f"c{index}.toml").write_text(f'{settings}member = "c{index}"\n{audit}')

    @property
    def both(self) -> str:
        """What agents are told."""
        return ",".join(self.addresses)

    def start(self, index: int) -> ControllerProcess:
        process = ControllerProcess(
            self._folder / f"c{index}",
            *("--store", self._urls[index], "--config", str(self._folder / f"c{index}.toml")),
            listen=self.addresses[index],
            api_listen=self.apis[index],
            is_fresh=self._environments is not None,
            environment=None if self._environments is None else self._environments[index],
        )
        self.processes[index] = process
        return process

    def kill(self, index: int) -> int:
        """Kill it, also if it is frozen; the exit code."""
        process = self.processes[index]
        assert process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.process.pid, signal.SIGCONT)
        self.processes[index] = None
        return process.kill()

    def signal(self, index: int, number: signal.Signals) -> None:
        process = self.processes[index]
        assert process is not None
        process.process.send_signal(number)

    def log(self, index: int) -> str:
        return (self._folder / f"c{index}" / "controller.log").read_text()

    def is_leading(self, index: int) -> bool:
        """Does it say that it serves?"""
        return is_serving(self.apis[index])

    def leader(self, *of: int) -> int:
        """Who of these leads, once somebody does."""
        found = until("somebody leads", lambda: [i for i in of or (0, 1) if self.is_leading(i)])
        return int(found[0])

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        for index in range(2):
            if self.processes[index] is not None:
                self.kill(index)


def is_serving(address: str) -> bool:
    """As a probe asks it."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=1.0)
        except grpc.RpcError:
            return False
    return bool(answer.status == SERVING)


@contextlib.contextmanager
def running(
    folder: Path, urls: str | tuple[str, str], settings: str = FAST
) -> Iterator[tuple[Pair, int]]:
    """Both of a pair, and who leads."""
    with Pair(folder, urls, settings) as pair:
        pair.start(0)
        pair.start(1)
        leader = pair.leader()
        until("the other stands by", lambda: "stands by" in pair.log(1 - leader))
        yield pair, leader
