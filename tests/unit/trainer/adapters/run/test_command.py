"""Commands of launchers, rewritten: where the script stands among their words."""

import sys
from importlib.util import find_spec

import pytest

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.adapters.run.command import RUNNER, job_of_script, rewrite


@pytest.mark.parametrize(
    ("command", "before", "after", "script"),
    [
        ("python train.py --lr 1", "python -m", "train.py --lr 1", "train.py"),
        ("/usr/bin/python3.11 -u t.py", "/usr/bin/python3.11 -u -m", "t.py", "t.py"),
        ("python -W error -Xdev t.py -m x", "python -W error -Xdev -m", "t.py -m x", "t.py"),
        ("python -m pkg.train -x", "python -m", "-m pkg.train -x", "pkg.train"),
        ("python -um pkg.train", "python -u -m", "-m pkg.train", "pkg.train"),
        ("torchrun --nproc-per-node 8 t.py a", "torchrun --nproc-per-node 8 -m", "t.py a", "t.py"),
        ("torchrun --nnodes=2 -m pkg.train", "torchrun --nnodes=2 -m", "-m pkg.train", "pkg.train"),
        (
            "srun -N 2 torchrun --rdzv-id 7 t.py --x -m",
            "srun -N 2 torchrun --rdzv-id 7 -m",
            "t.py --x -m",
            "t.py",
        ),
        (
            "env A=1 python -m torch.distributed.run --nproc-per-node 2 t.py",
            "env A=1 python -m torch.distributed.run --nproc-per-node 2 -m",
            "t.py",
            "t.py",
        ),
    ],
)
def test_the_script_is_run_by_our_module(
    command: str, before: str, after: str, script: str
) -> None:
    found = rewrite(command.split())
    assert " ".join(found.words) == f"{before} {RUNNER} {after}"
    assert found.script == script


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
def test_accelerate_finds_its_own_script() -> None:
    found = rewrite(["accelerate", "launch", "--num_processes", "2", "--cpu", "t.py", "--lr", "1"])
    assert " ".join(found.words) == (
        f"accelerate launch --num_processes 2 --cpu -m {RUNNER} t.py --lr 1"
    )


@pytest.mark.parametrize(
    "command", ["bash train.sh", "python -c pass", "python", "python -", "torchrun --no-python x"]
)
def test_a_command_without_a_script_is_refused(command: str) -> None:
    with pytest.raises(ConfigError) as failure:
        rewrite(command.split())
    assert RUNNER in str(failure.value)


def test_a_launcher_s_usage_names_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rewrite(["torchrun", "--no-such-option", "t.py"])
    assert capsys.readouterr().err.startswith("usage: torchrun ")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/train.py", "train"),
        ("pkg.train", "pkg.train"),
        ("pkg/__main__.py", "pkg"),
        ("my script!.py", "my-script-"),
        ("", "job"),
    ],
)
def test_a_job_is_named_after_its_script(path: str, name: str) -> None:
    assert job_of_script(path) == name


@pytest.mark.parametrize(
    ("command", "runs_here"),
    [
        ("python t.py", True),
        ("torchrun t.py", True),
        ("python -m pkg", False),
        ("torchrun -m pkg", False),
        ("srun python t.py", False),
    ],
)
def test_a_script_of_this_folder_is_known(command: str, runs_here: bool) -> None:
    assert rewrite(command.split()).runs_here is runs_here


def test_a_launcher_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.run", None)
    with pytest.raises(ConfigError) as failure:
        rewrite(["torchrun", "t.py"])
    assert "torch" in str(failure.value) and RUNNER in str(failure.value)
