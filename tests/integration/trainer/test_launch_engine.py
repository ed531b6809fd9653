"""`pacekeeper launch` with the engine: ranks that are processes, and how they end."""

import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ExitCode, HostError
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Clock
from pacekeeper.core.telemetry.records import MicroBatchRecord
from support.engine_jobs import logged, run_example, small_job, write_data, write_model
from support.ports import free_port
from support.rings import records_in

pytest.importorskip("transformers")

from pacekeeper.trainer.elastic.launcher import rank_server
from pacekeeper.trainer.engine.launcher import LOADED, EngineNode, RankFailure, launch
from pacekeeper.trainer.engine.rank_process import RunFolders


def run(
    config: EngineConfig, folder: Path, ranks: int, name: str = "run", faults_dir: str = ""
) -> Path:
    run_dir = folder / name
    launch(
        EngineNode(
            config=config,
            folders=RunFolders(
                ring_dir=str(folder / "rings"), run_dir=str(run_dir), faults_dir=faults_dir
            ),
            node_rank=0,
            num_nodes=1,
            ranks_per_node=ranks,
            rendezvous=f"127.0.0.1:{free_port()}",
        )
    )
    return run_dir


def rank_processes() -> list[BaseProcess]:
    return [one for one in multiprocessing.active_children() if one.name.startswith("rank-")]


def when_it_trains(run_dir: Path, act: Callable[[], None]) -> None:
    """Do something beside the launcher as soon as steps are made."""

    def watch() -> None:
        while len(logged(run_dir)) < 2:
            time.sleep(0.05)
        act()

    threading.Thread(target=watch, daemon=True).start()


def test_four_ranks_train_as_one_does(tmp_path: Path) -> None:
    config = small_job(tmp_path, replicas=2, evaluation_fraction=0.1, evaluation_rows=5)
    four = logged(run(config, tmp_path, 4, "four"))
    one = logged(run(replace(config, replicas=1), tmp_path, 1, "one"))
    assert len(four) == len(one) == config.steps
    assert four[-1]["loss"] < four[0]["loss"] - 0.8
    for name in ("loss", "grad_norm", "evaluation_loss"):
        pairs = [(a[name], b[name]) for a, b in zip(four, one, strict=True) if name in b]
        assert pairs and all(a == pytest.approx(b, rel=1e-4) for a, b in pairs)


def test_ranks_on_emulated_devices_report_their_times(tmp_path: Path) -> None:
    config = small_job(tmp_path, steps=4, emulate=True, emulated_step_s=0.1, emulated_noise=False)
    (tmp_path / "rank-1.json").write_text('{"slowdown": 4.0}')
    run(config, tmp_path, 2, faults_dir=str(tmp_path))
    rings = sorted((tmp_path / "rings").rglob("*.ring"))
    heads = [shm_ring.decode_header(path.read_bytes()) for path in rings]
    assert [head.clock for head in heads] == [Clock.EMULATED] * 2
    spent = [
        sum(one.compute_s for one in records_in(path) if isinstance(one, MicroBatchRecord))
        for path in rings
    ]
    assert spent[1] / spent[0] == pytest.approx(4.0, rel=0.5)  # routing is not even


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    def kill() -> None:
        (victim,) = (one for one in rank_processes() if one.name == "rank-1")
        os.kill(int(victim.pid or 0), signal.SIGKILL)

    when_it_trains(tmp_path / "run", kill)
    with pytest.raises(RankFailure, match=r"rank 1 .* SIGKILL") as caught:
        run(small_job(tmp_path, steps=1_000_000), tmp_path, 2)
    assert caught.value.exit_code == 128 + signal.SIGKILL
    assert not rank_processes()


def test_a_signal_ends_all_ranks_after_their_step(tmp_path: Path) -> None:
    when_it_trains(tmp_path / "run", lambda: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    run_dir = run(small_job(tmp_path, steps=1_000_000), tmp_path, 2)
    steps = [line["step"] for line in logged(run_dir)]
    assert steps == list(range(len(steps))) and len(steps) >= 2
    assert not rank_processes() and signal.getsignal(signal.SIGTERM) is before


def test_an_error_of_all_ranks_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"none\.bin") as caught:
        run(small_job(tmp_path, data=(str(tmp_path / "none.bin"),)), tmp_path, 2)
    assert caught.value.exit_code in (ExitCode.CONFIG, ExitCode.DATA, ExitCode.HOST)
    assert caught.value.remedy and not rank_processes()
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_found_before_a_rank_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        node = EngineNode(
            config=small_job(tmp_path),
            folders=RunFolders(ring_dir=str(tmp_path), run_dir=str(tmp_path / "run")),
            node_rank=0,
            num_nodes=1,
            ranks_per_node=2,
            rendezvous=f"127.0.0.1:{other.getsockname()[1]}",
        )
        with pytest.raises(HostError):
            launch(node)


def example(folder: Path, out: str, ranks: int) -> list[float]:
    """The losses that the example prints on the lowest rank."""
    node = EngineNode(
        config=EngineConfig(),
        folders=RunFolders(ring_dir="", run_dir=""),
        node_rank=0,
        num_nodes=1,
        ranks_per_node=ranks,
        rendezvous=f"127.0.0.1:{free_port()}",
    )
    words = [str(folder / name) for name in ("model", "tokens.bin", out)]
    started = []
    for rank in range(ranks):
        own = node.environment(rank) if ranks > 1 else {}
        own |= {"TORCHELASTIC_USE_AGENT_STORE": ""}  # the lowest rank serves the store
        output = str(folder / f"{out}-{rank}.txt")
        process = rank_server(LOADED).Process(target=run_example, args=(own, words, output))
        process.start()
        started.append(process)
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * ranks
    assert all((folder / f"{out}-{rank}.txt").read_text() == "" for rank in range(1, ranks))
    return [float(x) for x in re.findall(r"loss (\S+)", (folder / f"{out}-0.txt").read_text())]


def test_the_example_gives_the_same_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_data(tmp_path / "tokens.bin", 6_000)
    two = example(tmp_path, "two", 2)
    assert len(two) == 5 and two[3] < two[0] - 1.0
    assert two == pytest.approx(example(tmp_path, "one", 1), rel=1e-3)
    assert (tmp_path / "two" / "model.safetensors.index.json").is_file()
