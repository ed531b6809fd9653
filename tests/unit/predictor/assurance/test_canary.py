"""A canary is found while the detector sees, is missed when it is broken, and touches nothing."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Blindness
from pacekeeper.core.telemetry.microbatch_table import table_from_records
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.predictor.assurance import canary as canary_module
from pacekeeper.predictor.assurance.canary import (
    Canaries,
    CanaryResult,
    advance_canaries,
    canary_failure_reason,
)
from pacekeeper.predictor.assurance.sensitivity import Sensitivity, sensitivity_of
from pacekeeper.predictor.cost.features import FeatureTable, sample_of, sample_of_work, work_of
from pacekeeper.predictor.detector import alarms, cusum
from pacekeeper.predictor.detector import update as evidence
from pacekeeper.predictor.detector.state import Evidence, begin
from pacekeeper.predictor.detector.update import update_evidence
from support.machine_driver import step as records_of

CONFIG = DetectorConfig(warmup_steps=8, canary_period_steps=30)
RANKS = range(4)
SEED = 1


@dataclass(kw_only=True)
class Watched:
    """A job's detector with its canaries, step by step."""

    config: DetectorConfig = CONFIG
    evidence: Evidence = field(default_factory=begin)
    canaries: Canaries = field(default_factory=Canaries)
    step: int = -1
    outcomes: list[CanaryResult] = field(default_factory=list)

    def run(self, num_steps: int, *, generation: int = 1, slow: int | None = None) -> None:
        for _ in range(num_steps):
            self.step += 1
            records = [
                record
                for record in records_of(self.step, generation=generation, slow=slow)
                if isinstance(record, MicroBatchRecord)
            ]
            self.evidence, _ = update_evidence(self.config, self.evidence, sample_of(records))
            sight = sensitivity_of(self.config, self.evidence, RANKS)
            before = self.canaries.last
            self.canaries = advance_canaries(
                self.config,
                self.canaries,
                self.evidence,
                work_of([table_from_records(records)]),
                sensitivity=sight,
                ranks=RANKS,
                seed=SEED,
            )
            if self.canaries.last is not None and self.canaries.last is not before:
                self.outcomes.append(self.canaries.last)


def test_a_detector_that_sees_finds_each_canary_in_time() -> None:
    watched = Watched()
    watched.run(200)
    assert len(watched.outcomes) >= 5
    for outcome in watched.outcomes:
        assert outcome.is_found
        assert outcome.num_steps <= CONFIG.see_within_steps
    assert canary_failure_reason(CONFIG, watched.canaries, watched.step) is None


def test_the_canaries_take_turns_over_all_ranks_in_an_order_that_the_seed_gives() -> None:
    watched, again = Watched(), Watched()
    watched.run(200)
    again.run(200)
    turns = [outcome.rank for outcome in watched.outcomes]
    assert turns[:5] == [1, 2, 3, 0, 1]
    assert again.outcomes == watched.outcomes


def test_what_is_put_in_is_the_smallest_slowdown_that_is_promised() -> None:
    watched = Watched()
    watched.run(CONFIG.skip_steps + CONFIG.warmup_steps)
    running = watched.canaries.running
    assert running is not None
    assert running.sensitivity == sensitivity_of(CONFIG, watched.evidence, RANKS)


def test_only_the_copy_of_one_rank_is_slowed() -> None:
    records = [r for r in records_of(3) if isinstance(r, MicroBatchRecord)]
    work = work_of([table_from_records(records)])
    copy, own = work.slowed(2, 1.5), work["rank"] == 2
    assert work["compute_s"].tolist() == [record.compute_s for record in records]
    assert (copy["compute_s"][~own] == work["compute_s"][~own]).all()
    assert copy["compute_s"][own].tolist() == [1.5 * records[2].compute_s]
    others = set(work.columns) - {"compute_s"}
    assert all(copy[name] is work[name] for name in others)


def test_the_evidence_of_the_job_is_the_same_with_and_without_canaries() -> None:
    watched, alone = Watched(), Watched(config=replace(CONFIG, canary_period_steps=0))
    watched.run(60)
    alone.run(60)
    assert alone.canaries.turn == 0 < watched.canaries.turn
    assert (watched.evidence.charts.levels == alone.evidence.charts.levels).all()
    assert watched.evidence.slow == alone.evidence.slow == {}


def test_a_new_layout_cuts_a_canary_short_and_the_next_one_comes_soon() -> None:
    watched = Watched()
    watched.run(CONFIG.skip_steps + CONFIG.warmup_steps)
    assert watched.canaries.running is not None
    watched.run(1, generation=2)
    assert watched.canaries.running is None
    assert not watched.outcomes
    watched.run(2 * CONFIG.see_within_steps + 2, generation=2)
    assert [outcome.is_found for outcome in watched.outcomes] == [True]


def test_a_rank_that_is_slow_itself_is_passed_over_and_cuts_its_own_canary_short() -> None:
    watched = Watched()
    watched.run(CONFIG.skip_steps + CONFIG.warmup_steps)
    assert watched.canaries.running is not None
    rank = watched.canaries.running.rank
    watched.run(2, slow=rank)
    assert watched.canaries.running is None
    assert not watched.outcomes
    watched.run(200, slow=rank)
    assert rank not in {outcome.rank for outcome in watched.outcomes}
    assert len({outcome.rank for outcome in watched.outcomes}) == 3
    assert all(outcome.is_found for outcome in watched.outcomes)


def test_canaries_that_never_come_to_an_end_prove_nothing() -> None:
    watched = Watched()
    watched.run(CONFIG.skip_steps + CONFIG.warmup_steps)
    for number in range(60):  # a new layout every two steps
        watched.run(2, generation=2 + number)
    assert not watched.outcomes
    blind = canary_failure_reason(CONFIG, watched.canaries, watched.step)
    assert blind is not None
    assert blind.why is Blindness.CANARY
    assert "no canary has come to its end" in blind.reason


def test_nothing_is_tried_where_nothing_is_promised() -> None:
    watched = Watched()
    watched.run(4)
    assert watched.canaries == Canaries() or watched.canaries.turn == 0
    assert canary_failure_reason(CONFIG, watched.canaries, watched.step) is None


def frozen_charts(limits: Any, before: cusum.Charts, *, step: int, **_: Any) -> cusum.Charts:
    return replace(before, recent_steps=(*before.recent_steps, step))


def deaf_naming(*args: Any) -> tuple[Evidence, tuple[()]]:
    return args[1], ()


def no_difference(model: Any, sample: Any, *_: Any) -> Any:
    return 0.0 * sample.observed_s


def another_rank(work: FeatureTable) -> Any:
    return sample_of_work(
        FeatureTable(columns={**work.columns, "compute_s": 0.0 * work["rank"] + 0.1})
    )


def never_slow(*_: Any, **__: Any) -> None:
    return None


SABOTAGE: Mapping[str, tuple[Any, str, Callable[..., Any]]] = {
    "charts that stand still": (cusum, "advance", frozen_charts),
    "nobody is ever named": (evidence, "raise_alarms", deaf_naming),
    "ratios that are always zero": (evidence, "log_ratios", no_difference),
    "records whose times get lost": (canary_module, "sample_of_work", another_rank),
    "a slowdown that is never agreed on": (alarms, "measured", never_slow),
}


@pytest.fixture(params=sorted(SABOTAGE))
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module, name, replacement = SABOTAGE[request.param]
    watched_before = getattr(module, name)
    assert watched_before is not replacement
    monkeypatch.setattr(module, name, replacement)
    yield


@pytest.mark.usefixtures("broken")
def test_a_detector_that_is_broken_misses_its_canary_and_is_blind() -> None:
    watched = Watched()
    watched.run(40)
    assert watched.outcomes
    assert not any(outcome.is_found for outcome in watched.outcomes)
    blind = canary_failure_reason(CONFIG, watched.canaries, watched.step)
    assert blind is not None
    assert blind.why is Blindness.CANARY
    assert "the canary was missed" in blind.reason


def test_a_promise_that_can_not_be_kept_is_missed() -> None:
    watched = Watched()
    watched.run(CONFIG.skip_steps + CONFIG.warmup_steps)
    running = watched.canaries.running
    assert running is not None
    bold = replace(running, sensitivity=Sensitivity(slowdown=1.003, steps=10))
    watched.canaries = replace(watched.canaries, running=bold)
    watched.run(10)
    assert [outcome.is_found for outcome in watched.outcomes] == [False]
    watched.run(1)  # the next one begins at once, and with another rank
    following = watched.canaries.running
    assert following is not None
    assert following.rank != running.rank
