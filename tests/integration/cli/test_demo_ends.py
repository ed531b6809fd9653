"""How a demo ends before its time: with the failing part's own words, and without leftovers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pacekeeper.cli.demo.run_dir import RINGS, RINGS_PREFIX, claim_run_dir
from pacekeeper.core.errors import ExitCode

PATIENCE_S = 120.0
NO_TORCH = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"


def demo(run_dir: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pacekeeper.cli.main", "demo", "--run-dir", str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def users_of(run_dir: Path) -> dict[int, str]:
    """Process number -> command line of the processes that name the run directory."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # ended meanwhile
            continue
        if str(run_dir) in line:
            found[int(entry.parent.name)] = line
    return found


def test_a_launcher_s_failure_ends_the_demo_with_its_words_and_its_code(tmp_path: Path) -> None:
    without = tmp_path / "without"
    without.mkdir()
    (without / "torch.py").write_text(NO_TORCH)
    path = os.pathsep.join([str(without), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = demo(tmp_path / "run", env={**os.environ, "PYTHONPATH": path})
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == ExitCode.HOST, said
    last = said.splitlines()[-1]
    assert "launch-" in last and "torch" in last
    assert "launch-0.log" in last or "launch-1.log" in last


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_demo_that_is_told_to_end_leaves_no_process(
    number: signal.Signals, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = demo(run_dir)
    give_up_s = time.monotonic() + PATIENCE_S
    while len(users_of(run_dir)) < 4:  # demo, controller, and two of the fleet
        assert time.monotonic() < give_up_s and process.poll() is None, "it never started"
        time.sleep(0.05)
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)  # impatience does not break the order of the end
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode in (128 + number, 128 + signal.SIGTERM)
    left = users_of(run_dir)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == {}


def test_a_demo_that_is_killed_leaves_no_process_and_the_next_one_its_rings_not(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    process = demo(run_dir)
    give_up_s = time.monotonic() + PATIENCE_S
    while len(users_of(run_dir)) < 4:
        assert time.monotonic() < give_up_s and process.poll() is None, "it never started"
        time.sleep(0.05)
    process.kill()
    process.communicate()
    while left := users_of(run_dir):
        if time.monotonic() > give_up_s:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"processes that outlived the demo: {left}")
        time.sleep(0.05)
    rings = Path((run_dir / RINGS).read_text())
    assert rings.is_dir() and rings.name.startswith(RINGS_PREFIX)
    with claim_run_dir(run_dir):
        assert not rings.exists()


def test_a_part_whose_demo_ended_before_it_began_does_not_begin() -> None:
    line = [sys.executable, "-m", "pacekeeper.cli.demo.process", "1", "--version"]
    assert subprocess.run(line, capture_output=True).returncode == 128 + signal.SIGTERM


def test_a_demo_that_is_deaf_to_hang_ups_stays_so(tmp_path: Path) -> None:
    """As `nohup` starts it."""
    code = (
        "import signal\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from pacekeeper.cli.demo.command import install_signal_handlers\n"
        "install_signal_handlers()\n"
        "signal.raise_signal(signal.SIGHUP)\n"
        "print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "alive\n", done.stderr
