"""The rules of others for naming slow ranks, from their published descriptions, as pure functions.

Each takes times_s [steps, ranks], compute time per step, and groups [ranks], the role of each rank
(its stage); each gives flags [steps, ranks]: whom it would name at the end of that step, knowing
nothing later. step_s [steps]: the whole job's steps; where it is not told, the slowest rank's time.
No code of theirs is used; what is our reading of a description is said so.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper.predictor.cost.features import Array, Flags, Positions

Groups = Sequence[int]
MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a rule may look at, checked."""

    times_s: Array
    groups: Groups
    step_s: Array
    expected_s: Array | None

    @property
    def by_role(self) -> list[Positions]:
        """The ranks of each group."""
        of_rank = np.asarray(self.groups)
        return [np.flatnonzero(of_rank == group) for group in np.unique(of_rank)]

    def peer_median(self, values: Array) -> Array:
        """For values [steps, ranks] the median of each rank's group."""
        medians = np.empty(values.shape)
        for ranks in self.by_role:
            medians[:, ranks] = np.median(values[:, ranks], axis=1, keepdims=True)
        return medians


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """A rule with its published settings."""

    name: str

    def flags(
        self,
        times_s: Array,
        groups: Groups,
        *,
        step_s: Array | None = None,
        expected_s: Array | None = None,
    ) -> Flags:
        """Whom the rule names, [steps, ranks]. Only ResiHP looks at expected_s [steps].

        Raises ValueError for times that are not finite and above 0, and for shapes that differ.
        """
        num_steps, num_ranks = times_s.shape
        step_s = times_s.max(axis=1, initial=0.0) if step_s is None else step_s
        told = [("times_s", times_s), ("step_s", step_s)]
        if expected_s is not None:
            told.append(("expected_s", expected_s))
        for name, values in told:
            if not (np.isfinite(values) & (values > 0.0)).all():
                raise ValueError(f"{name}: expected finite times above 0")
            if len(values) != num_steps:
                raise ValueError(f"{name}: expected {num_steps} steps, got {len(values)}")
        if len(groups) != num_ranks:
            raise ValueError(f"groups: expected one for each of {num_ranks} ranks")
        return self._judge(
            Run(times_s=times_s, groups=groups, step_s=step_s, expected_s=expected_s)
        )

    @abstractmethod
    def _judge(self, run: Run) -> Flags: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NvrxRelative(Rule):
    """NVIDIA resiliency extension, section scores against the fastest rank.

    Source: `straggler/reporting.py`, release 0.4.1: score = fastest rank's median / own median over
    a report's window (torch's median: the lower of the middle two), named where score < 0.75.
    As shipped over all ranks; by_role: only within the group. Named at the report's step only.
    """

    name: str = "nvrx"
    window: int = 10
    threshold: float = 0.75
    by_role: bool = False

    def _judge(self, run: Run) -> Flags:
        flags = np.zeros(run.times_s.shape, dtype=np.bool_)
        for end in range(self.window, len(flags) + 1, self.window):
            medians = _lower_median(run.times_s[end - self.window : end])
            for ranks in run.by_role if self.by_role else [np.arange(len(medians))]:
                flags[end - 1, ranks] = medians[ranks].min() / medians[ranks] < self.threshold
        return flags


@dataclass(frozen=True, slots=True, kw_only=True)
class NvrxIndividual(Rule):
    """The same extension, scores against the rank's own best report so far, this one included."""

    name: str = "nvrx own best"
    window: int = 10
    threshold: float = 0.75

    def _judge(self, run: Run) -> Flags:
        flags = np.zeros(run.times_s.shape, dtype=np.bool_)
        best = np.full(len(run.groups), np.inf)
        for end in range(self.window, len(flags) + 1, self.window):
            medians = _lower_median(run.times_s[end - self.window : end])
            best = np.minimum(best, medians)
            flags[end - 1] = best / medians < self.threshold
        return flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Greyhound(Rule):
    """GREYHOUND / FALCON (Wu et al., ATC 2025): change point of step times, then the slow group.

    Points with |z| > 3 are deleted, a change counts with probability > 0.8, more than 10 points
    on both sides and means that differ by more than 10 %. While the job is slow, named are ranks
    whose mean since the change is at least 1.2 x their peers' median (in theirs a probe follows).
    Stand-in for the Bayesian ensemble of their artefact: the posterior of one change of the mean
    of Gaussian values since the last accepted change, by BIC weights, even prior odds. window, the
    most points looked at, is ours: slow points are deleted until they are a tenth of it.
    """

    name: str = "greyhound"
    floor: float = 0.10
    spacing: int = 10
    window: int = 100
    probability: float = 0.8
    localise_ratio: float = 1.2
    delete_z: float = 3.0

    def _judge(self, run: Run) -> Flags:
        return self.judge_where(run, np.ones(len(run.step_s), dtype=np.bool_))

    def judge_where(self, run: Run, is_followed: Flags) -> Flags:
        """Flags; is_followed [steps] False: a change seen there is not believed (see ResiHp)."""
        flags = np.zeros(run.times_s.shape, dtype=np.bool_)
        for step, slow in enumerate(self.slow_steps(run.step_s, is_followed)):
            if slow:
                flags[step] = self.localised(run, np.array(slow))
        return flags

    def localised(self, run: Run, steps: Positions) -> Flags:
        """Ranks that are slow against their peers over the steps. Alone in a group: not told."""
        means = run.times_s[steps].mean(axis=0, keepdims=True)
        slow: Flags = means[0] >= self.localise_ratio * run.peer_median(means)[0]
        return slow

    def slow_steps(self, step_s: Array, is_followed: Flags) -> list[list[int]]:
        """For each step, as known then: the steps since the job became slow. Empty: it is not.

        The series begins anew at an accepted change; it keeps no step that was not followed.
        """
        found: list[list[int]] = []
        series: list[int] = []
        is_slow, healthy_s = False, 0.0
        for step in range(len(step_s)):
            series = [*series[1 - self.window :], step]
            change = self._change(step_s[series])
            if change is not None:
                at, before_s, after_s = change
                base_s = healthy_s if is_slow else before_s
                will_be_slow = after_s > (1.0 + self.floor) * base_s
            else:
                at, base_s, will_be_slow = 0, healthy_s, is_slow
            if will_be_slow and not is_followed[step]:
                series.pop()
                found.append([])
                continue
            series, is_slow, healthy_s = series[at:], will_be_slow, base_s
            found.append(list(series) if is_slow else [])
        return found

    def _change(self, values: Array) -> tuple[int, float, float] | None:
        """Where a change is accepted, and the means before and after; None without one."""
        if len(values) <= 2 * self.spacing:
            return None
        deviation = values - values.mean()
        kept = np.flatnonzero(np.abs(deviation) <= self.delete_z * values.std())
        x = values[kept]
        at = self._split(x)
        if at is None or not self.spacing < at < len(x) - self.spacing:
            return None
        if self._split(x[at:]) is not None:
            return None  # it has already changed again: the changes are too close
        return int(kept[at]), float(x[:at].mean()), float(x[at:].mean())

    def _split(self, x: Array) -> int | None:
        """How many points come before the likeliest change, if it is probable and large."""
        n = len(x)
        if n < 3:
            return None
        size = np.arange(1, n)
        sums = np.cumsum(x)
        before, after = sums[:-1] / size, (sums[-1] - sums[:-1]) / (n - size)
        around = float(((x - x.mean()) ** 2).sum())
        tiny = 1e-12 * float((x**2).sum())
        rest = np.maximum(around - size * (n - size) / n * (after - before) ** 2, tiny)
        # BIC: -n/2 log RSS - log(n)/2 per mean; the place has an even prior over n - 1.
        log_odds = 0.5 * n * np.log(max(around, tiny) / rest) - 0.5 * np.log(n) - np.log(n - 1)
        odds = float(np.exp(np.minimum(log_odds, 600.0)).sum())
        at = int(log_odds.argmax())
        is_large = abs(after[at] / before[at] - 1.0) > self.floor
        return at + 1 if is_large and odds / (1.0 + odds) > self.probability else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResiHp(Rule):
    """ResiHP (arXiv 2605.06374, 2.2): GREYHOUND behind the question whether the work explains it.

    expected_s [steps]: the healthy step time predicted for the work of the step. A change point is
    followed only where observed > 1.25 x predicted; else the step is removed from the series.
    """

    name: str = "resihp"
    gate: float = 1.25
    detector: Greyhound = Greyhound()

    def _judge(self, run: Run) -> Flags:
        if run.expected_s is None:
            raise ValueError("resihp needs the predicted healthy time of each step")
        return self.detector.judge_where(run, run.step_s > self.gate * run.expected_s)


def two_parameter_expected(
    tokens: Array, sum_len_squared: Array, times_s: Array, *, num_warm_up: int
) -> Array:
    """ResiHP, eq. 1: alpha tokens + beta sum(length^2), no intercept, for [steps, ranks].

    Least squares over all ranks' first num_warm_up steps; the paper does not say how it fits.
    """
    work = np.stack([tokens, sum_len_squared], axis=-1)
    known, seen = work[:num_warm_up].reshape(-1, 2), times_s[:num_warm_up].ravel()
    scale = np.maximum(known.max(axis=0), 1.0)
    fit, *_ = np.linalg.lstsq(known / scale, seen, rcond=None)
    expected: Array = work @ (fit / scale)
    return expected


@dataclass(frozen=True, slots=True, kw_only=True)
class SniffTest(Rule):
    """Megatron-LM `gpu_sniff_test.py` (2026): |x - median| > max(MAD, 10 % of the median).

    Theirs stops training for a fixed GEMM on all ranks; here x is the throughput 1 / time of the
    step's own work, within the group. Both ways: it names fast ones too.
    """

    name: str = "sniff test"
    least_deviation: float = 0.10

    def _judge(self, run: Run) -> Flags:
        speeds = 1.0 / run.times_s
        median = run.peer_median(speeds)
        deviation = np.abs(speeds - median)
        allowed = np.maximum(run.peer_median(deviation), self.least_deviation * median)
        flags: Flags = deviation > allowed
        return flags


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoutTemporal(Rule):
    """LM Resiliency's SCOUT, the temporal rule (`detection/temporal.py`, 0.2.0).

    Slow: above both 1.25 x median and median + 4 x 1.4826 MAD of the rank's last 32 clean rounds,
    from 5 on. Named after 2 rounds in a row (our reading of 2 confirmations); a round in which
    somebody of the group is slow is not learnt. Theirs replays one input on all peers and also
    compares them; on a step's own work only the history can be used.
    """

    name: str = "scout temporal"
    window: int = 32
    least_samples: int = 5
    ratio: float = 1.25
    num_sigma: float = 4.0
    confirmations: int = 2

    def _judge(self, run: Run) -> Flags:
        flags = np.zeros(run.times_s.shape, dtype=np.bool_)
        for ranks in run.by_role:
            clean: list[Array] = []
            in_a_row = np.zeros(len(ranks), dtype=np.intp)
            for step, row in enumerate(run.times_s[:, ranks]):
                is_slow = self._is_slow(row, np.array(clean[-self.window :]))
                in_a_row = np.where(is_slow, in_a_row + 1, 0)
                flags[step, ranks] = in_a_row >= self.confirmations
                if not is_slow.any():
                    clean.append(row)
        return flags

    def _is_slow(self, row: Array, history: Array) -> Flags:
        if len(history) < self.least_samples:
            return np.zeros(len(row), dtype=np.bool_)
        centre = np.median(history, axis=0)
        spread = MAD_TO_SIGMA * np.median(np.abs(history - centre), axis=0)
        is_slow: Flags = row > np.maximum(self.ratio * centre, centre + self.num_sigma * spread)
        return is_slow


@dataclass(frozen=True, slots=True, kw_only=True)
class DlRover(Rule):
    """DLRover's node check (`rdzv_manager.py`): slow is what takes more than 2 x the median.

    Theirs runs before training, on equal tasks; here within the group, on the step's own work.
    """

    name: str = "dlrover"
    ratio: float = 2.0

    def _judge(self, run: Run) -> Flags:
        flags: Flags = run.times_s > self.ratio * run.peer_median(run.times_s)
        return flags


def _lower_median(window_s: Array) -> Array:
    """Per rank; of an even number the lower of the middle two, as torch has it."""
    ordered = np.sort(window_s, axis=0)
    lower: Array = ordered[(len(ordered) - 1) // 2]
    return lower
