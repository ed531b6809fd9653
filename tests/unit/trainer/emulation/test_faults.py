"""Orders of faults: obeyed once a step, written down, refused where they are none."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pacekeeper.trainer.emulation.faults import (
    COMPUTE_FAULT,
    Burner,
    FaultInjector,
    stop_duty_cycle,
)
from pacekeeper.trainer.hooks.compute_timers import CpuClock


def test_burning_is_real_extra_compute() -> None:
    clock = CpuClock(burn=Burner(slowdown=3.0))
    clock.begin()
    began_s = time.thread_time()
    while time.thread_time() - began_s < 0.01:
        pass
    measured = clock.end()
    assert measured is not None and measured.cpu_s is not None
    assert measured.cpu_s >= 0.029


def test_the_injector_obeys_its_file_and_writes_the_truth(tmp_path: Path) -> None:
    target = SimpleNamespace(slowdown=1.0)
    injector = FaultInjector(directory=tmp_path, rank=2, targets={COMPUTE_FAULT: target})
    injector.begin_step(0)
    order = tmp_path / "rank-2.json"
    order.write_text("{")  # being written
    injector.begin_step(1)
    assert target.slowdown == 1.0
    fresh = tmp_path / "fresh"
    fresh.write_text(json.dumps({"slowdown": 1.6}))
    fresh.rename(order)
    injector.begin_step(2)
    injector.begin_step(3)
    assert target.slowdown == 1.6
    (line,) = (tmp_path / "truth.jsonl").read_text().splitlines()
    truth = json.loads(line)
    assert (truth["rank"], truth["step"], truth["slowdown"]) == (2, 2, 1.6)


def test_an_order_of_one_kind_lifts_the_others(tmp_path: Path) -> None:
    targets = {kind: SimpleNamespace(slowdown=2.0) for kind in (COMPUTE_FAULT, "another")}
    (tmp_path / "rank-0.json").write_text('{"slowdown": 3.0, "kind": "another"}')
    FaultInjector(directory=tmp_path, rank=0, targets=targets).begin_step(0)
    assert [target.slowdown for target in targets.values()] == [1.0, 3.0]
    assert json.loads((tmp_path / "truth.jsonl").read_text())["kind"] == "another"


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("{}", "slowdown: expected a number"),
        ("[1.6]", "expected an object"),
        ('{"slowdown": "1.6"}', "slowdown: expected a number"),
        ('{"slowdown": true}', "slowdown: expected a number"),
        ('{"slowdown": NaN}', "finite"),
        ('{"slowdown": 0}', "above 0"),
        ('{"slowdown": -2}', "above 0"),
        ('{"slowdown": 1.6, "kind": "stop"}', "kind: expected one of ['compute']"),
    ],
)
def test_a_wrong_order_is_refused_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, order: str, expected: str
) -> None:
    target = SimpleNamespace(slowdown=1.25)
    injector = FaultInjector(directory=tmp_path, rank=2, targets={COMPUTE_FAULT: target})
    (tmp_path / "rank-2.json").write_text(order)
    for step in range(3):
        injector.begin_step(step)
    assert target.slowdown == 1.25
    assert not (tmp_path / "truth.jsonl").exists()
    (record,) = caplog.records
    assert expected in record.message


def test_a_fault_that_can_not_be_written_down_does_not_act(tmp_path: Path) -> None:
    target = SimpleNamespace(slowdown=1.0)
    (tmp_path / "truth.jsonl").mkdir()
    (tmp_path / "rank-0.json").write_text('{"slowdown": 2.0}')
    FaultInjector(directory=tmp_path, rank=0, targets={COMPUTE_FAULT: target}).begin_step(0)
    assert target.slowdown == 1.0


def test_two_orders_within_one_tick_of_the_file_clock_both_count(tmp_path: Path) -> None:
    target = SimpleNamespace(slowdown=1.0)
    injector = FaultInjector(directory=tmp_path, rank=0, targets={COMPUTE_FAULT: target})
    order = tmp_path / "rank-0.json"
    for slowdown in (1.6, 1.0):
        fresh = tmp_path / f"fresh-{slowdown}"
        fresh.write_text(json.dumps({"slowdown": slowdown}))
        os.utime(fresh, ns=(1_000, 1_000))
        fresh.rename(order)
        injector.begin_step(0)
        assert target.slowdown == slowdown


def test_a_stopped_process_runs_again_afterwards() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        periods = iter([False] * 5 + [True])
        stop_duty_cycle(child.pid, duty=0.5, period_s=0.02, is_over=lambda: next(periods))
        state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state != "T"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    stop_duty_cycle(child.pid, duty=0.5, period_s=0.02, is_over=lambda: False)  # gone: ends at once
    with pytest.raises(ValueError, match="between 0 and 1"):
        stop_duty_cycle(1, duty=1.0, period_s=1.0, is_over=lambda: True)
