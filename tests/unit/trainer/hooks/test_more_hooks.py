"""The seam of a foreign trainer: five moments, light imports, an example that runs as printed."""

import hashlib
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.expert_row_features import rows_over
from pacekeeper.core.telemetry.record_codec import REASON_BYTES
from pacekeeper.core.telemetry.records import (
    MAX_DOCUMENTS,
    ExpertLoadRecord,
    MicroBatchRecord,
    PlanAppliedRecord,
    PlanRefusedRecord,
    ProbeRecord,
    Record,
    StepRecord,
)
from pacekeeper.trainer.hooks import hooks
from pacekeeper.trainer.hooks.compute_timers import ComputeTime
from pacekeeper.trainer.hooks.hooks import FORMER_VARIABLE, RUN_ID_VARIABLE
from pacekeeper.trainer.hooks.plan_inbox import PlanOffer
from support.rings import records_in

ROOT = Path(__file__).resolve().parents[4]


def records(pace: hooks.Hooks) -> list[Record]:
    assert pace.ring.path is not None
    return records_in(pace.ring.path)


def test_a_step_leaves_its_records(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=1, world_size=2, ring_dir=str(tmp_path))
    pace.report_plan_applied(step=0, generation=4, layout_crc=9)
    pace.begin_step(7)
    pace.report_microbatch(compute=ComputeTime(compute_s=0.25), tokens=100, sum_len_squared=5)
    pace.report_microbatch(compute=ComputeTime(compute_s=0.5), tokens=50)
    pace.report_expert_loads(0, list(range(20)))
    pace.end_step(tokens=300, loss=2.0)
    applied, first, second, low, high, ended = records(pace)
    assert isinstance(applied, PlanAppliedRecord) and applied.previous_generation == 0
    assert isinstance(first, MicroBatchRecord) and isinstance(second, MicroBatchRecord)
    assert (first.step, first.micro_batch, first.generation, first.compute_s) == (7, 0, 4, 0.25)
    assert (second.micro_batch, second.tokens) == (1, 50)
    assert isinstance(low, ExpertLoadRecord) and isinstance(high, ExpertLoadRecord)
    assert low.counts == tuple(range(16))
    assert (high.first_expert, high.counts) == (16, (16, 17, 18, 19))
    assert isinstance(ended, StepRecord) and (ended.tokens, ended.loss) == (300, 2.0)


def test_a_micro_batch_that_raises_is_not_told(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path))
    with pytest.raises(ZeroDivisionError), pace.micro_batch_timer(tokens=1), pace.waiting():
        raise ZeroDivisionError
    assert records(pace) == []


def test_a_micro_batch_tells_its_documents_its_tensor_share_and_how_expert_rows_lie(
    tmp_path: Path,
) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path))
    over = rows_over([8, 100, 2000])
    work: dict[str, Any] = {
        "tokens": 9, "rows_over": over, "num_documents": 70_000, "tensor_share": 3 / 8,
    }  # fmt: skip
    pace.report_microbatch(compute=ComputeTime(compute_s=0.5), **work)
    pace.report_microbatch(compute=None, **work)
    pace.report_microbatch(compute=ComputeTime(compute_s=0.5, lag=1), tokens=1)
    with pace.micro_batch_timer(**work):
        pass
    for record in records(pace):
        assert isinstance(record, MicroBatchRecord)
        assert record.rows_over_16 == 84 + 1984 and record.rows_over_64 == 36 + 1936
        assert record.rows_over_256 == 1744 and record.rows_over_1024 == 976
        assert record.num_documents == MAX_DOCUMENTS  # as many as a slot has room for
        assert record.tensor_share == 3 / 8
    assert len(records(pace)) == 3 and pace.ring.num_errors == 0


def offer(pace: hooks.Hooks, generation: int, data: bytes, *, sequence: int | None = None) -> None:
    assert pace.ring.path is not None
    command = shm_ring.CommandSlot(
        plan_generation=generation,
        base_generation=1,
        plan_sha256=hashlib.sha256(data).digest(),
        dead_ranks=frozenset({3}),
    )
    with pace.ring.path.open("r+b") as file:
        file.seek(shm_ring.COMMAND_OFFSET)
        file.write(shm_ring.encode_command(sequence or generation, command))
    pace.ring.path.with_name(shm_ring.plan_file_name(generation)).write_bytes(data)


def test_a_plan_is_offered_until_it_is_in_force_or_refused(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=4, ring_dir=str(tmp_path))
    assert pace.offered_plan() is None
    offer(pace, 2, b"two")
    for _ in range(2):
        assert pace.offered_plan() == PlanOffer(generation=2, base_generation=1, layout_json=b"two")
    assert pace.dead_ranks() == {3}
    pace.report_plan_applied(step=1, generation=2, layout_crc=0)
    assert pace.offered_plan() is None
    offer(pace, 3, b"three")
    pace.refuse_plan(3, "does not fit")
    assert pace.offered_plan() is None


def test_a_refusal_is_a_record_with_the_plan_and_the_beginning_of_the_reason(
    tmp_path: Path,
) -> None:
    pace = hooks.attach(job="j", rank=1, world_size=4, ring_dir=str(tmp_path))
    pace.set_generation(1)
    offer(pace, 2, b"two")
    assert pace.offered_plan() is not None
    pace.refuse_plan(2, "does not fit " + "x" * 200)
    (record,) = records(pace)
    assert isinstance(record, PlanRefusedRecord)
    assert (record.rank, record.generation, record.plan_generation) == (1, 1, 2)
    assert record.layout_crc == zlib.crc32(b"two")
    assert record.reason == ("does not fit " + "x" * 200)[:REASON_BYTES]


def test_a_refusal_of_a_plan_that_was_never_read_tells_nobody(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=4, ring_dir=str(tmp_path))
    pace.refuse_plan(2, "does not fit")
    assert records(pace) == [] and pace.ring.num_errors == 0


def test_a_waiting_plan_costs_one_file_read(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=4, ring_dir=str(tmp_path))
    offer(pace, 2, b"two")
    first = pace.offered_plan()
    assert first is not None and pace.ring.path is not None
    pace.ring.path.with_name(shm_ring.plan_file_name(2)).unlink()
    assert pace.offered_plan() is first


def test_another_plan_of_a_refused_generation_is_offered(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=4, ring_dir=str(tmp_path))
    offer(pace, 2, b"wrong")
    assert pace.offered_plan() is not None
    pace.refuse_plan(2, "does not fit")
    assert pace.offered_plan() is None
    offer(pace, 2, b"right", sequence=9)
    found = pace.offered_plan()
    assert found is not None and found.layout_json == b"right"


def test_a_plan_whose_file_is_another_one_is_never_offered(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=4, ring_dir=str(tmp_path))
    offer(pace, 2, b"two")
    assert pace.ring.path is not None
    pace.ring.path.with_name(shm_ring.plan_file_name(2)).write_bytes(b"tw")
    assert pace.offered_plan() is None
    assert (pace.ring.num_plans_wrong, pace.ring.num_plans_missing) == (1, 0)


def test_a_generation_told_by_the_trainer_is_on_its_records(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path))
    offer(pace, 5, b"five")
    pace.set_generation(5)
    pace.begin_step(0)
    pace.end_step(tokens=1)
    (only,) = records(pace)
    assert isinstance(only, StepRecord) and only.generation == 5
    assert pace.offered_plan() is None


class BrokenTimer:
    """A trainer's own clock on a bad day."""

    def fail(self) -> None:
        raise OSError("the device is gone")

    begin = pause = resume = fail

    def end(self) -> ComputeTime | None:
        raise OSError("the device is gone")


@pytest.mark.parametrize(
    "call",
    [
        lambda pace: pace.report_microbatch(compute="long", tokens=1),
        lambda pace: pace.report_microbatch(compute=ComputeTime(compute_s=1.0), tokens=-1),
        lambda pace: pace.report_microbatch(compute=ComputeTime(compute_s=1.0), tokens=None),
        lambda pace: pace.report_expert_loads(0, None),
        lambda pace: pace.report_expert_loads(0, [-1]),
        lambda pace: pace.report_expert_loads(1 << 20, [1]),
        lambda pace: pace.end_step(tokens="many"),
        lambda pace: pace.end_step(tokens=1, loss="low"),
        lambda pace: pace.report_plan_applied(step=0, generation=2, layout_crc=-1),
    ],
)
def test_no_argument_stops_training(tmp_path: Path, call: Callable[[hooks.Hooks], None]) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path))
    call(pace)
    assert pace.ring.num_errors == 1
    assert records(pace) == []
    pace.begin_step(1)
    pace.end_step(tokens=1)
    assert len(records(pace)) == 1, "one mistake loses one record, no more"


def test_a_failing_timer_is_told_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path), timer=BrokenTimer())
    steps = 0
    for step in range(3):
        with pace.step(step), pace.micro_batch_timer(tokens=1), pace.waiting():
            steps += 1
    assert steps == 3
    assert not pace.ring.is_armed
    assert [r.message.count("the device is gone") for r in caplog.records] == [1, 1]


@pytest.mark.parametrize("directory", ["file/below", "nul\0byte"])
def test_every_moment_works_without_a_ring(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, directory: str
) -> None:
    (tmp_path / "file").write_text("no directory")
    pace = hooks.attach(job="j", rank=0, world_size=4, ring_dir=str(tmp_path / directory))
    for step in range(5):
        with pace.step(step), pace.micro_batch_timer(tokens=1), pace.waiting():
            pace.report_expert_loads(0, [1, 2])
        pace.report_plan_applied(step=step, generation=2, layout_crc=0)
        assert pace.offered_plan() is None
        assert pace.dead_ranks() == frozenset()
    pace.detach()
    assert len(caplog.records) == 1, "one warning, not one per call"


@pytest.mark.parametrize(("job", "rank"), [("../up", 0), ("", 0), ("j", 4), ("j", -1)])
def test_who_does_not_know_its_name_is_told_at_once(tmp_path: Path, job: str, rank: int) -> None:
    with pytest.raises(ValueError):
        hooks.attach(job=job, rank=rank, world_size=4, ring_dir=str(tmp_path))


def test_waiting_is_not_compute(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path))
    with pace.step(0), pace.micro_batch_timer(tokens=1), pace.waiting():
        sum(range(200_000))
    micro_batch, _ = records(pace)
    assert isinstance(micro_batch, MicroBatchRecord)
    assert micro_batch.wait_s is not None
    assert micro_batch.compute_s < micro_batch.wait_s


def test_a_step_tells_what_was_learnt_inside_it(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path))
    with pace.step(0, tokens=7) as result:
        result.loss = 2.5
    (record,) = records(pace)
    assert isinstance(record, StepRecord)
    assert (record.tokens, record.loss) == (7, 2.5)


def test_a_step_that_raises_is_not_reported_as_ended(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path))
    with pytest.raises(ZeroDivisionError), pace.step(0):
        raise ZeroDivisionError
    assert records(pace) == []


def test_the_launcher_names_the_ring_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hooks.RING_DIR_VARIABLE, str(tmp_path))
    pace = hooks.attach(job="j", rank=0, world_size=1)
    assert pace.ring.path == tmp_path / "j" / "rank-00000.ring"


def test_the_launcher_numbers_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_id(told: int | None = None) -> int:
        made = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path), run_id=told)
        return made.ring.run_id

    assert run_id() == 0
    monkeypatch.setenv(RUN_ID_VARIABLE, "1763712000000")
    assert (run_id(), run_id(5)) == (1763712000000, 5)
    monkeypatch.delenv(RUN_ID_VARIABLE)
    monkeypatch.setenv(FORMER_VARIABLE, "7")
    assert run_id() == 7
    monkeypatch.setenv(RUN_ID_VARIABLE, "soon")
    with pytest.raises(ValueError, match="PACEKEEPER_RUN_ID: expected a whole number"):
        run_id()


def test_the_seam_imports_the_standard_library_only() -> None:
    code = (
        "import sys, pacekeeper.trainer.hooks.hooks, pacekeeper.trainer.hooks.compute_timers, "
        "pacekeeper.trainer.hooks.ring_writer; "
        "print(sorted({'torch', 'grpc', 'google', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_example_of_the_readme_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    model = torch.nn.Embedding(2, 2)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": [torch.ones(3, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)],
    }
    before = model.weight.detach().clone()
    monkeypatch.setenv(hooks.RING_DIR_VARIABLE, str(tmp_path))
    exec(code, names)  # noqa: S102
    made = records(names["pace"])
    assert [type(record) for record in made] == [MicroBatchRecord, StepRecord] * 2
    assert [r.tokens for r in made if isinstance(r, MicroBatchRecord)] == [6, 2]
    assert not torch.equal(before, model.weight)
    names["pace"].detach()
    assert [line.split("=")[0] for line in code.splitlines() if "pace" in line] == [
        "import pacekeeper",
        "pace ",
    ]


def test_the_example_file_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "attach.py"), "--ring-dir", str(tmp_path)]
    done = subprocess.run([*command, "--steps", "3"], capture_output=True, text=True, check=True)
    assert "3 steps; ring:" in done.stdout


def test_a_probe_is_asked_for_once_and_its_reading_is_a_record(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=1, world_size=2, ring_dir=str(tmp_path), can_probe=True)
    assert pace.requested_probe() == 0
    write_command(pace, 1, shm_ring.CommandSlot(probe=7))
    assert pace.requested_probe() == 7
    pace.start_probe(7)
    assert pace.requested_probe() == 0  # also where it was broken off
    pace.set_generation(3)
    pace.report_probe(step=4, number=7, gemm_s=0.002, copy_s=0.001, exchange_s=0.1, duration_s=0.2)
    (record,) = records(pace)
    assert isinstance(record, ProbeRecord)
    assert (record.rank, record.step, record.generation, record.number) == (1, 4, 3, 7)
    assert (record.gemm_s, record.copy_s, record.exchange_s) == (0.002, 0.001, 0.1)
    write_command(pace, 2, shm_ring.CommandSlot(probe=6))  # a lower number asks for nothing
    assert pace.requested_probe() == 0
    write_command(pace, 3, shm_ring.CommandSlot(probe=8))
    assert pace.requested_probe() == 8


def write_command(pace: hooks.Hooks, sequence: int, command: shm_ring.CommandSlot) -> None:
    assert pace.ring.path is not None
    with pace.ring.path.open("r+b") as file:
        file.seek(shm_ring.COMMAND_OFFSET)
        file.write(shm_ring.encode_command(sequence, command))


def test_the_wait_for_input_is_part_of_its_step_wherever_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path))

    def after(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    with pace.step(0, tokens=7, sum_len_squared=49):
        after(1.0)
    for step in (1, 2):
        with pace.loading():
            after(0.25)
        after(8.0)  # an evaluation: of no step
        with pace.step(step) as result:
            with pace.loading():
                after(0.5)
            after(1.0)
            result.tokens, result.sum_len_squared = 3, 9
    with pace.step(3):
        after(1.0)
    told = [record for record in records(pace) if isinstance(record, StepRecord)]
    assert [record.duration_s for record in told] == [1.0, 1.75, 1.75, 1.0]
    assert [record.input_wait_s for record in told] == [None, 0.75, 0.75, 0.0]
    assert [record.sum_len_squared for record in told] == [49, 9, 9, 0]
