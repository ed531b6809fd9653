"""Whole jobs for tests: launchers and ranks on loopback; the agent's part is played by hand."""

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import PacekeeperError
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.records import StepRecord
from pacekeeper.trainer.elastic.agreement.job_key import JobKey
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from support.exact_jobs import assert_losses, rank_in_float64
from support.fork_server import hear_signals, server_address, server_context, share_server
from support.networks import Network, move_to
from support.ports import free_port
from support.rings import records_in

PATIENCE_S = 180.0
SECRET = JobKey(b"the secret of a test")


def write_config(path: Path, config: EngineConfig) -> Path:
    """`config` as a TOML file."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in asdict(config).items()]
    path.write_text("\n".join(["[engine]", *lines]) + "\n")
    return path


@dataclass(kw_only=True)
class Fleet:
    """A job on `num_nodes` launchers of `ranks_per_node` ranks; use as a context manager.

    `body` runs the ranks; the default computes in float64 on the CPU; None: by the real command
    `pacekeeper launch`, which starts more slowly.
    With a `network`, each launcher and its ranks are on their own node of it. All ranks are
    forked from one server that the jobs of all tests share, unless each launcher `has_own_server`,
    as those of the command have: it starts more slowly.
    """

    directory: Path
    config: EngineConfig
    num_nodes: int = 1
    ranks_per_node: int = 4
    body: Callable[[RankSpec], None] | None = rank_in_float64
    port: int = field(default_factory=free_port)
    network: Network | None = None
    key: JobKey = SECRET
    has_own_server: bool = False
    launchers: list["Launcher"] = field(default_factory=list)

    def __enter__(self) -> "Fleet":
        config_file = write_config(self.directory / "job.toml", self.config)
        self.launchers = [Launcher(self, node, config_file) for node in range(self.num_nodes)]
        return self

    def __exit__(self, *_: object) -> None:
        rings = self.directory.glob(f"node-*/{self.config.job}/rank-*.ring")
        pids = [shm_ring.decode_header(path.read_bytes()).pid for path in rings]
        for launcher in self.launchers:
            launcher.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # who is frozen can not see that its launcher ended
            give_up_s = time.monotonic() + PATIENCE_S
            while Path(f"/proc/{pid}").exists():
                assert time.monotonic() < give_up_s, f"rank process {pid} outlived its launcher"
                time.sleep(0.01)

    def join(
        self,
        *,
        ranks_per_node: int = 1,
        at: tuple[int, ...] = (0,),
        body: Callable[[RankSpec], None] | None = rank_in_float64,
        node: int | None = None,
    ) -> "Launcher":
        """One launcher more, which joins the running job at the stores of the nodes `at`.

        On a node of its own, or on that of an ended launcher (`node`). None as `body`: by command.
        """
        node = len(self.launchers) if node is None else node
        stores = ",".join(self.launchers[one].address() for one in at)
        launcher = Launcher(
            replace(self, body=body, ranks_per_node=ranks_per_node), node, Path(), join_at=stores
        )
        self.launchers.append(launcher)
        return launcher

    @property
    def ranks(self) -> range:
        return range(self.num_nodes * self.ranks_per_node)

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def ring_dir(self, node: int) -> Path:
        return self.directory / f"node-{node}"

    def ring_path(self, rank: int) -> Path:
        name = Path(self.config.job) / shm_ring.ring_file_name(rank)
        if rank in self.ranks:
            return self.ring_dir(rank // self.ranks_per_node) / name
        return next(self.directory.glob(f"node-*/{name}"), self.directory / name)

    def pid(self, rank: int) -> int:
        """A rank's process, as it says in its ring."""
        return shm_ring.decode_header(self.ring_path(rank).read_bytes()).pid

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pid(rank), number)

    def log(self, rank: int) -> list[dict[str, Any]]:
        """A rank's log: steps and events."""
        path = self.run_dir / f"steps-{rank}.jsonl"
        if not path.exists():
            return []
        whole = [line for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        return [json.loads(line) for line in whole]

    def steps(self, rank: int) -> list[dict[str, Any]]:
        return [line for line in self.log(rank) if "loss" in line]

    def events(self, rank: int, name: str) -> list[dict[str, Any]]:
        return [line for line in self.log(rank) if line.get("event") == name]

    def generations(self, rank: int) -> list[int]:
        """The generation of each step, without repeats."""
        seen = [line["generation"] for line in self.steps(rank)]
        return [g for i, g in enumerate(seen) if i == 0 or seen[i - 1] != g]

    def redone(self, rank: int) -> list[int]:
        """The steps that a rank told its agent it had done again."""
        records = (r for r in records_in(self.ring_path(rank)) if isinstance(r, StepRecord))
        return [record.step for record in records if record.is_redone]

    def assert_exact(self, ranks: Iterable[int], first: int = 0, end: int | None = None) -> None:
        """These did each step once from `first` on, with the losses of an undisturbed run.

        Until before `end`; None: to the end of the job.
        """
        for rank in ranks:
            assert_losses(self.steps(rank), self.config, first, end or self.config.steps)

    def await_step(self, step: int, rank: int) -> None:
        """Until `rank` has committed `step`."""
        self.await_(lambda: bool(self.steps(rank)) and self.steps(rank)[-1]["step"] >= step)

    def await_(self, is_so: Callable[[], bool]) -> None:
        """Until `is_so`; raises AssertionError, with what the launchers wrote, after PATIENCE_S."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not is_so():
            if time.monotonic() > give_up_s:
                raise AssertionError("\n".join(launcher.output() for launcher in self.launchers))
            time.sleep(0.01)

    def codes(self) -> list[int]:
        """The launchers' exit codes, once all have ended."""
        self.await_(lambda: all(launcher.code() is not None for launcher in self.launchers))
        return [launcher.code() or 0 for launcher in self.launchers]

    def layout(self, generation: int, node: int = 0) -> Layout:
        """A layout the trainer wrote down for the node's agent, in the job's newest run."""
        directory = self.ring_dir(node) / self.config.job
        found = [
            (named[1], path)
            for path in directory.iterdir()
            if (named := shm_ring.parse_layout_file_name(path.name)) and named[0] == generation
        ]
        _, path = max(found)  # of the newest run; raises ValueError where there is none
        return decode_layout(path.read_bytes())

    def offer(self, layout: Layout, base_generation: int) -> None:
        """Offer a plan as every node's agent does: the file first, then the command slots."""
        data = encode_layout(layout)
        for rank in {*self.ranks, *layout.ranks}:
            path = self.ring_path(rank).with_name(shm_ring.plan_file_name(layout.generation))
            path.write_bytes(data)
        command = shm_ring.CommandSlot(
            plan_generation=layout.generation,
            base_generation=base_generation,
            plan_sha256=hashlib.sha256(data).digest(),
        )
        for rank in {*self.ranks, *layout.ranks}:
            self.command(rank, command)

    def command(self, rank: int, command: shm_ring.CommandSlot) -> None:
        """Write a rank's command slot."""
        self.command_at(self.ring_path(rank), command)

    def command_at(self, path: Path, command: shm_ring.CommandSlot) -> None:
        """Write the command slot of the ring at `path`."""
        with path.open("r+b") as file:
            file.seek(shm_ring.COMMAND_OFFSET)
            sequence, _ = shm_ring.decode_command(file.read(shm_ring.COMMAND_BYTES))
            file.seek(shm_ring.COMMAND_OFFSET)
            file.write(shm_ring.encode_command(sequence + 1, command))


class Launcher:
    """One node's supervisor: the real command, or a process that runs `supervise` with a body."""

    def __init__(self, fleet: Fleet, node: int, config_file: Path, *, join_at: str = "") -> None:
        number = len(fleet.launchers) if join_at else node
        self.log_path = fleet.directory / f"launcher-{number}.txt"
        options: dict[str, Any] = {
            "node_rank": node,
            "num_nodes": fleet.num_nodes,
            "ranks_per_node": fleet.ranks_per_node,
            "rendezvous": f"{fleet.network.host(0) if fleet.network else '127.0.0.1'}:{fleet.port}",
            "ring_dir": str(fleet.ring_dir(node)),
            "run_dir": str(fleet.run_dir),
        }
        if join_at:
            kept = ("ranks_per_node", "ring_dir", "run_dir")
            options = {"join": join_at} | {name: options[name] for name in kept}
        if fleet.body is None:
            assert fleet.network is None, "the command runs on this computer's own network"
            line = [sys.executable, "-m", "pacekeeper.cli.main", "launch"]
            line += [] if join_at else ["--config", str(config_file)]
            for name, value in options.items():
                line += [f"--{name.replace('_', '-')}", str(value)]
            environment = os.environ | {"PACEKEEPER_JOB_SECRET": fleet.key.secret.decode()}
            with self.log_path.open("w") as log:
                self._process: Any = subprocess.Popen(line, stdout=log, stderr=log, env=environment)
        else:
            options["key"] = fleet.key
            context = server_context()
            address = "" if fleet.has_own_server else server_address()
            keeper = fleet.network.keeper(node) if fleet.network else 0
            self._process = context.Process(
                target=_supervise,
                args=(fleet.config, options, fleet.body, str(self.log_path), address, keeper),
            )
            self._process.start()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def code(self) -> int | None:
        """The exit code; None while it runs."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll()
        code: int | None = self._process.exitcode
        return code

    def terminate(self) -> None:
        """SIGTERM: end at the next step boundary."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL; its ranks end with it."""
        self._process.kill()
        if isinstance(self._process, subprocess.Popen):
            self._process.wait()
        else:
            self._process.join()

    def address(self) -> str:
        """HOST:PORT of its store, as it says."""
        return self.output().partition("store=")[2].split()[0]

    def output(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A body on its launcher's node, whose words go into its log: the server knows neither."""

    log_path: str
    keeper: int
    body: Callable[[RankSpec], None]

    def __call__(self, spec: RankSpec) -> None:
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if self.keeper:
            move_to(self.keeper)
        self.body(spec)


def _supervise(
    config: EngineConfig,
    options: dict[str, Any],
    body: Callable[[RankSpec], None],
    log_path: str,
    server: str,
    keeper: int,
) -> None:
    from pacekeeper.trainer.elastic.joining.node_join import JoinSpec, join
    from pacekeeper.trainer.elastic.launch_spec import NodeSpec
    from pacekeeper.trainer.elastic.restart_policy import supervise_with_restarts

    if server:
        share_server(server)
        body = Beside(log_path=log_path, keeper=keeper, body=body)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if keeper:
        move_to(keeper)
    hear_signals()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        if "join" in options:
            addresses = tuple(options.pop("join").split(","))
            code = join(JoinSpec(addresses=addresses, **options), body)
        else:
            code = supervise_with_restarts(NodeSpec(config=config, **options), body)
    except PacekeeperError as error:
        logging.error("%s", error)
        code = error.exit_code
    os._exit(int(code))
