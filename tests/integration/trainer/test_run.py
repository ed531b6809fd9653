"""`pacekeeper run`: scripts that know nothing of pacekeeper, and what their ranks report."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.commands import FRESH
from support.foreign_ranks import CASE, Told, needs
from support.ports import free_port
from support.rings import records_in
from support.tree import ROOT

SCRIPTS = ROOT / "tests" / "support" / "foreign_scripts"
PATIENCE_S = 300.0  # for a broken world only


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """`pacekeeper run COMMAND`, with rings in `folder`."""
    return subprocess.run(
        [*FRESH, "run", "--ring-dir", str(folder / "rings"), "--", *command],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            "PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), *sys.path)),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def told(folder: Path, job: str, rank: int = 0) -> Told:
    return Told(records_in(folder / "rings" / job / f"rank-{rank:05d}.ring"))


def micro_batches(of: Told) -> list[tuple[int, int, int]]:
    return [(r.step, r.micro_batch, r.tokens) for r in of.micro_batches]


def test_ranks_of_torchrun_report_all_steps_but_the_first(tmp_path: Path) -> None:
    """Gradient accumulation under DDP, two optimizers, an evaluation before each step."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = run(tmp_path, *torchrun, "--master-port", str(free_port()), str(SCRIPTS / "nano_gpt.py"))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = told(tmp_path, "nano_gpt", rank)
        assert micro_batches(found) == [(s, b, 64) for s in (1, 2) for b in range(3)]
        assert {(r.sum_len_squared, r.num_documents) for r in found.micro_batches} == {
            (4 * 16 * 16, 4)
        }
        assert [r.step for r in found.steps] == [1, 2]
        assert all(r.loss is not None and 3.5 < r.loss < 5.0 for r in found.steps)  # near log 64


def test_a_script_is_run_as_python_runs_it(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "nano_gpt.py"), "--steps", "2"]
    alone = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    done = run(tmp_path, *command)
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout) == (7, done.stdout)
    assert done.stdout.startswith(f"as we were __main__ ['--steps', '2'] {SCRIPTS} False")
    assert micro_batches(told(tmp_path, "nano_gpt")) == [(1, b, 64) for b in range(3)]


def test_a_module_that_never_trains_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(
        "import os, signal, sys\n"
        "print(__name__, sys.argv[1:], __spec__.name, 'torch' in sys.modules, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = run(tmp_path, sys.executable, "-m", "plain", "-x")
    assert done.stdout == "__main__ ['-x'] plain False\n", done.stderr
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
    assert not (tmp_path / "rings").exists()


def test_a_command_without_a_script_is_refused(tmp_path: Path) -> None:
    for command in (["bash", "train.sh"], [sys.executable, "missing.py"]):
        done = run(tmp_path, *command)
        assert (done.returncode, done.stdout) == (3, "")
        assert command[-1] in done.stderr


def test_an_option_of_no_one_is_refused(tmp_path: Path) -> None:
    words = [*FRESH, "run", "--nproc-per-node", "2", sys.executable, "t.py"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "Error: No such option '--nproc-per-node'."


@pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs transformers and accelerate: pip install 'pacekeeper[dev-adapters]'",
)
def test_hugging_faces_trainer_is_attached_as_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, str(SCRIPTS / "hf_trainer.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = told(tmp_path, "hf_trainer")
    assert micro_batches(found) == [(s, b, 32) for s in (1, 2, 3) for b in (0, 1)]
    assert [r.step for r in found.steps] == [1, 2, 3]
    assert [(r.step, r.layer, sum(r.counts)) for r in found.loads] == [
        (step, layer, 2 * 32 * 2) for step in (1, 2, 3) for layer in (0, 1)
    ]
    assert all(r.loss is not None and 3.0 < r.loss < 6.0 for r in found.steps)


@pytest.mark.skipif(
    find_spec("lightning") is None, reason="needs lightning: pip install 'pacekeeper[dev-adapters]'"
)
def test_lightnings_trainer_is_attached_as_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, str(SCRIPTS / "lightning_fit.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = told(tmp_path, "lightning_fit")
    assert micro_batches(found) == [(s, b, 16) for s in (1, 2, 3) for b in (0, 1)]
    assert [r.step for r in found.steps] == [1, 2, 3]
    assert all(r.input_wait_s is not None for r in found.steps)


@needs("deepspeed", "docs/trainer-deepspeed.md")
def test_deepspeeds_engine_is_found_and_attached(tmp_path: Path) -> None:
    script = str(SCRIPTS / "deepspeed_train.py")
    done = run(tmp_path, sys.executable, script, str(free_port()))
    assert done.returncode == 0, done.stderr
    found = told(tmp_path, "deepspeed_train")
    assert micro_batches(found) == [(s, b, 16) for s in (1, 2, 3) for b in (0, 1)]
    assert [r.step for r in found.steps] == [1, 2, 3]


@needs("torchtitan", "docs/trainer-torchtitan.md")
def test_torchtitans_loop_is_attached_as_it_is(tmp_path: Path) -> None:
    batches = [[[2, 96], [4, 40]], [[1, 64], [2, 96]]]  # of even and odd steps
    case = {**CASE, "port": free_port(), "world_size": 1, "batches": [batches]}
    (tmp_path / "case.json").write_text(json.dumps(case))
    script = str(SCRIPTS / "torchtitan_train.py")
    done = run(tmp_path, sys.executable, script, str(tmp_path / "case.json"), "0")
    assert done.returncode == 0, done.stderr
    found = told(tmp_path, "torchtitan_train")
    assert micro_batches(found) == [
        (step, b, rows * length)
        for step in (1, 2, 3, 4)
        for b, (rows, length) in enumerate(batches[step % 2])
    ]
    assert [r.step for r in found.steps] == [1, 2, 3, 4]
    assert all(r.expert_rows == 2 * r.tokens for r in found.micro_batches)
    assert [(r.step, sum(r.counts)) for r in found.loads] == [
        (step, 2 * sum(rows * length for rows, length in batches[step % 2]))
        for step in (1, 2, 3, 4)
    ]
