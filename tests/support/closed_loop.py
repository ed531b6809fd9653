"""The closed loop on a paper cluster, as simulated tests ask of it: settings, patience, home."""

from collections.abc import Callable

from pacekeeper.controller.mitigation.rollout import is_same_work
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.detector import DetectorConfig
from support.paper_cluster import PaperCluster

CONFIG = ControllerConfig(detector=DetectorConfig(warmup_steps=8))
WARM_STEPS, PATIENCE_STEPS = 26, 150


def until(cluster: PaperCluster, holds: Callable[[], bool]) -> None:
    """Train until it holds; the limit is for what never comes."""
    for _ in range(PATIENCE_STEPS):
        if holds():
            return
        cluster.run(1)
    raise AssertionError(f"seed {cluster.seed}: not within {PATIENCE_STEPS} steps")


def is_baseline(cluster: PaperCluster) -> bool:
    """Does everybody hold and compute what the first layout gave it?"""
    here, first = cluster.layout, cluster.first_layout
    return is_same_work(here, first)
