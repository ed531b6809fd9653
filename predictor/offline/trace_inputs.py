"""Late input in a recorded job, from each rank's own waits for it, by the rules of live ones. Pure.

The steps go through the live detector in their order; how much steps took by it is then measured
over all steps that it was late in.
"""

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.predictor.offline.anomalies import Episode, episodes_of, steps_of, trouble_of
from pacekeeper.predictor.offline.trace import OwnInputTable, Trace
from pacekeeper.predictor.offline.verdict import Trouble, TroubleKind
from pacekeeper.predictor.online.input_stall import Inputs, fold_inputs
from pacekeeper.predictor.online.state import Judgement, sigma_of


def slow_inputs(trace: Trace, config: DetectorConfig | None = None) -> tuple[Trouble, ...]:
    """Ranks whose input was late, and when that of all was, in the order they were found.

    () where no rank tells how long it waited. Steps that a rank does not tell it of are passed
    over, as live.
    """
    table = trace.own_inputs
    if table is None:
        return ()
    config = config or DetectorConfig()
    inputs, told = _played(config, trace, table)
    episodes = episodes_of(told)
    if not episodes:
        return ()
    stage_of = {worker.rank: worker.stage for worker in trace.workers}
    sigma = sigma_of(config, inputs.evidence)
    for episode in episodes:
        _measure(episode, told)
    return tuple(trouble_of(one, TroubleKind.HOST, stage_of, sigma) for one in episodes)


def _played(
    config: DetectorConfig, trace: Trace, table: OwnInputTable
) -> tuple[Inputs, list[Judgement]]:
    inputs, told = Inputs(), list[Judgement]()
    for step, rows in steps_of(table):
        inputs, judgement = fold_inputs(
            config,
            inputs,
            step=step,
            generation=trace.generation_at(step),
            ranks=table.rank[rows].tolist(),
            duration_s=table.duration_s[rows],
            input_s=table.input_s[rows],
        )
        if judgement is not None:
            told.append(judgement)
    return inputs, told


def _measure(episode: Episode, told: list[Judgement]) -> None:
    """Log of what steps would take by the rank's wait, beside that of its median peer; of all ranks
    together beside what it was before.
    """
    rank, before = episode.finding.rank, [0.0]
    for judgement in told:
        waits = np.log(judgement.observed_s)
        if rank is None:
            level = float(np.median(waits))
            if judgement.step < episode.finding.onset_step:
                before.append(level)
                continue
            ratio = level - float(np.median(before[1:] or before))
        elif rank in judgement.ranks:
            at = judgement.ranks.index(rank)
            ratio = float(waits[at] - np.median(np.delete(waits, at))) if len(waits) > 1 else 0.0
        else:
            continue
        if episode.holds(judgement.step):
            episode.steps.append(judgement.step)
            episode.ratios.append(ratio)
