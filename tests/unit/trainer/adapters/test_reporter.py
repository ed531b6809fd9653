"""The forgiving reporter of adapters: hooks in any order, nothing doubled, nothing guessed."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.core.telemetry.attachment import Clock
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record, StepRecord
from pacekeeper.trainer.adapters import reporter
from pacekeeper.trainer.adapters.reporter import Reporter
from pacekeeper.trainer.hooks import hooks
from pacekeeper.trainer.hooks.compute_timers import ComputeTime
from support.examples import examples
from support.rings import records_in

CALLS = (
    *("begin_step", "end_step", "enter_pass", "suspend_pass", "complete_pass"),
    *("exit_training", "enter_training", "begin_loading", "end_loading", "abandon_step"),
    "drop_micro_batches",
)


class Strict:
    """A clock that refuses what is out of its order, and writes down what it was told."""

    def __init__(self) -> None:
        self.state = "idle"
        self.calls: list[str] = []

    def _go(self, call: str, before: tuple[str, ...], after: str) -> None:
        self.calls.append(call)
        assert self.state in before, f"{call} while {self.state}"
        self.state = after

    def begin(self) -> None:
        self._go("begin", ("idle", "running", "set aside"), "running")

    def pause(self) -> None:
        self._go("pause", ("running",), "paused")

    def resume(self) -> None:
        self._go("resume", ("paused",), "running")

    def suspend(self) -> object:
        self._go("suspend", ("running",), "set aside")
        return self

    def resume_suspended(self, aside: object) -> None:
        assert aside is self
        self._go("resume_suspended", ("set aside", "idle"), "running")

    def time_of(self, aside: object) -> ComputeTime | None:
        assert aside is self
        return ComputeTime(compute_s=0.25)

    def end(self) -> ComputeTime | None:
        return self.time_of(self.suspend())


def new_reporter(directory: Path, clock: Strict | None = None) -> Reporter:
    pace = hooks.attach(
        job="j", rank=0, world_size=1, ring_dir=str(directory), timer=clock or Strict()
    )
    return Reporter(pace)


def told(one: Reporter) -> list[Record]:
    assert one.pace.ring.num_errors == 0
    assert one.pace.ring.path is not None
    return records_in(one.pace.ring.path)


def test_a_step_of_two_micro_batches_is_told_once(tmp_path: Path) -> None:
    one = new_reporter(tmp_path)
    for tokens in (5, 7):
        one.begin_step(3)
        one.enter_pass(0)
        one.add_features((tokens, 0, 0, 0, (0,) * 4, 0, 0, 1.0))
        one.complete_pass()
        one.complete_pass()
    one.end_step(tokens=24)
    one.end_step(tokens=24)
    first, second, ended = told(one)
    assert isinstance(first, MicroBatchRecord) and isinstance(second, MicroBatchRecord)
    assert (first.step, first.micro_batch, first.tokens) == (3, 0, 5)
    assert (second.step, second.micro_batch, second.tokens) == (3, 1, 7)
    assert isinstance(ended, StepRecord) and ended.tokens == 24


def test_an_evaluation_in_the_middle_is_neither_computed_nor_a_part_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    one = new_reporter(tmp_path)
    one.begin_step(0)
    now_s[0] += 2.0
    one.exit_training()
    one.enter_pass(0)  # an evaluation's own
    one.begin_loading()
    now_s[0] += 50.0
    one.end_loading()
    one.complete_pass()
    one.enter_training()
    one.begin_loading()
    now_s[0] += 1.0
    one.end_loading()
    one.end_step()
    (ended,) = told(one)
    assert isinstance(ended, StepRecord)
    assert (ended.duration_s, ended.input_wait_s) == (3.0, 1.0)


def test_input_waited_for_before_a_step_is_a_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    one = new_reporter(tmp_path)
    one.begin_loading()
    now_s[0] += 4.0
    one.end_loading()
    now_s[0] += 9.0  # a checkpoint: no part of any step
    one.begin_step(0)
    now_s[0] += 2.0
    one.end_step()
    (ended,) = told(one)
    assert isinstance(ended, StepRecord)
    assert (ended.duration_s, ended.input_wait_s) == (6.0, 4.0)


def test_where_nobody_tells_of_loading_nothing_is_told_of_it(tmp_path: Path) -> None:
    one = new_reporter(tmp_path)
    one.end_loading()
    one.begin_step(0)
    one.end_step()
    (ended,) = told(one)
    assert isinstance(ended, StepRecord) and ended.input_wait_s is None


@settings(max_examples=examples(40))
@given(calls=st.lists(st.sampled_from(CALLS), max_size=40))
def test_in_any_order_only_what_began_and_ended_is_told(
    tmp_path_factory: pytest.TempPathFactory, calls: list[str]
) -> None:
    one = new_reporter(tmp_path_factory.mktemp("ring"))
    steps, open_step, is_away, is_open, batches = 0, False, False, False, 0
    expected: list[tuple[int, int]] = []  # step, micro-batches told in it
    for call in calls:
        match call:
            case "begin_step":
                one.begin_step(steps)
                if not open_step:
                    open_step, is_open, batches = True, False, 0
            case "end_step":
                one.end_step()
                if open_step:
                    expected.append((steps, batches))
                    steps += 1
                open_step = is_open = False
            case "enter_pass":
                one.enter_pass(0)
            case _:
                getattr(one, call)()
        if call == "enter_pass" and open_step and not is_away:
            is_open = True
        if call == "complete_pass" and is_open:
            is_open, batches = False, batches + 1
        if call in ("drop_micro_batches", "suspend_pass"):
            is_open = False
        if call == "abandon_step":
            steps += open_step
            open_step = is_open = is_away = False
        is_away = call == "exit_training" or (
            is_away and call not in ("enter_training", "abandon_step")
        )
    found = told(one)
    ended = [r for r in found if isinstance(r, StepRecord)]
    assert [r.step for r in ended] == [step for step, _ in expected]
    for step, count in expected:
        numbers = [
            r.micro_batch for r in found if isinstance(r, MicroBatchRecord) and r.step == step
        ]
        assert numbers == list(range(count))
    assert all(r.duration_s >= 0.0 for r in ended)


def test_what_goes_wrong_inside_is_counted_and_stops_nobody(tmp_path: Path) -> None:
    class Broken(Strict):
        def begin(self) -> None:
            raise RuntimeError("a device's own trouble")

    one = new_reporter(tmp_path, Broken())
    one.begin_step(0)
    one.enter_pass(0)
    assert one.pace.ring.num_errors == 1


def test_on_the_host_times_are_the_hosts_and_marked_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    pace = reporter.attach(job="j", device=torch.device("cpu"), ring_dir=str(tmp_path))
    assert pace.rank == 3
    assert reporter.default_clock(torch.device("cpu"))[0] is Clock.CPU
    assert reporter.default_clock(torch.device("cuda"))[0] is Clock.CUDA
    assert reporter.default_clock(torch.device("meta"))[0] is Clock.WALL
    assert [reporter.can_time(torch.device(d)) for d in ("cpu", "cuda", "meta")] == [
        True, True, False,
    ]  # fmt: skip
