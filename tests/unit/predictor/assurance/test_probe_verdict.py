"""A probe bears a finding out, or it does not: one table."""

import pytest

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.core.telemetry.records import ProbeRecord
from pacekeeper.predictor.assurance.probe_verdict import ProbeComparison, compare_probe, tier_of


def told(rank: int, *, gemm: float = 1.0, copy: float = 1.0, exchange: float = 1.0) -> ProbeRecord:
    return ProbeRecord(
        rank=rank, step=40, generation=1, number=7, gemm_s=2e-3 * gemm, copy_s=1e-3 * copy,
        exchange_s=1e-4 * exchange, duration_s=0.02,
    )  # fmt: skip


def reading(slowdown: float) -> ProbeComparison:
    return ProbeComparison(gemm=slowdown, copy=1.0, exchange=1.0, num_peers=3, step=40)


@pytest.mark.parametrize(
    ("found", "probed", "tier"),
    [
        (1.6, 1.6, Tier.CONFIRMED),
        (1.6, 1.27, Tier.CONFIRMED),  # just nearer to 1.6 than to 1
        (1.6, 1.26, Tier.SUSPECTED),
        (1.6, 1.0, Tier.SUSPECTED),
        (1.6, 0.5, Tier.SUSPECTED),
        (1.1, 1.05, Tier.CONFIRMED),
        (4.0, 1.9, Tier.SUSPECTED),
    ],
)
def test_a_finding_is_borne_out_where_the_probe_is_nearer_to_it_than_to_health(
    found: float, probed: float, tier: Tier
) -> None:
    assert tier_of(reading(probed), found) is tier


def test_a_slow_memory_is_a_slow_device_and_a_slow_message_is_not() -> None:
    records = {0: told(0), 1: told(1), 2: told(2, copy=3.0), 3: told(3, exchange=9.0)}
    memory, message = compare_probe(records, 2, ()), compare_probe(records, 3, ())
    assert memory is not None and message is not None
    assert memory.slowdown == pytest.approx(3.0)
    assert message.slowdown == pytest.approx(1.0)
    assert message.exchange == pytest.approx(9.0)
    assert "message x9.00 of the median of 3 peers" in str(message)


def test_ranks_that_are_accused_too_are_no_yardstick() -> None:
    records = {rank: told(rank, gemm=2.0 if rank in (1, 2) else 1.0) for rank in range(3)}
    found = compare_probe(records, 1, {1, 2})
    assert found is not None
    assert found.num_peers == 1
    assert found.slowdown == pytest.approx(2.0)


def test_without_its_own_record_or_a_peer_there_is_no_reading() -> None:
    assert compare_probe({0: told(0)}, 1, ()) is None
    assert compare_probe({1: told(1)}, 1, ()) is None
    assert compare_probe({1: told(1), 2: told(2)}, 1, {1, 2}) is None
