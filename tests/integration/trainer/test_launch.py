"""Jobs that nothing happens to: what they train and export, how they follow requests to end.

Also the example of the library, under the variables of torchrun.
"""

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ExitCode, HostError
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from pacekeeper.trainer.elastic.loop import rank_main
from support.commands import pacekeeper
from support.engine_jobs import logged, run_example, small_job, write_data, write_model
from support.exact_jobs import exact_job, saved, saving
from support.fleet import Fleet
from support.fork_server import server_context
from support.ports import free_port

pytest.importorskip("transformers")


def test_four_ranks_train_as_one_does(tmp_path: Path) -> None:
    config = small_job(tmp_path, replicas=2, evaluation_fraction=0.1, evaluation_rows=5)
    runs = []
    for ranks in (4, 1):
        directory = tmp_path / str(ranks)
        directory.mkdir()
        own = replace(config, replicas=min(ranks, 2))
        with Fleet(directory=directory, config=own, ranks_per_node=ranks, body=rank_main) as fleet:
            assert fleet.codes() == [0]
            runs.append(logged(fleet.run_dir))
    four, one = runs
    assert len(four) == len(one) == config.steps
    assert four[-1]["loss"] < four[0]["loss"] - 0.8
    for name in ("loss", "grad_norm", "evaluation_loss"):
        pairs = [(a[name], b[name]) for a, b in zip(four, one, strict=True) if name in b]
        assert pairs and all(a == pytest.approx(b, rel=1e-4) for a, b in pairs)


@pytest.mark.parametrize("is_early", [False, True])
def test_a_request_to_end_is_followed_by_the_whole_job_at_one_step(
    tmp_path: Path, is_early: bool
) -> None:
    """Nothing is exported. One that comes while ranks start is followed after a step."""
    config = exact_job(tmp_path, steps=100_000, export_dir=str(tmp_path / "out"))
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=2) as fleet:
        if is_early:
            fleet.await_(lambda: "rank=3 pid=" in fleet.launchers[1].output())
        else:
            fleet.await_step(4, 3)
        fleet.launchers[1].terminate()
        assert fleet.codes() == [0, 0]
        (number,) = {len(fleet.steps(rank)) for rank in range(4)}
        assert number == 1 if is_early else number > 4
        assert [line["step"] for line in logged(fleet.run_dir)] == list(range(number))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_request_to_end_that_goes_to_every_process_is_followed_in_order(
    tmp_path: Path, number: signal.Signals
) -> None:
    # As `kill -- -GROUP`, `timeout`, systemd, Slurm and a terminal that closes send it: ranks and
    # their server get it, too.
    config = exact_job(tmp_path, steps=100_000)
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=2) as fleet:
        fleet.await_step(4, 3)
        ranks = [fleet.pid(2), fleet.pid(3)]
        for pid in [*{parent(pid) for pid in ranks}, *ranks, fleet.launchers[1].pid]:
            os.kill(pid, number)
        assert fleet.codes() == [0, 0]
        assert len({fleet.steps(rank)[-1]["step"] for rank in range(4)}) == 1


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_trained_model_is_exported_by_all_ranks(tmp_path: Path) -> None:
    config = small_job(tmp_path, export_dir=str(tmp_path / "out"))
    with Fleet(directory=tmp_path, config=config, ranks_per_node=3) as fleet:
        assert fleet.codes() == [0]
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() > 0


def no_room(spec: RankSpec) -> None:
    """The body of a rank that cannot export."""
    from pacekeeper.trainer.engine.engine import Engine

    def export(*_: object) -> None:
        raise HostError("no room")

    Engine.export = export  # type: ignore[assignment,method-assign]
    rank_main(spec)


def test_the_last_checkpoint_is_saved_though_the_export_fails(tmp_path: Path) -> None:
    config = saving(small_job(tmp_path, export_dir=str(tmp_path / "out")))
    with Fleet(directory=tmp_path, config=config, ranks_per_node=2, body=no_room) as fleet:
        assert fleet.codes() == [ExitCode.HOST]
        assert [one.step for one in saved(config)] == [config.steps, 4]
    out = str(tmp_path / "of a checkpoint")
    done = pacekeeper("checkpoint", "export", config.checkpoint_dir, config.model, out)
    assert done.returncode == ExitCode.OK, done.stderr
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 0


def test_an_error_before_the_first_step_ends_all_ranks_with_its_code(tmp_path: Path) -> None:
    config = small_job(tmp_path, data=(str(tmp_path / "none.bin"),))
    with Fleet(directory=tmp_path, config=config, ranks_per_node=2) as fleet:
        (code,) = fleet.codes()
        assert code in (ExitCode.CONFIG, ExitCode.DATA, ExitCode.HOST)
        assert "none.bin" in fleet.launchers[0].output()
        assert not logged(fleet.run_dir)


def torchrun_places(ranks: int) -> list[dict[str, str]]:
    """The variables of each rank of one node."""
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def example(folder: Path, out: str, ranks: int) -> list[float]:
    """The losses that the example prints on the lowest rank."""
    words = [str(folder / name) for name in ("model", "tokens.bin", out)]
    started = []
    for rank, own in enumerate(torchrun_places(ranks) if ranks > 1 else [{}]):
        output = str(folder / f"{out}-{rank}.txt")
        process = server_context().Process(target=run_example, args=(own, words, output))
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


def torchrun_rank(environment: dict[str, str], config: EngineConfig, folder: str) -> None:
    """In a process of its own: a rank as torchrun starts it."""
    from pacekeeper.trainer.engine.rank_process import run_rank

    os.environ.update(environment)
    run_rank(config, f"{folder}/rings", f"{folder}/run", "", environment)


def under_torchrun(config: EngineConfig, folder: Path, ranks: int = 2) -> list[int | None]:
    """The exit codes of ranks without our launcher."""
    started = []
    for own in torchrun_places(ranks):
        process = server_context().Process(target=torchrun_rank, args=(own, config, str(folder)))
        process.start()
        started.append(process)
    for process in started:
        process.join()
    return [process.exitcode for process in started]


def test_ranks_of_torchrun_train_as_ours_do_and_resume(tmp_path: Path) -> None:
    config = saving(small_job(tmp_path))
    assert under_torchrun(config, tmp_path) == [0, 0]
    losses = [line["loss"] for line in logged(tmp_path / "run")]
    assert len(losses) == config.steps
    assert [one.step for one in saved(config)] == [config.steps, 4]
    plain = small_job(tmp_path)
    with Fleet(directory=tmp_path, config=plain, ranks_per_node=2, body=rank_main) as fleet:
        assert fleet.codes() == [0]
        assert losses == pytest.approx([line["loss"] for line in logged(fleet.run_dir)], rel=1e-6)
    longer = replace(config, steps=config.steps + 2)
    assert under_torchrun(longer, tmp_path) == [0, 0]
    assert [line["step"] for line in logged(tmp_path / "run")][-2:] == [6, 7]
