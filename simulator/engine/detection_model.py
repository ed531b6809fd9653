"""How soon the real detector sees that nodes became slow, or well again, and how slow it says.

Steps of the simulated job as the agent would report them, with the jitter of a device's clock, are
folded into the detector's evidence until it is up to date. Between such changes nothing is folded:
what it would say falsely of a healthy job is not simulated (`benchmarks/false_alarms.py` is).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.expert_row_features import KNOTS
from pacekeeper.predictor.cost.features import FEATURES, StepSample
from pacekeeper.predictor.detector.state import restore
from pacekeeper.predictor.detector.update import update_evidence
from pacekeeper.simulator.jobs.data_parallel import Dispatch, JobModel
from pacekeeper.simulator.jobs.document_lengths import Lengths

MOST_STEPS = 200  # watched after a change: what is not seen by then, is not
WARM_STEPS = 12  # that the job has run healthily before a change
WANTED_SLOWDOWN = 1.05  # from which on a slow rank is waited for
JITTER = 0.02  # of a step; Perseus' healthy repeats differ by 0.2-0.4 %

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """After so many steps the detector holds these ranks for slow: rank -> slowdown."""

    steps: int
    slow: Mapping[int, float]


def simulate_detection(
    job: JobModel,
    layout: Layout,
    parts: Array,
    dispatch: Dispatch,
    *,
    known: Mapping[int, float],
    speed: Mapping[int, float],
    config: DetectorConfig,
    seed: int,
    lengths: Lengths | None = None,
) -> Detection:
    """When the detector that takes `known` for slow (rank -> slowdown) knows of `speed`.

    It has warmed up on steps like those before the change. Where it never gets there: what it holds
    after MOST_STEPS. `lengths`: of the documents that ranks train; None: all cost the same.
    """
    draw = np.random.default_rng(seed)
    features, dense_s, experts_s = _work(job, layout, parts, dispatch)
    before = np.array([known.get(rank, 1.0) for rank in layout.ranks])
    after = np.array([1.0 / speed.get(rank, 1.0) for rank in layout.ranks])
    wanted = {
        rank
        for rank, slowdown in zip(layout.ranks, after.tolist(), strict=True)
        if slowdown >= WANTED_SLOWDOWN
    }
    evidence = restore(known)
    dearer: Array | float = 1.0
    num_warm = config.skip_steps + max(WARM_STEPS, config.warmup_steps)
    most = num_warm + MOST_STEPS
    for step in range(most):
        slowdown = before if step < num_warm else after
        if lengths is not None:
            features, dearer = _documents(job, features, lengths, draw)
        taken_s = dense_s * dearer + experts_s
        sample = StepSample(
            step=step,
            generation=layout.generation,
            ranks=layout.ranks,
            features=features,
            observed_s=taken_s * slowdown * np.exp(draw.normal(0.0, JITTER, len(slowdown))),
        )
        evidence, _ = update_evidence(config, evidence, sample)
        num_after = step - num_warm + 1
        # Of ranks that are known already it has to measure anew how slow they are.
        least = config.measure_steps if wanted == set(known) else 1
        if num_after >= least and set(evidence.slow) == wanted:
            return Detection(steps=num_after, slow=dict(evidence.slow))
    return Detection(steps=MOST_STEPS, slow=dict(evidence.slow))


def _documents(
    job: JobModel, features: Array, lengths: Lengths, draw: np.random.Generator
) -> tuple[Array, Array]:
    """(features, what dense work takes beside the mean [ranks]) of a step of drawn documents."""
    tokens = np.rint(features[:, FEATURES.index("tokens")]).astype(int).tolist()
    packed = lengths.packed(tokens, draw)
    features = features.copy()
    features[:, FEATURES.index("sum_len_squared")] = packed.sum_len_squared
    features[:, FEATURES.index("num_documents")] = packed.num_documents
    return features, lengths.price(packed, job.tokens_per_step(1))


def _work(
    job: JobModel, layout: Layout, parts: Array, dispatch: Dispatch
) -> tuple[Array, Array, Array]:
    """(features [ranks, FEATURES], healthy seconds of dense work and of experts' [ranks])."""
    num_ranks = len(layout.ranks)
    shares = job.shares(layout, parts, dispatch)
    rows = job.rows(parts, num_ranks)[:, :, None] * shares
    batch = dict(layout.batch_shares)
    tokens = np.array([batch[rank] for rank in layout.ranks]) * job.tokens_per_step(num_ranks)
    columns: dict[str, Array] = {
        "one": np.ones(num_ranks),
        "tokens": tokens,
        "expert_rows": rows.sum(axis=(0, 1)),
        "num_active_experts": (rows > 0.0).sum(axis=(0, 1)).astype(np.float64),
    }
    for knot in KNOTS:
        columns[f"rows_over_{knot}"] = np.maximum(rows - knot, 0.0).sum(axis=(0, 1))
    features = np.stack([columns.get(name, np.zeros(num_ranks)) for name in FEATURES], axis=1)
    per_token, per_row = job.unit_s
    return features, per_token * tokens, per_row * columns["expert_rows"]
