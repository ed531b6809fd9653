"""Slow links of a recorded job, from each rank's own transfers, by the rules of live ones. Pure.

The steps go through the live detector in their order. How slow a link was is then measured over
all steps that it was slow in, with what the detector knows at the end.
"""

from collections.abc import Iterator, Mapping, Sequence

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.predictor.cost.features import StepSample
from pacekeeper.predictor.cost.model import log_ratios
from pacekeeper.predictor.offline.anomalies import Episode, episodes_of, steps_of, trouble_of
from pacekeeper.predictor.offline.trace import OwnTransferTable, Trace
from pacekeeper.predictor.offline.verdict import Trouble, TroubleKind
from pacekeeper.predictor.online.links import fold_links, transfer_sample
from pacekeeper.predictor.online.state import Evidence, Judgement, begin, model_of, sigma_of


def slow_links(trace: Trace, config: DetectorConfig | None = None) -> tuple[Trouble, ...]:
    """Links of ranks that were slow, in the order they were found; () where no rank tells its
    transfers. Steps in which a rank does not tell them are passed over, as live.
    """
    config = config or DetectorConfig()
    table = trace.own_transfers
    if table is None:
        return ()
    node_of = {worker.rank: worker.node for worker in trace.workers}
    evidence, episodes = _played(config, trace, table, node_of)
    if not episodes:
        return ()
    _measure(evidence, _samples(trace, table), episodes)
    stage_of = {worker.rank: worker.stage for worker in trace.workers}
    sigma = sigma_of(config, evidence)
    return tuple(trouble_of(episode, TroubleKind.LINK, stage_of, sigma) for episode in episodes)


def _played(
    config: DetectorConfig, trace: Trace, table: OwnTransferTable, node_of: Mapping[int, str]
) -> tuple[Evidence, list[Episode]]:
    evidence, told = begin(), list[Judgement]()
    for sample in _samples(trace, table):
        evidence, judgement = fold_links(config, evidence, sample, node_of)
        told.append(judgement)
    return evidence, episodes_of(told)


def _samples(trace: Trace, table: OwnTransferTable) -> Iterator[StepSample]:
    """The steps in which all ranks that ended them tell their transfers, in order."""
    for step, rows in steps_of(table):
        sample = transfer_sample(
            step,
            trace.generation_at(step),
            table.rank[rows].tolist(),
            table.transfer_s[rows],
            table.num_bytes[rows],
        )
        if sample is not None:
            yield sample


def _measure(
    evidence: Evidence, samples: Iterator[StepSample], episodes: Sequence[Episode]
) -> None:
    """Put each rank's log ratios beside its healthy peers into its episodes."""
    model, charts = model_of(evidence), evidence.charts
    own_pace = dict(zip(charts.ranks, charts.baseline.tolist(), strict=True))
    for sample in samples:
        held = [episode for episode in episodes if episode.holds(sample.step)]
        if not held:
            continue
        slow = {episode.finding.rank for episode in held if episode.finding.rank is not None}
        ratios = log_ratios(model, sample, slow)
        for episode in held:
            rank = episode.finding.rank
            if rank in sample.ranks:
                ratio = float(ratios[sample.ranks.index(rank)]) - own_pace.get(rank, 0.0)
                episode.steps.append(sample.step)
                episode.ratios.append(ratio)
