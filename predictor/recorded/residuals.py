"""Residuals of a recorded run: log(observed / expected compute time) of each rank and step.

The expected time of a micro-batch is regressed on the time of the same micro-batch on the other
stages of the same data-parallel rank (same documents), on tokens, sum(len^2) and expert rows where
recorded; what the peers of the stage share is subtracted. All slopes are fitted to changes within a
step (between steps where only sums are recorded): a lasting fault cancels out of these and cannot
bias the model.
"""

from dataclasses import dataclass, replace

import numpy as np

from pacekeeper.predictor.cost.features import Array, Flags, Positions
from pacekeeper.predictor.recorded.trace import ComputeTable, Trace
from pacekeeper.predictor.stats.group_ids import grouped
from pacekeeper.predictor.stats.peers import medians_without_one
from pacekeeper.predictor.stats.robust import MAD_TO_SIGMA, column_medians, robust_scale
from pacekeeper.predictor.stats.robust_regression import shared_slope, work_slopes

KNOWN_SHARE = 0.5  # of a role's rows: a regressor that is known for fewer is not used
LEAST_EXPLAINED = 0.05  # of the typical time: lower bound of the expected time
LEAST_SCATTER = 4  # micro-batches needed to estimate their scatter
CLIP = 2.0  # sigmas: limit of one micro-batch's deviation in the mean of its step (Huber)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceTimes:
    """Log compute seconds as a table [times, columns], NaN where nothing was recorded.

    A time is one (step, micro-batch), a column one (rank, chunk, model chunk).

    Attributes:
        steps: [steps] step numbers, ascending.
        stage: [ranks].
        dp: [ranks] data-parallel rank.
        step_of: [times] position in `steps`.
        rank_of: [columns] position in `ranks`.
        chunk_of: [columns] value of `Chunk`.
        role_of: [columns] columns of one role (stage, chunk, model chunk) do the same kind of work.
        log_s: [times, columns] log seconds.
        work: [regressors, times, columns] logs of the recorded work.
        layouts: first and end position of each layout's steps; the first step after a change of
            layout mixes two layouts and belongs to none.
    """

    steps: Positions
    ranks: tuple[int, ...]
    stage: Positions
    dp: Positions
    step_of: Positions
    rank_of: Positions
    chunk_of: Positions
    role_of: Positions
    log_s: Array
    work: Array
    layouts: tuple[tuple[int, int], ...]

    @property
    def is_split(self) -> bool:
        """Whether single micro-batches are recorded, not only sums per step."""
        return len(self.step_of) > len(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residuals:
    """log(observed / expected) of each rank, relative to the median rank of its stage.

    Attributes:
        columns: columns of TraceTimes that are summed.
        chunk: the only kind of chunk in `columns`; None: all.
        step_of: [times] as in TraceTimes.
        samples: [times, ranks] residual of each micro-batch.
        by_step: [steps, ranks] robust mean of the samples of a step.
        counts: [steps, ranks] number of samples.
        errors: [steps, ranks] standard error of `by_step` from the scatter of the samples; 0 where
            they are too few.
        shared: [steps, ranks] common part of the peers, already subtracted.
    """

    columns: Positions
    chunk: int | None
    step_of: Positions
    samples: Array
    by_step: Array
    counts: Array
    errors: Array
    shared: Array

    @classmethod
    def of_steps(cls, by_step: Array) -> "Residuals":
        """Residuals [steps, ranks] of sums of steps, of which nothing is shared."""
        return cls(
            columns=np.zeros(0, dtype=np.intp),
            chunk=None,
            step_of=np.arange(len(by_step)),
            samples=by_step,
            by_step=by_step,
            counts=np.isfinite(by_step).astype(np.float64),
            errors=np.zeros_like(by_step),
            shared=np.zeros_like(by_step),
        )

    def within(self, first: int, end: int, stage: Positions) -> "Residuals":
        """Return the residuals of the steps from position `first` to `end` (exclusive) only.

        Steps are renumbered from 0. The residuals are centred again on the median rank of each
        stage in these steps: another layout has another mixture of work, which the model fits less
        well. `stage`: [ranks].
        """
        if (first, end) == (0, len(self.by_step)):
            return self
        kept = (self.step_of >= first) & (self.step_of < end)
        by_step = self.by_step[first:end]
        levels, middle = column_medians(by_step), np.zeros(len(stage))
        for own in np.unique(stage):
            known = (stage == own) & np.isfinite(levels)
            middle[stage == own] = np.median(levels[known]) if known.any() else 0.0
        return replace(
            self,
            step_of=self.step_of[kept] - first,
            samples=self.samples[kept] - middle,
            by_step=by_step - middle,
            counts=self.counts[first:end],
            errors=self.errors[first:end],
            shared=self.shared[first:end],
        )


def times_of(trace: Trace) -> TraceTimes:
    """Arrange the compute rows of a trace as a table.

    Raises:
        ValueError: the trace has no usable compute time of a known rank.
    """
    table = trace.compute
    if table is None:
        raise ValueError(f"{trace.name}: tells no compute times")
    place = {worker.rank: worker for worker in trace.workers}
    usable = table.usable(place)
    if not usable.any():
        raise ValueError(f"{trace.name}: holds no compute time of a known rank")
    rank, chunk, model_chunk = (c[usable] for c in (table.rank, table.chunk, table.model_chunk))
    column, first = grouped(rank, chunk, model_chunk)
    step = table.step[usable]
    time, first_time = grouped(step, table.micro_batch[usable])
    steps, step_of = np.unique(step[first_time], return_inverse=True)
    ranks, rank_of = np.unique(rank[first], return_inverse=True)
    stage = np.array([place[rank].stage for rank in ranks.tolist()], dtype=np.intp)
    dp = np.array([place[rank].dp for rank in ranks.tolist()], dtype=np.intp)
    shape = (len(first_time), len(first))
    log_s = np.full(shape, np.nan)
    log_s[time, column] = np.log(table.compute_s[usable])
    return TraceTimes(
        steps=steps,
        ranks=tuple(ranks.tolist()),
        stage=stage,
        dp=dp,
        step_of=step_of,
        rank_of=rank_of,
        chunk_of=chunk[first],
        role_of=grouped(stage[rank_of], chunk[first], model_chunk[first])[0],
        log_s=log_s,
        work=_known_work(table, usable, time, column, shape),
        layouts=layouts_of(trace, steps),
    )


def layouts_of(trace: Trace, steps: Positions) -> tuple[tuple[int, int], ...]:
    """Return the first and end position in `steps` (ascending) of each layout.

    The first step after a change of layout belongs to none.
    """
    table = trace.layouts
    if table is None or not len(table.step):
        return ((0, len(steps)),)
    at = np.maximum(np.searchsorted(table.step, steps, side="right") - 1, 0)
    new = np.flatnonzero(np.diff(table.generation[at])) + 1
    bounds = [0, *new.tolist(), len(steps)]
    pieces = zip([0, *(first + 1 for first in bounds[1:-1])], bounds[1:], strict=True)
    return tuple((first, end) for first, end in pieces if first < end)


def residuals_of(times: TraceTimes, known: Array) -> tuple[Residuals, ...]:
    """Compute the residuals of all compute and, if there are several kinds of chunk, of each kind.

    The kinds follow in order of total time, the longest first. They are judged separately because a
    power cap slows backward passes up to four times as much as forward passes, and short passes are
    noisier.

    Args:
        times: of the trace.
        known: [steps, columns] log slowdowns already found; they are subtracted, so that a slow
            rank does not bias the reference of its peers.
    """
    log_s = times.log_s - known[times.step_of]
    unexplained = np.full_like(log_s, np.nan)
    for role in np.unique(times.role_of):
        at = np.flatnonzero(times.role_of == role)
        sources = _regressors(times, log_s, at)
        rest = _subtract_explained(times, log_s[:, at], sources)
        unexplained[:, at] = rest - _median_level(rest)
    observed_s, expected_s = np.exp(log_s), np.exp(log_s - unexplained)
    chunks = np.unique(times.chunk_of)
    kinds: list[int | None] = [None]
    if len(chunks) > 1:
        took_s = [float(np.nansum(observed_s[:, times.chunk_of == chunk])) for chunk in chunks]
        kinds += [int(chunks[i]) for i in np.argsort(took_s)[::-1]]
    return tuple(_residuals(times, observed_s, expected_s, kind) for kind in kinds)


def _residuals(
    times: TraceTimes, observed_s: Array, expected_s: Array, chunk: int | None
) -> Residuals:
    every = np.ones(len(times.chunk_of), dtype=np.bool_)
    columns = np.flatnonzero(every if chunk is None else times.chunk_of == chunk)
    samples = _sample_log_ratios(times, columns, observed_s, expected_s)
    by_step, counts, errors = _step_means(times, samples)
    shared = _common_by_stage(times, by_step)
    return Residuals(
        columns=columns,
        chunk=chunk,
        step_of=times.step_of,
        samples=samples - shared[times.step_of],
        by_step=by_step - shared,
        counts=counts,
        errors=errors,
        shared=shared,
    )


def _known_work(
    table: ComputeTable, usable: Flags, time: Positions, column: Positions, shape: tuple[int, int]
) -> Array:
    columns = (table.tokens, table.sum_len_squared, table.expert_rows)
    work = np.full((len(columns), *shape), np.nan)
    for i, values in enumerate(columns):
        with np.errstate(invalid="ignore", divide="ignore"):
            work[i, time, column] = np.log(np.maximum(values[usable], 1.0))
    return work


def _median_level(values: Array) -> float:
    """Median over ranks of each rank's median over time; table [times, ranks] of one role."""
    with np.errstate(invalid="ignore"):
        medians = column_medians(values)
    return float(np.median(medians[np.isfinite(medians)])) if np.isfinite(medians).any() else 0.0


def _regressors(times: TraceTimes, log_s: Array, at: Positions) -> list[Array]:
    """Regressors of a role's times: tables [times, ranks of the role], scaled to a median of 1."""
    found = [values[:, at] for values in times.work]
    if times.is_split or len(np.unique(times.dp)) > 1:
        # With one pipeline and sums only, a slow majority would be indistinguishable from work.
        found += [
            _time_on_other_stages(times, log_s, at, chunk) for chunk in np.unique(times.chunk_of)
        ]
    known = [values for values in found if np.isfinite(values).mean() >= KNOWN_SHARE]
    return [np.exp(values - _median_level(values)) for values in known]


def _time_on_other_stages(times: TraceTimes, log_s: Array, at: Positions, chunk: int) -> Array:
    """Median log time of the same micro-batch on the other stages of its data-parallel rank."""
    table = np.full((len(log_s), len(at)), np.nan)
    stage, dp = times.stage[times.rank_of], times.dp[times.rank_of]
    centred = np.full_like(log_s, np.nan)
    others = np.flatnonzero((times.chunk_of == chunk) & (stage != stage[at[0]]))
    for role in np.unique(times.role_of[others]):
        columns = others[times.role_of[others] == role]
        centred[:, columns] = log_s[:, columns] - _median_level(log_s[:, columns])
    others = others[np.argsort(dp[others], kind="stable")]
    begin, end = (np.searchsorted(dp[others], dp[at], side=side) for side in ("left", "right"))
    for count in np.unique(end - begin):
        alike = np.flatnonzero(end - begin == count)
        if count:
            same = others[begin[alike, None] + np.arange(count)]
            table[:, alike] = column_medians(centred[:, same], axis=2)
    return table


def _subtract_explained(times: TraceTimes, log_s: Array, sources: list[Array]) -> Array:
    """Subtract from a role's log times [times, ranks] what the regressors explain.

    The slopes are common to all ranks. Seconds are linear in their causes (tokens, sum(len^2)), and
    therefore in the seconds of another stage for the same work; errors are relative.
    """
    if not sources:
        return log_s
    relative = np.exp(log_s - _median_level(log_s))
    usable = np.isfinite(relative) & np.all([np.isfinite(values) for values in sources], axis=0)
    tables = [np.where(usable, values, np.nan) for values in (relative, *sources)]
    changes = [_transient_changes(times, table).reshape(-1) for table in tables]
    relative = tables[0] if times.is_split else 0.5 * (tables[0][1:] + tables[0][:-1])
    size = relative.reshape(-1)  # of what the changes are relative to
    kept = np.isfinite(changes[0])
    columns = np.stack(changes[1:], axis=1)[kept] / size[kept, None]
    slopes = work_slopes(columns, changes[0][kept] / size[kept])
    explained = 1.0 + np.tensordot(slopes, np.stack(sources) - 1.0, axes=1)
    return log_s - np.log(np.maximum(explained, LEAST_EXPLAINED))


def _transient_changes(times: TraceTimes, values: Array) -> Array:
    """Differences in which a lasting fault cancels: within a step, else from step to step."""
    if not times.is_split:
        return np.diff(values, axis=0)
    deviations = np.empty_like(values)
    for step in range(len(times.steps)):
        rows = times.step_of == step
        deviations[rows] = values[rows] - column_medians(values[rows])
    return deviations


def _sample_log_ratios(
    times: TraceTimes, columns: Positions, observed_s: Array, expected_s: Array
) -> Array:
    """log(observed / expected) of each micro-batch [times, ranks], columns summed; NaN: no time."""
    sums = np.zeros((2, len(times.ranks), len(times.step_of)))
    usable = np.isfinite(expected_s)
    for i, seconds in enumerate((observed_s, expected_s)):
        kept = np.where(usable, seconds, 0.0)[:, columns]
        np.add.at(sums[i], times.rank_of[columns], kept.T)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios: Array = np.log(sums[0] / sums[1]).T
    return ratios


def _step_means(times: TraceTimes, samples: Array) -> tuple[Array, Array, Array]:
    """Robust mean over the micro-batches of each step [steps, ranks], their number, its error."""
    shape = (len(times.steps), len(times.ranks))
    means, counts, errors = np.full(shape, np.nan), np.zeros(shape), np.zeros(shape)
    spread = max(robust_scale(_transient_changes(times, samples)), 1e-4)
    for step in range(len(times.steps)):
        values = samples[times.step_of == step]
        middle = column_medians(values)
        counts[step] = np.isfinite(values).sum(axis=0)
        clipped = np.clip(values - middle, -CLIP * spread, CLIP * spread)
        with np.errstate(invalid="ignore", divide="ignore"):
            means[step] = middle + np.nansum(clipped, axis=0) / counts[step]
            scatter = MAD_TO_SIGMA * column_medians(np.abs(values - middle)) / np.sqrt(counts[step])
        errors[step] = np.where(counts[step] >= LEAST_SCATTER, scatter, 0.0)
    return means, counts, errors


def _common_by_stage(times: TraceTimes, by_step: Array) -> Array:
    """Common part of each stage [steps, ranks]: slope x median of the rank's peers."""
    shared = np.zeros_like(by_step)
    for stage in np.unique(times.stage):
        members = np.flatnonzero(times.stage == stage)
        if len(members) < 2:
            continue
        levels = column_medians(by_step[:, members])
        own = by_step[:, members] - levels
        peers = medians_without_one(own)
        target, column = np.diff(own, axis=0).reshape(-1), np.diff(peers, axis=0).reshape(-1)
        kept = np.isfinite(target) & np.isfinite(column)
        slope = shared_slope(column[kept], target[kept])
        shared[:, members] = slope * np.nan_to_num(peers)
    return shared
