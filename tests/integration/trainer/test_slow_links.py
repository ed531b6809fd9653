"""Links that become slow under a running job: real processes, namespaces, token buckets.

What is slow is suspected from transfers, and located by a probe of pairs.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.link_places import LinkPlace, PlaceKind
from support.exact_jobs import exact_job
from support.fleet import Fleet
from support.networks import Network
from support.watched_fleets import WatchedFleet

pytest.importorskip("transformers")
pytestmark = pytest.mark.alone  # a busy host delays transfers of healthy links, too
CONFIG = ControllerConfig(detector=DetectorConfig(warmup_steps=8, canary_period_steps=0))
HEALTHY_STEPS = 24
RATE = 1.5e6  # bytes per second: far below what namespaces do between each other


def located(folder: Path, network: Network, slow_down: Callable[[], None]) -> WatchedFleet:
    """A job of a rank on each of four nodes, watched until a slow link is located."""
    config = exact_job(
        folder, steps=100_000, row_tokens=256, time_transfers=True, peer_timeout_s=60.0
    )
    fleet = Fleet(directory=folder, config=config, num_nodes=4, ranks_per_node=1, network=network)
    with fleet, WatchedFleet(fleet=fleet, config=CONFIG) as watched:

        def await_(is_so: Callable[[], bool]) -> None:
            def looked() -> bool:
                watched.poll()
                return is_so()

            fleet.await_(looked)

        await_(lambda: watched.step >= HEALTHY_STEPS and knows_health(watched))
        slow_down()
        # A busy host delays all transfers now and then: what is located then is measured again.
        await_(lambda: any(finding.places for finding in watched.findings))
    return watched


def knows_health(watched: WatchedFleet) -> bool:
    assert watched.job is not None
    return watched.job.detection.link_probes.history.covers(range(4))


def first_candidates(watched: WatchedFleet) -> tuple[LinkPlace, ...]:
    """The places that explain most of what a probe measured, and cannot be told apart."""
    return next(finding.places for finding in watched.findings if finding.places)


def test_a_port_behind_a_token_bucket_is_located(tmp_path: Path) -> None:
    with Network(4) as network:
        watched = located(tmp_path, network, lambda: network.limit(2, RATE))
    port = LinkPlace(kind=PlaceKind.PORT, ranks=(2,), nodes=("node-2",))
    assert port in first_candidates(watched), watched.logs


def test_a_pair_behind_a_slow_path_is_located(tmp_path: Path) -> None:
    with Network(4, proxied=(1,)) as network:
        peer = network.host(3)
        watched = located(tmp_path, network, lambda: network.shape(1, bytes_per_s=RATE, peer=peer))
    # The pair; where the host delays another transfer of one of its ranks, that rank's port.
    found = first_candidates(watched)
    assert all({1, 3}.intersection(place.ranks) for place in found), watched.logs
    assert {place.kind for place in found} <= {PlaceKind.PAIR, PlaceKind.PORT}, watched.logs
