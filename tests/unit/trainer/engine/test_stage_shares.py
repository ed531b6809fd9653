"""Stages whose slow ranks hand rows to other pipelines train as one process does."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.pipeline_schedule import RUN_SCHEDULES, Schedule
from pacekeeper.trainer.parallel.layouts import start_layout
from support.engines import ROWS, PlainRun, adamw, engine_of, micro_batches, own_batches, rows_of
from support.rank_threads import ThreadGroup, run_ranks

FAMILY, STEPS, CLIP = "qwen3_moe", 4, 0.4


def shared(layout: Layout, shares: Sequence[tuple[float, ...]]) -> Layout:
    """The layout with stage shares, by pipeline."""
    both = zip(layout.pipelines, shares, strict=True)
    return replace(layout, pipelines=tuple(replace(one, stage_shares=of) for one, of in both))


def home(num_ranks: int) -> Layout:
    return start_layout([4, 4], range(num_ranks), num_stages=2)


@pytest.mark.parametrize("schedule", RUN_SCHEDULES)
@pytest.mark.parametrize("shares", [(0.2, 0.6), (0.75, 0.0), (0.5, 0.5), (1.0, 0.0)])
@pytest.mark.usefixtures("wide")
def test_a_slow_rank_hands_rows_over_at_its_stage_only(
    schedule: Schedule, shares: tuple[float, float]
) -> None:
    plain = PlainRun(FAMILY, STEPS, CLIP)
    layout = shared(home(4), [shares, (1.0 - shares[0], 1.0 - shares[1])])
    layout = replace(layout, schedule=schedule)

    def work(group: ThreadGroup) -> tuple[list[float], list[float], int]:
        engine = engine_of(FAMILY, group, layout=layout, max_grad_norm=CLIP)
        adamw(engine)
        results = [engine.step(own_batches(engine, rows_of(step), 2)) for step in range(STEPS)]
        own = len(engine.rows(ROWS))
        return [r.loss.item() for r in results], [r.grad_norm.item() for r in results], own

    found = run_ranks(4, work)
    for losses, norms, _ in found:
        assert losses == pytest.approx(plain.losses, rel=1e-11)
        assert norms == pytest.approx(plain.norms, rel=1e-11)
    ranks = [pipeline.stages[stage].group[0] for stage in (0, 1) for pipeline in layout.pipelines]
    own = [found[rank][2] for rank in ranks]
    assert own[:2] == [len(rows) for rows in layout.rows_at(0, ROWS)]
    assert own[2:] == [len(rows) for rows in layout.rows_at(1, ROWS)]
    assert sum(own) == 2 * ROWS


@pytest.mark.usefixtures("wide")
def test_plans_switch_stage_shares_on_and_off_and_move_nothing() -> None:
    plain = PlainRun(FAMILY, STEPS, CLIP)

    def work(group: ThreadGroup) -> list[float]:
        layout = home(4)
        engine = engine_of(FAMILY, group, layout=layout, max_grad_norm=CLIP)
        adamw(engine)
        losses, moved = [], 0
        for step, shares in enumerate([(), (0.25, 0.5), (0.7, 0.1), ()]):
            if step:
                others = tuple(1.0 - share for share in shares)
                plan = replace(shared(layout, [shares, others]), generation=step + 1)
                moved += engine.apply(plan).moved_bytes
            losses.append(engine.step(own_batches(engine, rows_of(step), 2)).loss.item())
        return [float(moved), *losses]

    for moved, *losses in run_ranks(4, work):
        assert moved == 0.0
        assert losses == pytest.approx(plain.losses, rel=1e-11)


@pytest.mark.usefixtures("wide")
def test_losses_of_routers_and_evaluations_are_exact() -> None:
    def trained(group: ThreadGroup, layout: Layout | None = None) -> list[float]:
        engine = engine_of(FAMILY, group, layout=layout, balance="sequence", balance_weight=0.1)
        adamw(engine)
        norms = [
            engine.step(own_batches(engine, rows_of(step), 2)).grad_norm.item() for step in range(2)
        ]
        return [*norms, engine.evaluate(own_batches(engine, rows_of(7), 2)).item()]

    layout = shared(home(4), [(0.2, 0.9), (0.8, 0.1)])
    (alone,) = run_ranks(1, trained)
    for found in run_ranks(4, lambda group: trained(group, layout)):
        assert found == pytest.approx(alone, rel=1e-11)


@pytest.mark.usefixtures("wide")
def test_all_ranks_refuse_rows_that_are_not_of_their_stage() -> None:
    layout = shared(home(4), [(0.25, 0.5), (0.75, 0.5)])

    def work(group: ThreadGroup) -> float:
        engine = engine_of(FAMILY, group, layout=layout)
        adamw(engine)
        rows = rows_of(0)
        own = engine.rows(ROWS)
        with pytest.raises(ConfigError):  # by batch share
            engine.step(micro_batches(rows[:4] if group.rank in (0, 1) else rows[4:]))
        with pytest.raises(ConfigError):  # cut otherwise
            engine.step(micro_batches(rows[own.start : own.stop], 2))
        with pytest.raises(ConfigError):  # of another step, at one stage
            other = rows_of(int(engine.layout.places[group.rank][0] == 1))
            engine.step(own_batches(engine, other, 2))
        with pytest.raises(ConfigError):  # shorter rows in one pipeline
            length = 5 if engine.layout.places[group.rank][1] else 9
            engine.step(own_batches(engine, rows[:, :length], 2))
        return engine.step(own_batches(engine, rows, 2)).loss.item()

    assert len(set(run_ranks(4, work))) == 1
