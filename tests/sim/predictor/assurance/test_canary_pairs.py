"""With two ranks the only witness shares each disturbance: the promise counts that, and is kept."""

from dataclasses import replace

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.telemetry.microbatch_table import table_from_records
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.predictor.assurance.canary import Canaries, CanaryResult, advance_canaries
from pacekeeper.predictor.assurance.sensitivity import sensitivity_of
from pacekeeper.predictor.cost.features import sample_of, work_of
from pacekeeper.predictor.detector.state import begin
from pacekeeper.predictor.detector.update import update_evidence
from support.machine_driver import step as records_of

CONFIG = DetectorConfig(warmup_steps=12, canary_period_steps=20)
STEPS = 400


def outcomes(seed: int, *, shared: float) -> tuple[list[CanaryResult], float]:
    """Canaries of two ranks whose clock wanders together, and the last promise."""
    random = np.random.default_rng(seed)
    evidence, canaries, common = begin(), Canaries(), 0.0
    ended: list[CanaryResult] = []
    promised = 1.0
    for number in range(STEPS):
        common = 0.8 * common + shared * random.standard_normal()
        own = common + 0.02 * random.standard_normal(2)
        records = [
            replace(record, compute_s=0.1 * float(np.exp(own[record.rank])))
            for record in records_of(number, ranks=range(2))
            if isinstance(record, MicroBatchRecord)
        ]
        evidence, _ = update_evidence(CONFIG, evidence, sample_of(records))
        sensitivity, before = sensitivity_of(CONFIG, evidence, range(2)), canaries.last
        canaries = advance_canaries(
            CONFIG,
            canaries,
            evidence,
            work_of([table_from_records(records)]),
            sensitivity=sensitivity,
            ranks=range(2),
            seed=1,
        )
        promised = promised if sensitivity is None else sensitivity.slowdown
        if canaries.last is not None and canaries.last is not before:
            ended.append(canaries.last)
    return ended, promised


def test_a_wander_that_both_share_breaks_no_promise() -> None:
    ended = [outcome for seed in range(5) for outcome in outcomes(seed, shared=0.03)[0]]
    assert len(ended) > 60
    assert [outcome for outcome in ended if not outcome.is_found] == []


def test_without_one_the_promise_is_as_small_as_ever() -> None:
    assert outcomes(0, shared=0.0)[1] < outcomes(0, shared=0.03)[1]
