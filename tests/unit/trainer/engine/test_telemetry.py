"""What the engine's hooks report: rows, loads, sizes and times, and nothing of evaluations."""

from pathlib import Path
from unittest import mock

import torch

from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord, StepRecord
from pacekeeper.trainer.engine.micro_batches import WorkSize
from pacekeeper.trainer.engine.telemetry import HostTransferTimer, Telemetry
from pacekeeper.trainer.hooks import hooks
from pacekeeper.trainer.hooks.compute_timers import DeviceEventClock
from pacekeeper.trainer.parallel.layouts import start_layout
from support.engines import TOKENS, adamw, engine_of, micro_batches, rows_of
from support.rank_threads import ThreadGroup, run_ranks
from support.rings import records_in

RANKS, CUTS = 3, (0, 2, 2, 7)


def test_ranks_report_what_they_computed_and_routed(tmp_path: Path) -> None:
    def work(group: ThreadGroup) -> tuple[Path, list[float]]:
        pace = hooks.attach(job="j", rank=group.rank, world_size=RANKS, ring_dir=str(tmp_path))
        layout = start_layout([4, 4], group.ranks, replicas=2)
        engine = engine_of("qwen3_moe", group, layout=layout, hooks=pace)
        adamw(engine)
        rows = rows_of(0)[CUTS[group.rank] : CUTS[group.rank + 1]]
        losses = [engine.step(micro_batches(rows)).loss.item()]
        engine.evaluate(micro_batches(rows))
        losses.append(engine.step(micro_batches(rows)).loss.item())
        pace.detach()
        assert pace.ring.path is not None
        return Path(pace.ring.path), losses

    ranks = run_ranks(RANKS, work)
    told = [records_in(path) for path, _ in ranks]
    for step in (0, 1):
        loads, computed = 0, 0
        for rank, records in enumerate(told):
            num_rows = CUTS[rank + 1] - CUTS[rank]
            parts = [r for r in records if isinstance(r, MicroBatchRecord) and r.step == step]
            assert len(parts) == 2, "as many as the rank with most has"
            assert sum(part.tokens for part in parts) == num_rows * TOKENS
            assert sum(part.sum_len_squared for part in parts) == num_rows * TOKENS**2
            assert sum(part.num_documents for part in parts) == num_rows
            assert all(part.compute_s > 0.0 for part in parts)
            assert all(part.num_active_experts > 0 for part in parts)
            computed += sum(part.expert_rows for part in parts)
            own = [r for r in records if isinstance(r, ExpertLoadRecord) and r.step == step]
            assert sum(map(sum, (r.counts for r in own))) == num_rows * TOKENS * 2 * 2
            loads += sum(map(sum, (r.counts for r in own)))
            (ended,) = (r for r in records if isinstance(r, StepRecord) and r.step == step)
            assert (ended.tokens, ended.sum_len_squared) == (7 * TOKENS, 7 * TOKENS**2)
            assert ended.host_s is not None and ended.host_s > 0.0
            assert ended.loss == ranks[rank][1][step]
        assert loads == computed


def test_a_step_that_is_prepared_again_is_reported_as_redone(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path))
    engine = engine_of("qwen3_moe", hooks=pace)
    adamw(engine)
    engine.step(micro_batches(rows_of(0)))
    engine.prepare_step(micro_batches(rows_of(1)))
    engine.step(micro_batches(rows_of(1)))
    engine.step(micro_batches(rows_of(2)))
    pace.detach()
    assert pace.ring.path is not None
    steps = [r for r in records_in(Path(pace.ring.path)) if isinstance(r, StepRecord)]
    assert [(r.step, r.is_redone) for r in steps] == [(0, False), (1, True), (2, False)]


def test_loads_on_a_device_are_read_when_they_have_arrived(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path))
    engine = engine_of("qwen3_moe")
    telemetry = Telemetry(pace, engine._experts)
    events: list[mock.Mock] = []

    def event() -> mock.Mock:
        events.append(mock.Mock(**{"query.return_value": False}))
        return events[-1]

    def reported() -> list[int]:
        assert pace.ring.path is not None
        records = records_in(Path(pace.ring.path))
        return sorted({r.step for r in records if isinstance(r, ExpertLoadRecord)})

    with mock.patch.object(torch.cuda, "Event", event):
        for step in range(10):
            telemetry.end_step(step, WorkSize(), torch.zeros((), device="meta"))
            if step == 7:
                assert reported() == []
        # The host is many steps ahead: it waits for the oldest ones, and only for them.
        assert reported() == [0, 1]
        assert [one.synchronize.called for one in events] == [True, True, *[False] * 8]
        for one in events[:5]:
            one.query.return_value = True
        telemetry.end_step(10, WorkSize(), torch.zeros((), device="meta"))
        assert reported() == [0, 1, 2, 3, 4]


class Event:
    """Of a device that records one each millisecond, and has passed all of them."""

    def __init__(self) -> None:
        self.at_ms = 0.0

    def record(self) -> None:
        Event.now_ms += 1.0
        self.at_ms = Event.now_ms

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        return other.at_ms - self.at_ms

    now_ms = 0.0


def test_transfers_of_evaluations_and_of_steps_that_are_redone_are_not_reported(
    tmp_path: Path,
) -> None:
    def work(group: ThreadGroup) -> list[StepRecord]:
        pace = hooks.attach(
            job="j",
            rank=group.rank,
            world_size=RANKS,
            ring_dir=str(tmp_path),
            timer=DeviceEventClock(Event),
        )
        layout = start_layout([4, 4], group.ranks, replicas=1)
        engine = engine_of("qwen3_moe", group, layout=layout, hooks=pace)
        engine.add_optimizer(torch.optim.SGD(engine.parameters(), lr=0.0))  # routes as before
        rows = rows_of(0)[CUTS[group.rank] : CUTS[group.rank + 1]]
        engine.commit_step(engine.prepare_step(micro_batches(rows)))
        engine.evaluate(micro_batches(rows))
        engine.prepare_step(micro_batches(rows))
        engine.commit_step(engine.prepare_step(micro_batches(rows)))
        pace.detach()
        assert pace.ring.path is not None
        return [r for r in records_in(Path(pace.ring.path)) if isinstance(r, StepRecord)]

    for first, second in run_ranks(RANKS, work):
        assert first.transfer_bytes == second.transfer_bytes > 0
        assert first.transfer_s is not None and first.transfer_s > 0.0


def test_exchanges_of_the_host_are_timed_by_the_middle_one_of_a_step() -> None:
    now_s = [0.0]
    with mock.patch("time.perf_counter", lambda: now_s[0]):
        timer = HostTransferTimer()
        assert timer.take() == (None, 0)
        for took_s, num_bytes in ((0.002, 1000), (5.0, 1000), (0.006, 2000), (1.0, 0)):
            began_s = timer.begin()
            now_s[0] += took_s
            timer.end(began_s, num_bytes)
        transfer_s, num_bytes = timer.take()
    assert num_bytes == 4000
    assert transfer_s is not None
    assert abs(transfer_s - 4000 * 3e-6) < 1e-12
    assert timer.take() == (None, 0)
