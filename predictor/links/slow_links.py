"""Detects slow links of a running job from transfer times and bytes per rank. Pure.

The detector of compute times is applied to transfers that all ranks entered together, so that no
waiting is in them. The expected time follows from the bytes; what all ranks share is the fabric.
Ranks with equal slowdowns locate the fault: two of them the link between them, all of a node its
uplink.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Finding, FindingKind
from pacekeeper.predictor.cost.features import FEATURES, Array, StepSample
from pacekeeper.predictor.detector.state import Evidence, Judgement
from pacekeeper.predictor.detector.update import update_evidence
from pacekeeper.predictor.recorded.collective_stragglers import MIN_SLOWDOWN, MIN_STEPS

WARMUP_STEPS = 12  # that show how transfers vary
SIGMA_FLOOR = 0.015
ALIKE = 1.15  # slowdowns of one cause differ by this factor at most
RECOVERED = 1.10  # of a transfer's usual time


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Location of one fault. `node` is empty unless all its ranks, two or more, share the fault."""

    kind: FindingKind
    ranks: tuple[int, ...]
    node: str
    slowdown: float
    reason: str


def localise(
    ratios: Mapping[int, float], node_of: Mapping[int, str], *, min_slowdown: float = 1.10
) -> tuple[Place, ...]:
    """Group slow ranks by cause, the worst first.

    If all ranks of a node are equally slow while other nodes have healthy ones, the host is named.
    If more than half of all ranks on two nodes or more are equally slow, a shared component is.
    Otherwise each rank is named by itself.

    Args:
        ratios: observed / expected of each rank, not relative to its peers.
        node_of: the node of each of these ranks.
        min_slowdown: ratio from which a rank is slow.

    Raises:
        ValueError: a rank has no node.
    """
    homeless = sorted(set(ratios) - set(node_of))
    if homeless:
        raise ValueError(f"ranks {homeless} have no node")
    slow = {rank: ratio for rank, ratio in ratios.items() if ratio >= min_slowdown}
    if not slow:
        return ()
    nodes: dict[str, list[int]] = {}
    for rank in sorted(ratios):
        nodes.setdefault(node_of[rank], []).append(rank)
    struck = {name for name, ranks in nodes.items() if any(rank in slow for rank in ranks)}
    if len(nodes) > 1 and len(struck) > 1 and 2 * len(slow) > len(ratios) and _are_alike(slow):
        return (_everybody(slow, len(ratios), len(struck)),)
    places = []
    for name in sorted(struck):
        own = {rank: slow[rank] for rank in nodes[name] if rank in slow}
        whole = len(own) == len(nodes[name]) > 1 and len(nodes) > 1
        places += [_host(name, own)] if whole and _are_alike(own) else _devices(name, own)
    return tuple(sorted(places, key=lambda place: (-place.slowdown, place.ranks)))


def _are_alike(slow: Mapping[int, float]) -> bool:
    return max(slow.values()) <= min(slow.values()) * ALIKE


def _typical(slow: Mapping[int, float]) -> float:
    return exp(median(log(ratio) for ratio in slow.values()))


def _everybody(slow: Mapping[int, float], num_ranks: int, num_nodes: int) -> Place:
    slowdown = _typical(slow)
    return Place(
        kind=FindingKind.HOST,
        ranks=tuple(sorted(slow)),
        node="",
        slowdown=slowdown,
        reason=f"{len(slow)} of {num_ranks} ranks on {num_nodes} nodes are x{slowdown:.2f} slow "
        "alike: something they share, not a device or a host",
    )


def _host(node: str, own: Mapping[int, float]) -> Place:
    slowdown = _typical(own)
    return Place(
        kind=FindingKind.HOST,
        ranks=tuple(sorted(own)),
        node=node,
        slowdown=slowdown,
        reason=f"all {len(own)} ranks of node {node} are x{slowdown:.2f} slow alike, other nodes "
        "have healthy ranks",
    )


def _devices(node: str, own: Mapping[int, float]) -> list[Place]:
    return [
        Place(
            kind=FindingKind.DEVICE,
            ranks=(rank,),
            node="",
            slowdown=slowdown,
            reason=f"rank {rank} on node {node} is x{slowdown:.2f} slow, unlike its neighbours",
        )
        for rank, slowdown in sorted(own.items())
    ]


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
            f"their bytes should since step {finding.onset_step}, {moved_mb:.2f} MB each in step "
            f"{finding.step}: the fabric, or a node or port that all of them exchange with"
        ),
    )


def _of_link(
    finding: Finding, sample: StepSample, ratios: Mapping[int, float], node_of: Mapping[int, str]
) -> Finding:
    rank = finding.rank
    assert rank is not None, "the charts are of ranks"
    at = sample.ranks.index(rank)
    moved_mb = sample.features[at, FEATURES.index("tokens")] * 1e-6
    alike = [
        other
        for other, ratio in ratios.items()
        if ratio > 1.0 and max(ratio, ratios[rank]) <= ALIKE * min(ratio, ratios[rank])
    ]
    (place,) = (
        place
        for place in localise(ratios, {r: node_of[r] for r in ratios}, min_slowdown=MIN_SLOWDOWN)
        if rank in place.ranks
    )
    where = "its link" if not place.node else f"the link of node {place.node}"
    if len(alike) == 2 and not place.node:
        where = f"the link between ranks {alike[0]} and {alike[1]}, or one of each"
    return replace(
        finding,
        kind=FindingKind.LINK,
        reason=(
            f"transfers of rank {rank} took x{finding.slowdown:.2f} of what {moved_mb:.2f} MB "
            f"should since step {finding.onset_step}, {sample.observed_s[at] * 1e3:.1f} ms in step "
            f"{finding.step}: {where}; {place.reason}"
        ),
    )
