"""What a watch says it could see is what the detector then sees; what it can not see, it says."""

from dataclasses import replace
from math import inf, nan

import pytest

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Blindness
from pacekeeper.predictor.assurance.sensitivity import Sensitivity, blindness, sensitivity_of
from pacekeeper.predictor.detector.state import Evidence, among, begin
from pacekeeper.predictor.detector.update import update_evidence
from support.examples import seeds
from support.synthetic_job import CPU_CLOCK, DEVICE_CLOCK, Noise, SyntheticJob

CONFIG = DetectorConfig()
WARM = CONFIG.skip_steps + CONFIG.warmup_steps + 40


def watched(job: SyntheticJob, config: DetectorConfig = CONFIG, steps: int = WARM) -> Evidence:
    evidence = begin()
    for _ in range(steps):
        evidence, _ = update_evidence(config, evidence, job.next())
    return evidence


def sight(evidence: Evidence, config: DetectorConfig = CONFIG) -> Sensitivity:
    found = sensitivity_of(config, evidence, evidence.charts.ranks)
    assert found is not None
    return found


def why(evidence: Evidence, *, step: int, ranks: tuple[int, ...] | None = None) -> str:
    blind = blindness(
        CONFIG, evidence, evidence.charts.ranks if ranks is None else ranks, step=step
    )
    return "" if blind is None else blind.why


@pytest.mark.parametrize("noise", [DEVICE_CLOCK, CPU_CLOCK])
@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("seed", seeds(4))
def test_a_rank_that_slows_by_what_would_be_seen_is_named_in_time(
    seed: int, parts: int, noise: Noise
) -> None:
    job = SyntheticJob(seed=seed, num_ranks=8, num_microbatches=parts, **noise)
    evidence = watched(job)
    promise = sight(evidence)
    named = []
    for _ in range(promise.steps):
        evidence, said = update_evidence(CONFIG, evidence, job.next({3: promise.slowdown}))
        named += [finding.rank for finding in said.findings]
    assert named == [3]


def test_nothing_is_promised_while_measuring() -> None:
    evidence = watched(SyntheticJob(seed=1), steps=4)
    assert sensitivity_of(CONFIG, evidence, range(4)) is None
    assert blindness(CONFIG, evidence, (), step=5) is None


def test_the_noisier_the_clock_the_larger_what_can_be_seen() -> None:
    seen = [
        sight(watched(SyntheticJob(seed=1, noise=noise))).slowdown for noise in (0.01, 0.05, 0.1)
    ]
    assert seen == sorted(seen)
    assert seen[0] < 1.2 < seen[2]


def test_more_steps_show_a_smaller_slowdown() -> None:
    evidence = watched(SyntheticJob(seed=1, noise=0.05))
    seen = [
        sight(evidence, replace(CONFIG, see_within_steps=steps)).slowdown for steps in (5, 10, 30)
    ]
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < seen[0]


def test_what_the_model_does_not_know_hides_slowdowns_of_the_rank_it_concerns() -> None:
    evidence = watched(SyntheticJob(seed=1))
    doubt = evidence.charts.doubt.copy()
    doubt[2] = 0.5
    doubtful = replace(evidence, charts=replace(evidence.charts, doubt=doubt))
    assert sight(doubtful).slowdown > 1.4 * sight(evidence).slowdown
    assert sensitivity_of(CONFIG, doubtful, (0, 1)) == sensitivity_of(CONFIG, evidence, (0, 1))


def test_a_clock_too_noisy_for_half_speed_is_blind() -> None:
    job = SyntheticJob(seed=1, noise=0.4)
    evidence = watched(job)
    assert sight(evidence).slowdown > CONFIG.blind_slowdown
    assert why(evidence, step=job.step) == Blindness.NOISE


def test_a_threshold_that_no_clipped_residual_can_cross_is_no_sight_at_all() -> None:
    evidence = watched(SyntheticJob(seed=1))
    assert evidence.limits is not None
    rules = tuple(replace(rule, clip=rule.k) for rule in evidence.limits.rules)
    out_of_reach = replace(evidence, limits=replace(evidence.limits, rules=rules))
    assert sight(out_of_reach).slowdown == inf


def test_charts_that_do_not_advance_are_frozen() -> None:
    job = SyntheticJob(seed=1)
    evidence = watched(job)
    assert why(evidence, step=job.step + CONFIG.see_within_steps) == ""
    for _ in range(CONFIG.see_within_steps + 1):
        job.shuffle()  # a new layout at every step: each is the first one on it
        evidence, _ = update_evidence(CONFIG, evidence, job.next())
    assert why(evidence, step=job.step) == Blindness.FROZEN


def test_one_rank_alone_is_blind() -> None:
    job = SyntheticJob(seed=1, num_ranks=1)
    assert why(watched(job), step=job.step) == Blindness.NO_PEERS


def test_a_rank_that_is_in_no_judged_step_is_missed() -> None:
    job = SyntheticJob(seed=1)
    evidence = watched(job)
    assert why(evidence, step=job.step) == ""
    assert why(evidence, step=job.step, ranks=(0, 1, 2, 3, 9)) == Blindness.MISSING_RANK
    unseen = evidence.charts.recent.copy()
    unseen[:, 2] = nan
    evidence = replace(evidence, charts=replace(evidence.charts, recent=unseen))
    blind = blindness(CONFIG, evidence, evidence.charts.ranks, step=job.step)
    assert blind is not None and blind.why is Blindness.MISSING_RANK
    assert blind.reason.startswith("ranks 2 are in none of the last")


def test_a_model_that_can_not_be_fitted_any_more_is_stale() -> None:
    job = SyntheticJob(seed=1)
    evidence = watched(job)
    old = replace(evidence, steps_since_fit=CONFIG.history_steps)
    assert why(old, step=job.step) == ""
    older = replace(evidence, steps_since_fit=CONFIG.history_steps + 1)
    assert why(older, step=job.step) == Blindness.STALE_MODEL


def test_ranks_are_among_others_whatever_holds_these() -> None:
    ranks = (0, 2, 5)
    for chosen in ((0, 2, 5), (5, 2, 0), {2: 1.5, 0: 1.0, 5: 1.0}, (2, 5), (), (0, 1, 2)):
        assert among(ranks, chosen).tolist() == [rank in chosen for rank in ranks]
