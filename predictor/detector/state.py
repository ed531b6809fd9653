"""State of the detector for one role of a job, and its judgement of a step. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import CoverageState, Finding
from pacekeeper.predictor.cost.features import Array, Flags, StepSample
from pacekeeper.predictor.cost.model import CostModel
from pacekeeper.predictor.detector import cusum
from pacekeeper.predictor.detector.cusum import Charts
from pacekeeper.predictor.detector.global_slowdown import (
    NO_NEWS,
    GlobalSlowdown,
    GlobalSlowdownChange,
)
from pacekeeper.predictor.detector.thresholds import StepNoise, Thresholds, mixed
from pacekeeper.predictor.stats.robust import column_medians

COUNTED_STEPS = 4  # steps that would all have to lack a micro-batch to be counted wrong


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """Detector state of one role of one job. `slow`: slowdown of each open finding, by rank.

    `generation` 0: none seen yet. `layout_steps`: steps since its generation began. `newcomers`:
    ranks that joined and are not judged yet, with the number of the step that showed them first.
    """

    num_seen: int = 0
    generation: int = 0
    layout_steps: int = 0
    warmup: tuple[StepSample, ...] = ()
    history: tuple[StepSample, ...] = ()
    model: CostModel | None = None
    charts: Charts = field(default_factory=cusum.no_charts)
    limits: Thresholds | None = None  # of the charts, as of the present model
    noise: StepNoise | None = None  # of a step, as of the present model
    others: tuple[StepNoise, ...] = ()  # that of the job's other roles
    slow: Mapping[int, float] = field(default_factory=dict)
    newcomers: Mapping[int, int] = field(default_factory=dict)
    steps_since_fit: int = 0
    fitted_steps: int = 0  # steps the present model was fitted to
    common: GlobalSlowdown | None = field(default_factory=GlobalSlowdown)  # None: not judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Result of one step. Columns follow `ranks`; expected, slowdown, suspicion empty in warm-up.

    `slowdown` is the running median of observed / expected over `measure_steps`, relative to the
    peers. `findings` are new ones; `recovered`: ranks whose open finding ended; `changed`: new
    slowdowns of open findings; `common`: the change for all ranks together.
    """

    step: int
    ranks: tuple[int, ...]
    observed_s: tuple[float, ...]
    expected_s: tuple[float, ...] = ()
    slowdown: tuple[float, ...] = ()
    suspicion: tuple[float, ...] = ()
    findings: tuple[Finding, ...] = ()
    recovered: tuple[int, ...] = ()
    changed: Mapping[int, float] = field(default_factory=dict)
    common: GlobalSlowdownChange = NO_NEWS
    watch: CoverageState = CoverageState.MEASURING
    reason: str = ""


def begin() -> Evidence:
    """Return the state of a detector that has seen no step."""
    return Evidence()


def microbatches_per_step(evidence: Evidence) -> int:
    """How many each rank runs, as counted in the newest steps that were learnt from; 1 at first."""
    newest = evidence.history[-COUNTED_STEPS:]
    return max((sample.num_microbatches for sample in newest), default=1)


def restore(slow: Mapping[int, float], *, everybody: float = 1.0) -> Evidence:
    """Make the state after a restart: open findings are kept, all else is measured again.

    The new cost model does not learn from ranks with open findings. everybody: slowdown of the open
    finding of all ranks together, 1.0 without one.
    """
    return Evidence(slow=dict(slow), common=GlobalSlowdown(slowdown=everybody))


def forget(evidence: Evidence, ranks: Collection[int]) -> Evidence:
    """Remove these ranks and their findings."""
    slow = {rank: value for rank, value in evidence.slow.items() if rank not in ranks}
    return replace(evidence, slow=slow, charts=cusum.without_ranks(evidence.charts, ranks))


def model_of(evidence: Evidence) -> CostModel:
    """Return the cost model, which is there after the warm-up."""
    assert evidence.model is not None, "only after the warm-up"
    return evidence.model


def limits_of(evidence: Evidence) -> Thresholds:
    """The charts' thresholds, there whenever the model is."""
    assert evidence.limits is not None, "made with the model"
    return evidence.limits


def sigma_of(config: DetectorConfig, evidence: Evidence) -> float:
    """One sigma of a step's log ratio, never below the floor."""
    assert evidence.noise is not None, "measured with the model"
    return max(config.sigma_floor, mixed(evidence.noise, evidence.others).sigma)


def sigmas_of(config: DetectorConfig, evidence: Evidence) -> Array:
    """One sigma of a step's log ratio of each charted rank [ranks].

    The last rank without a finding is judged by the clock: the noise that all ranks share, which
    cancels between two, is in its residuals, too.
    """
    ranks, sigma, common = evidence.charts.ranks, sigma_of(config, evidence), evidence.common
    sigmas = np.full(len(ranks), sigma)
    is_witness = ~among(ranks, evidence.slow)
    if is_witness.sum() == 1 and common is not None and common.limits is not None:
        shared = limits_of(evidence).weight * common.sigma / common.limits.weight
        sigmas[is_witness] = np.hypot(sigma, shared)
    return sigmas


def lacks_reference(evidence: Evidence, ranks: Collection[int]) -> bool:
    """Whether all but one of these ranks have a finding, and the role's own pace is not known."""
    is_pace_known = evidence.common is None or evidence.common.limits is not None
    return not is_pace_known and len(ranks) > 1 and len(set(ranks) - evidence.slow.keys()) == 1


def series_of(charts: Charts, i: int) -> Array:
    """A rank's recent log ratios without the steps it lacks, newest last."""
    series: Array = charts.recent[:, i]
    return series[np.isfinite(series)]


def among(ranks: Collection[int], chosen: Collection[int]) -> Flags:
    """Which of `ranks` are in `chosen` [ranks]."""
    if len(chosen) == 0:
        return np.zeros(len(ranks), dtype=np.bool_)
    if isinstance(chosen, tuple) and chosen == ranks:
        return np.ones(len(ranks), dtype=np.bool_)  # nearly always, and each step asks
    return np.isin(list(ranks), list(chosen))


def median_of_steps(values: Array) -> Array:
    """Median over steps [steps, ranks] -> [ranks]; 0 where a rank has no value (and no warning)."""
    if len(values) == 0:
        return np.zeros(values.shape[1])
    return np.nan_to_num(column_medians(values))
