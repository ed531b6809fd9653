"""How much longer than its work explains did each rank compute in each step of a trace? Pure.

What a micro-batch costs is told by the same micro-batch on the other stages of the same
data-parallel rank (same documents), by tokens, sum(len^2) and expert rows where known, and by the
peers of the same stage. How far each is to be believed is fitted to changes within a step (between
steps where only sums are told): a fault does not change there, so it can not teach the model.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from pacekeeper.predictor.cost.features import Array, Flags, Positions
from pacekeeper.predictor.offline.trace import ComputeTable, Trace
from pacekeeper.predictor.stats.group_ids import grouped
from pacekeeper.predictor.stats.peers import medians_without_one
from pacekeeper.predictor.stats.robust import MAD_TO_SIGMA, column_medians, robust_scale
from pacekeeper.predictor.stats.robust_regression import shared_slope, work_slopes

KNOWN_SHARE = 0.5  # a source that lacks more of a role's rows than the rest is not used
LEAST_EXPLAINED = 0.05  # of the typical time: work never seen before costs something
LEAST_SCATTER = 4  # micro-batches that can tell their own scatter
CLIP = 2.0  # sigmas: what one micro-batch may add to the mean of its step (Huber)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceTimes:
    """Log seconds in a table [times, columns], NaN where nothing was recorded.

    A time is one (step, micro-batch), a column one (rank, chunk, model chunk); `step_of`: position
    in `steps` of each time; `rank_of`: position in `ranks` of each column; `role_of`: columns of
    one role (stage, chunk, model chunk) do the same kind of work. `work` [regressors, times,
    columns]: log of what is known of the work. `layouts`: first and end position of the steps
    of each layout that can be judged; the first step of a new one is a mixture and in none.
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
        """Are single micro-batches told, not only sums per step?"""
        return len(self.step_of) > len(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residuals:
    """log(observed / expected) of each rank; 0 is the middle of the peers of its stage.

    `columns`: of TraceTimes, what was summed. `chunk`: the only kind of chunk in it, None: all.
    `samples` [times, ranks]: of each micro-batch; `by_step` [steps, ranks]: robust
    means of those, `counts` how many and `errors` one sigma by how far they are apart, 0 where they
    are too few to tell; `shared`: what was taken off because peers had it, too. `step_of` as in
    TraceTimes.
    """

    columns: Positions
    chunk: int | None
    step_of: Positions
    samples: Array
    by_step: Array
    counts: Array
    errors: Array
    shared: Array

    def within(self, first: int, end: int, stage: Positions) -> "Residuals":
        """Of the steps at the positions first to end only, which are counted from 0 then.

        0 is the middle of a stage's ranks in these steps: another layout is another mixture of
        work, of which the model knows less. stage [ranks].
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


def usable_rows(table: ComputeTable, ranks: Collection[int]) -> Flags:
    """Which rows [rows] hold a time of one of these ranks."""
    with np.errstate(invalid="ignore"):
        usable = np.isfinite(table.compute_s) & (table.compute_s > 0.0)
    return np.asarray(usable & np.isin(table.rank, list(ranks)))


def times_of(trace: Trace) -> TraceTimes:
    """The compute rows of a trace as a table. Raises ValueError where it has no usable one."""
    table = trace.compute
    if table is None:
        raise ValueError(f"{trace.name}: tells no compute times")
    place = {worker.rank: worker for worker in trace.workers}
    usable = usable_rows(table, place)
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
    """First and end position in `steps` (ascending) of each layout; its first step is in none."""
    table = trace.layouts
    if table is None or not len(table.step):
        return ((0, len(steps)),)
    at = np.maximum(np.searchsorted(table.step, steps, side="right") - 1, 0)
    new = np.flatnonzero(np.diff(table.generation[at])) + 1
    bounds = [0, *new.tolist(), len(steps)]
    pieces = zip([0, *(first + 1 for first in bounds[1:-1])], bounds[1:], strict=True)
    return tuple((first, end) for first, end in pieces if first < end)


def residuals_of(times: TraceTimes, known: Array) -> tuple[Residuals, ...]:
    """What the work does not explain: of all computing and, where a trace tells several kinds of
    chunk, of the kind that takes longest and of the others.

    Why apart: a power cap slows backward passes up to four times as much as forward ones, and short
    ones are noisier. known [steps, columns]: log slowdowns that are already found; they are taken
    out, so that a slow rank misleads nobody who is compared with it.
    """
    log_s = times.log_s - known[times.step_of]
    unexplained = np.full_like(log_s, np.nan)
    for role in np.unique(times.role_of):
        at = np.flatnonzero(times.role_of == role)
        sources = _sources(times, log_s, at)
        rest = _without(times, log_s[:, at], sources)
        unexplained[:, at] = rest - _middle(rest)
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
    samples = _by_rank(times, columns, observed_s, expected_s)
    by_step, counts, errors = _step_means(times, samples)
    shared = _shared_by_stage(times, by_step)
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


def _middle(values: Array) -> float:
    """Of a role's table [times, ranks]: the median of the ranks' medians; a rank counts once."""
    with np.errstate(invalid="ignore"):
        medians = column_medians(values)
    return float(np.median(medians[np.isfinite(medians)])) if np.isfinite(medians).any() else 0.0


def _sources(times: TraceTimes, log_s: Array, at: Positions) -> list[Array]:
    """What tells the cost of a role's rows: tables [times, ranks of the role], typically 1."""
    found = [values[:, at] for values in times.work]
    if times.is_split or len(np.unique(times.dp)) > 1:
        # Where one pipeline tells sums only, a slow majority could not be told from its work.
        found += [_elsewhere(times, log_s, at, chunk) for chunk in np.unique(times.chunk_of)]
    known = [values for values in found if np.isfinite(values).mean() >= KNOWN_SHARE]
    return [np.exp(values - _middle(values)) for values in known]


def _elsewhere(times: TraceTimes, log_s: Array, at: Positions, chunk: int) -> Array:
    """The same micro-batch on the other stages of the same data-parallel rank: median, log."""
    table = np.full((len(log_s), len(at)), np.nan)
    stage, dp = times.stage[times.rank_of], times.dp[times.rank_of]
    centred = np.full_like(log_s, np.nan)
    others = np.flatnonzero((times.chunk_of == chunk) & (stage != stage[at[0]]))
    for role in np.unique(times.role_of[others]):
        columns = others[times.role_of[others] == role]
        centred[:, columns] = log_s[:, columns] - _middle(log_s[:, columns])
    others = others[np.argsort(dp[others], kind="stable")]
    begin, end = (np.searchsorted(dp[others], dp[at], side=side) for side in ("left", "right"))
    for count in np.unique(end - begin):
        alike = np.flatnonzero(end - begin == count)
        if count:
            same = others[begin[alike, None] + np.arange(count)]
            table[:, alike] = column_medians(centred[:, same], axis=2)
    return table


def _without(times: TraceTimes, log_s: Array, sources: list[Array]) -> Array:
    """A role's log table [times, ranks] less what its sources explain; slopes common to all ranks.

    Seconds are linear in what causes them (tokens, sum(len^2)) and so in the seconds that another
    stage needs for the same work; errors are relative.
    """
    if not sources:
        return log_s
    relative = np.exp(log_s - _middle(log_s))
    usable = np.isfinite(relative) & np.all([np.isfinite(values) for values in sources], axis=0)
    tables = [np.where(usable, values, np.nan) for values in (relative, *sources)]
    changes = [_changes(times, table).reshape(-1) for table in tables]
    size = _sizes(times, tables[0]).reshape(-1)
    kept = np.isfinite(changes[0])
    columns = np.stack(changes[1:], axis=1)[kept] / size[kept, None]
    slopes = work_slopes(columns, changes[0][kept] / size[kept])
    explained = 1.0 + np.tensordot(slopes, np.stack(sources) - 1.0, axes=1)
    return log_s - np.log(np.maximum(explained, LEAST_EXPLAINED))


def _sizes(times: TraceTimes, relative: Array) -> Array:
    """Of the rows that `_changes` makes: what their errors are relative to."""
    return relative if times.is_split else 0.5 * (relative[1:] + relative[:-1])


def _changes(times: TraceTimes, values: Array) -> Array:
    """Where no lasting fault shows: deviations within the step, or between steps of sums."""
    if not times.is_split:
        return np.diff(values, axis=0)
    deviations = np.empty_like(values)
    for step in range(len(times.steps)):
        rows = times.step_of == step
        deviations[rows] = values[rows] - column_medians(values[rows])
    return deviations


def _by_rank(times: TraceTimes, columns: Positions, observed_s: Array, expected_s: Array) -> Array:
    """log(observed / expected) of each micro-batch [times, ranks], columns summed; NaN: none."""
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
    spread = max(robust_scale(_changes(times, samples)), 1e-4)
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


def _shared_by_stage(times: TraceTimes, by_step: Array) -> Array:
    """What each rank's step shares with its peers' [steps, ranks]: slope x their median."""
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
