"""Why a rank is slow: what each rule sees, how sure it is, what it does not take for a cause."""

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.causes.evidence import CauseKind, Symptoms
from pacekeeper.predictor.causes.explain import (
    MOST_TOLD,
    RULES,
    examined_signals,
    explain,
    in_words,
    is_explained,
)
from support.device_cases import DEVICES, Expected
from support.symptoms import ALONE, DEVICE, HEALTHY, RANK_PID, device, host, thread

CONFIRMED, PROBABLE, SUSPECTED = Tier.CONFIRMED, Tier.PROBABLE, Tier.SUSPECTED
K = CauseKind


def found(symptoms: Symptoms) -> list[tuple[CauseKind, Tier]]:
    return [(cause.kind, cause.sure) for cause in explain(symptoms)]


@pytest.mark.parametrize(
    ("changed", "expected"), [d[1:] for d in DEVICES], ids=[d[0] for d in DEVICES]
)
def test_what_a_device_shows_beside_healthy_peers(
    changed: dict[str, Any], expected: Expected
) -> None:
    causes = explain(replace(HEALTHY, device=device(**changed)))
    if not expected:
        assert not is_explained(causes)
        return
    assert [(c.kind, c.sure) for c in causes] == [(kind, sure) for kind, sure, _, _ in expected]
    for cause, (_, _, _, words) in zip(causes, expected, strict=True):
        assert all(part in cause.words for part in words.split(" (")), cause.words


@pytest.mark.parametrize(
    ("changed", "expected"), [d[1:] for d in DEVICES], ids=[d[0] for d in DEVICES]
)
def test_without_peers_it_is_less_sure_or_silent(
    changed: dict[str, Any], expected: Expected
) -> None:
    wanted = [(kind, alone) for kind, _, alone, _ in expected if alone is not None]
    assert found(replace(ALONE, device=device(**changed))) == (
        wanted or [(CauseKind.UNKNOWN, SUSPECTED)]
    )


@pytest.mark.parametrize("changed", [d[1] for d in DEVICES], ids=[d[0] for d in DEVICES])
def test_a_good_sample_later_clears_nobody(changed: dict[str, Any]) -> None:
    window = device(**changed)
    twice = replace(window, samples=(*window.samples, replace(DEVICE, sampled_s=102.0)))
    before = {kind for kind in found(replace(HEALTHY, device=window)) if kind[0] != K.UNKNOWN}
    assert before <= set(found(replace(HEALTHY, device=twice)))


@pytest.mark.parametrize("changed", [d[1] for d in DEVICES], ids=[d[0] for d in DEVICES])
def test_what_peers_show_as_well_is_no_cause(changed: dict[str, Any]) -> None:
    same = device(**changed)
    assert not is_explained(explain(replace(HEALTHY, device=same, peers=(same, same, device()))))


def test_one_peer_of_three_that_shows_it_too_refutes_nothing_and_is_named() -> None:
    hot = device(clock_event_reasons=0x40, sm_clock_mhz=1300.0)
    causes = explain(replace(HEALTHY, device=hot, peers=(hot, device(), device())))
    assert causes[0].sure is Tier.CONFIRMED and "(1 of 3 peers)" in causes[0].words


def test_devices_of_another_model_are_no_peers() -> None:
    other = device(name="A100", pcie_generation=4, sm_clock_mhz=1400.0)
    narrow = device(health={"pcie_width_max": None}, pcie_width=4)
    assert found(replace(HEALTHY, device=narrow, peers=(other,) * 3)) == [
        (CauseKind.UNKNOWN, SUSPECTED)
    ]


@pytest.mark.parametrize(
    ("changed", "expected"), [d[1:] for d in DEVICES], ids=[d[0] for d in DEVICES]
)
def test_what_devices_of_another_model_show_as_well_refutes_nothing(
    changed: dict[str, Any], expected: Expected
) -> None:
    others = (device(**(changed | {"name": "A100"})),) * 3
    wanted = [(kind, alone) for kind, _, alone, _ in expected if alone is not None]
    assert found(replace(ALONE, device=device(**changed), peers=others)) == (
        wanted or [(CauseKind.UNKNOWN, SUSPECTED)]
    )


def test_what_ended_before_the_onset_is_no_cause() -> None:
    window = device(ecc_uncorrected=5)
    hot, now = window.samples
    early = tuple(
        replace(hot, sampled_s=s, clock_event_reasons=0x40, ecc_uncorrected=e, sm_clock_mhz=900.0)
        for s, e in ((50.0, 0), (90.0, 5))
    )
    assert not is_explained(
        explain(replace(HEALTHY, device=replace(window, samples=(*early, now))))
    )


NETWORK = {"tcp_resent_ratio", "network_errors", "fabric_ports_up", "fabric_errors"}
HOSTS: list[tuple[str, dict[str, Any], Tier, str]] = [
    ("load above cores", {"load_1min": 96.0}, SUSPECTED, "load average 1.5 per core"),
    ("CPU pressure", {"cpu_some_ratio": 0.4}, SUSPECTED, "waited for a core 40% of the time"),
    ("I/O pressure", {"io_full_ratio": 0.3}, SUSPECTED, "waited for storage 30%"),
    ("memory pressure", {"memory_full_ratio": 0.2}, PROBABLE, "waited for memory 20%"),
    ("memory nearly full", {"memory_available_bytes": 20}, SUSPECTED, "2.0% of its node's memory"),
    ("resent segments", {"tcp_resent_ratio": 0.02}, SUSPECTED, "sent 2.0% of its TCP segments"),
    ("network errors", {"network_errors": 9}, SUSPECTED, "6 new errors on its node's interf"),
    ("fabric port down", {"fabric_ports_up": 7}, PROBABLE, "1 fabric ports of its node are"),
    ("fabric errors", {"fabric_errors": 3}, SUSPECTED, "1 new errors on its node's fabric"),
    ("swapping", {"swap_in_bytes_per_s": 5.0 * 2**20}, PROBABLE, "5.0 MiB/s back from swap"),
]


@pytest.mark.parametrize(
    ("changed", "sure", "words"), [h[1:] for h in HOSTS], ids=[h[0] for h in HOSTS]
)
def test_what_a_host_shows(changed: dict[str, Any], sure: Tier, words: str) -> None:
    sick = host(**changed)
    (cause,) = explain(replace(HEALTHY, host=sick))
    kind = CauseKind.NETWORK if set(changed) & NETWORK else CauseKind.HOST
    assert (cause.kind, cause.sure) == (kind, sure)
    assert words in cause.words and "none of 2 other nodes" in cause.words
    (alone,) = explain(replace(ALONE, host=sick))
    assert alone.sure is Tier.SUSPECTED and "no other node to compare with" in alone.words
    assert not is_explained(explain(replace(HEALTHY, host=sick, peer_hosts=(sick, host()))))


def test_healthy_neighbours_make_what_their_node_shows_doubtful() -> None:
    sick = replace(HEALTHY, host=host(memory_full_ratio=0.2), neighbours=3)
    (cause,) = explain(sick)
    assert cause.sure is Tier.SUSPECTED, "it was probable without them"
    assert "though 3 healthy ranks are on it too" in cause.words
    assert not is_explained(explain(replace(sick, peer_hosts=()))), "all who share it are healthy"


def test_what_the_kernel_counted_for_the_thread_itself() -> None:
    (taken,) = explain(replace(HEALTHY, thread=thread(run_queue_s=0.5)))
    assert (taken.kind, taken.sure) == (CauseKind.CORE_TAKEN, Tier.PROBABLE)
    assert "waited for a core 33% of its time, 1% of its peers' time" in taken.words
    frozen = thread(stall_s=0.6)
    (cause,) = explain(replace(HEALTHY, thread=frozen))
    assert (cause.kind, cause.sure) == (CauseKind.STALLED, Tier.CONFIRMED)
    assert "waiting for storage or another thread" in cause.words
    assert found(replace(ALONE, thread=frozen)) == [(CauseKind.STALLED, Tier.PROBABLE)]
    assert not is_explained(explain(replace(HEALTHY, thread=frozen, peer_threads=(frozen,))))


def test_a_stall_that_explains_little_of_the_slowdown_is_no_proof() -> None:
    short = replace(HEALTHY, thread=thread(stall_s=0.12))
    assert found(replace(short, slowdown=1.2)) == [(CauseKind.STALLED, CONFIRMED)]
    assert found(replace(short, slowdown=1.6)) == [(CauseKind.STALLED, PROBABLE)]
    assert found(replace(short, slowdown=None)) == [(CauseKind.STALLED, PROBABLE)]


def test_a_clock_that_counts_more_stall_than_compute_lost_all_of_the_time_and_no_more() -> None:
    odd = thread(compute_s=1e-100, run_queue_s=None)
    (cause,) = explain(replace(HEALTHY, thread=odd))
    assert "100% of its time, 1% of" in cause.words
    assert not is_explained(explain(replace(HEALTHY, thread=odd, peer_threads=(odd,))))


def test_the_surest_cause_comes_first_whatever_the_order_of_the_rules() -> None:
    hot = device(processes=(RANK_PID, 9), clock_event_reasons=0x10, temperature_celsius=90.0)
    sick = replace(HEALTHY, device=hot, thread=thread(stall_s=0.5))
    kinds = [CauseKind.STALLED, CauseKind.FOREIGN_PROCESS, CauseKind.CLOCKS, CauseKind.THERMAL]
    assert [kind for kind, _ in found(sick)] == kinds


def test_without_evidence_nothing_is_invented() -> None:
    (cause,) = explain(Symptoms())
    assert cause.kind is CauseKind.UNKNOWN
    assert cause.words == "nothing seen: no device samples, no host samples, no thread times"
    subjects = [rule(Symptoms()).subject for rule in RULES]
    assert cause.not_seen == tuple(dict.fromkeys(subjects))
    assert examined_signals((cause,)) == ((), ())
    stale = replace(device(), onset_s=500.0)
    assert "no device samples" in explain(Symptoms(device=stale))[0].words


def test_where_nothing_is_unusual_it_says_what_was_looked_at_and_what_nobody_told() -> None:
    (cause,) = explain(replace(HEALTHY, device=device(clock_event_reasons=None), thread=None))
    assert cause.words == "nothing seen: no thread times"
    assert {"loss", "Xids", "SM clock", "memory left"} <= set(cause.normal)
    assert cause.not_seen == ("clock events", "stall", "run-queue wait", "idling")
    assert examined_signals((cause,)) == (cause.normal, cause.not_seen)


def test_one_line_for_people_names_the_tier_and_what_was_not_told() -> None:
    hot = device(clock_event_reasons=0x40, sm_clock_mhz=None)
    line = in_words(explain(replace(HEALTHY, device=hot)))
    assert line == (
        "probable thermal: the device reports hardware thermal slowdown in 1 of 1 samples "
        "(none of 3 peers), not reported: SM clock"
    )
    many = device(clock_event_reasons=0x1F8, sm_clock_mhz=900.0)
    causes = explain(replace(HEALTHY, device=many))
    assert len(causes) == 7
    assert in_words(causes).endswith(f"; and {7 - MOST_TOLD} weaker signs")
