"""Detects slow links of a running job from transfer times and bytes per rank. Pure.

The detector of compute times is applied to transfers that all ranks entered together, so that no
waiting is in them. The expected time follows from the bytes; what all ranks share is the fabric.
Ranks with equal slowdowns locate the fault: two of them the link between them, all of a node its
uplink.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Finding, FindingKind
from pacekeeper.core.text import format_s
from pacekeeper.predictor.cost.features import FEATURES, Array, StepSample
from pacekeeper.predictor.detector.state import Evidence, Judgement
from pacekeeper.predictor.detector.update import update_evidence

MIN_STEPS = 4
MIN_SLOWDOWN = 1.2
WARMUP_STEPS = 12  # that show how transfers vary
SIGMA_FLOOR = 0.015
ALIKE = 1.15  # slowdowns of one cause differ by this factor at most
RECOVERED = 1.10  # of a transfer's usual time


def transfer_sample(
    step: int, generation: int, ranks: Sequence[int], transfer_s: Array, num_bytes: Array
) -> StepSample | None:
    """Make a step sample of transfers, with bytes in the place of tokens.

    Args:
        step, generation: of the sample.
        ranks: ranks that ended the step, ascending.
        transfer_s, num_bytes: seconds and bytes [ranks]; NaN or 0: not reported.

    Returns:
        None unless all ranks reported transfers.
    """
    with np.errstate(invalid="ignore"):
        is_told = (transfer_s > 0.0) & (num_bytes > 0.0)
    if not len(ranks) or not is_told.all():
        return None
    features = np.zeros((len(ranks), len(FEATURES)))
    features[:, FEATURES.index("one")] = 1.0
    features[:, FEATURES.index("tokens")] = num_bytes
    return StepSample(
        step=step,
        generation=generation,
        ranks=tuple(ranks),
        features=features,
        observed_s=transfer_s,
    )


def update_links(
    config: DetectorConfig, evidence: Evidence, sample: StepSample, node_of: Mapping[int, str]
) -> tuple[Evidence, Judgement]:
    """Process the transfers of one step; findings are of kind LINK and give a location.

    A slowdown of all ranks together is a finding that names no rank.

    Args:
        config: settings of the detector.
        evidence: detector state of the transfers.
        sample: the step (`transfer_sample`).
        node_of: the node of each of the sample's ranks.
    """
    config = replace(
        config,
        warmup_steps=max(WARMUP_STEPS, config.warmup_steps),
        sigma_floor=max(SIGMA_FLOOR, config.sigma_floor),
        recover_slowdown=max(RECOVERED, config.recover_slowdown),
        min_steps=max(MIN_STEPS, config.min_steps),
    )
    evidence, judgement = update_evidence(config, evidence, sample, least=MIN_SLOWDOWN)
    ratios = {rank: evidence.slow.get(rank, 1.0) for rank in sample.ranks}
    findings = tuple(
        _of_link(finding, sample, ratios, node_of)
        for finding in judgement.findings
        if finding.rank is not None
    )
    common = judgement.common
    if common.found is not None:
        common = replace(common, found=_of_all(common.found, sample))
    return evidence, replace(judgement, findings=findings, common=common)


def _of_all(finding: Finding, sample: StepSample) -> Finding:
    """Return the finding of all ranks together: a port or a node may slow all its partners."""
    moved_mb = float(np.median(sample.features[:, FEATURES.index("tokens")])) * 1e-6
    return replace(
        finding,
        kind=FindingKind.LINK,
        reason=(
            f"transfers of {len(sample.ranks)} ranks together took x{finding.slowdown:.2f} of what "
            f"their bytes should since step {finding.onset_step}, {moved_mb:.2f} MB each in "
            f"step {finding.step}: the fabric, a node or port that all exchange with, or all hosts"
        ),
    )


def _of_link(
    finding: Finding, sample: StepSample, ratios: Mapping[int, float], node_of: Mapping[int, str]
) -> Finding:
    rank = finding.rank
    assert rank is not None, "the charts are of ranks"
    at = sample.ranks.index(rank)
    moved_mb = sample.features[at, FEATURES.index("tokens")] * 1e-6
    return replace(
        finding,
        kind=FindingKind.LINK,
        reason=(
            f"transfers of rank {rank} took x{finding.slowdown:.2f} of what {moved_mb:.2f} MB "
            f"should since step {finding.onset_step}, {format_s(sample.observed_s[at])} in step "
            f"{finding.step}: {_where(rank, ratios, node_of)}"
        ),
    )


def _where(rank: int, ratios: Mapping[int, float], node_of: Mapping[int, str]) -> str:
    """Name the link that ranks as slow as this one share: of their node, or between two."""
    own, node = ratios[rank], node_of[rank]
    alike = [r for r, ratio in ratios.items() if own / ALIKE <= ratio <= own * ALIKE]
    mates = [r for r in ratios if node_of[r] == node]
    if len(mates) > 1 and set(mates) <= set(alike):
        return f"the link of node {node}, whose {len(mates)} ranks are slow alike"
    if len(alike) == 2:
        return f"the link between ranks {alike[0]} and {alike[1]}, or one of each"
    return f"its link, on node {node}"
