"""More evidence never makes a cause less sure; what all peers show is no cause of one slow rank."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.predictor.causes.evidence import DeviceWindow, HostWindow, Symptoms, ThreadTime
from pacekeeper.predictor.causes.explain import explain, is_explained
from support.symptoms import DEVICE, HEALTH, HEALTHY, HOST, ONSET_S, RANK_PID

HEIGHT = {Tier.SUSPECTED: 1, Tier.PROBABLE: 2, Tier.CONFIRMED: 3}
ratio = st.none() | st.floats(0.0, 1.0)


def maybe(*values: float) -> st.SearchStrategy[float | None]:
    return st.sampled_from([None, *values])


healths = st.builds(
    replace, st.just(HEALTH), nvlinks_up=st.none() | st.integers(15, 18),
    nvlink_errors=st.integers(0, 9), pcie_errors=st.integers(0, 9), num_xids=st.integers(0, 3),
    xids=st.sampled_from([None, (31,), (31, 79, 63)]),
    recovery_action=st.none() | st.integers(0, 2),
    is_remap_pending=st.none() | st.booleans(), has_remap_failed=st.none() | st.booleans(),
)  # fmt: skip
held = st.none() | st.floats(0.0, 20.0)
samples = st.builds(
    replace, st.just(DEVICE), health=st.none() | healths, is_lost=st.booleans(),
    hw_thermal_held_s=held, power_cap_held_s=held, answer_s=maybe(0.001, 2.0),
    memory_temperature_celsius=maybe(60.0, 99.0), margin_celsius=maybe(1.0, 30.0),
    sm_active_ratio=maybe(0.2, 0.8),
    sm_clock_mhz=maybe(900.0, 1500.0, 1900.0, 1980.0), temperature_celsius=maybe(50.0, 70.0, 95.0),
    power_watts=maybe(300.0, 650.0, 700.0), power_limit_watts=maybe(400.0, 700.0),
    utilisation_ratio=maybe(0.0, 0.6, 1.0), pcie_width=maybe(4, 16), pcie_generation=maybe(3, 5),
    clock_event_reasons=st.none() | st.integers(0, 0x7FF),
    pcie_replays=st.integers(0, 50), ecc_uncorrected=st.none() | st.integers(0, 2),
    processes=st.sampled_from([None, (), (RANK_PID,), (RANK_PID, 9), (9,)]),
)  # fmt: skip
host_samples = st.builds(
    replace, st.just(HOST), load_1min=maybe(1.0, 100.0), cpu_some_ratio=ratio, io_full_ratio=ratio,
    memory_full_ratio=ratio, memory_available_bytes=maybe(1, 900),
    swap_in_bytes_per_s=maybe(0.0, 1e9), network_errors=st.integers(0, 9),
    fabric_ports_up=maybe(7, 8), tcp_resent_ratio=maybe(0.0, 0.1),
)  # fmt: skip
threads = st.builds(ThreadTime, compute_s=st.floats(0.0, 9.0), run_queue_s=ratio, stall_s=ratio)


@st.composite
def windows(draw: st.DrawFn) -> DeviceWindow:
    drawn = draw(st.lists(samples, max_size=4))
    placed = tuple(replace(s, sampled_s=ONSET_S - 5.0 + 3.0 * i) for i, s in enumerate(drawn))
    return DeviceWindow(onset_s=ONSET_S, samples=placed, pids=frozenset({RANK_PID}))


hosts = st.builds(
    HostWindow, onset_s=st.just(ONSET_S), samples=st.lists(host_samples, max_size=3).map(tuple)
)
symptoms = st.builds(
    Symptoms, slowdown=st.none() | st.floats(1.1, 5.0), device=st.none() | windows(),
    peers=st.lists(windows(), max_size=3).map(tuple),
    host=st.none() | hosts, neighbours=st.integers(0, 2),
    peer_hosts=st.lists(hosts, max_size=2).map(tuple),
    thread=st.none() | threads, peer_threads=st.lists(threads, max_size=2).map(tuple),
)  # fmt: skip


def heights(found: Symptoms) -> dict[str, int]:
    """How sure the surest cause of each kind is."""
    known: dict[str, int] = {}
    for cause in explain(found):
        known[cause.kind] = max(known.get(cause.kind, 0), HEIGHT[cause.sure])
    known.pop("unknown", None)
    return known


def assert_no_less_sure(before: Symptoms, after: Symptoms) -> None:
    now = heights(after)
    for kind, height in heights(before).items():
        assert now.get(kind, 0) >= height, (kind, explain(before), explain(after))


@given(symptoms, samples)
def test_one_more_sample_of_its_device_makes_nothing_less_sure(
    found: Symptoms, more: DeviceSample
) -> None:
    window = found.device or DeviceWindow(onset_s=ONSET_S, pids=frozenset({RANK_PID}))
    later = replace(window, samples=(*window.samples, replace(more, sampled_s=ONSET_S + 60.0)))
    if window.samples:
        assert_no_less_sure(found, replace(found, device=later))


@given(symptoms, host_samples)
def test_one_more_sample_of_its_host_makes_nothing_less_sure(
    found: Symptoms, more: HostSample
) -> None:
    if found.host is not None:
        later = replace(found.host, samples=(*found.host.samples, more))
        assert_no_less_sure(found, replace(found, host=later))


@given(symptoms, samples)
def test_what_all_peers_show_as_well_is_no_cause(found: Symptoms, shown: DeviceSample) -> None:
    window = found.device or DeviceWindow(onset_s=ONSET_S, samples=(replace(shown, sampled_s=101),))
    host = found.host or HostWindow(onset_s=ONSET_S)
    thread = found.thread or ThreadTime(compute_s=1.0)
    shared = Symptoms(
        device=window, peers=(window,) * 2, host=host, peer_hosts=(host,), thread=thread,
        peer_threads=(thread,),
    )  # fmt: skip
    assert not is_explained(explain(shared)), explain(shared)


@given(symptoms)
def test_a_healthy_peer_more_makes_nothing_less_sure(found: Symptoms) -> None:
    """Healthy beyond doubt: it would not share any reading that accuses."""
    if found.device is None or not found.device.samples:
        return
    healthy = replace(
        HEALTHY.peers[0],
        samples=tuple(
            replace(s, sm_clock_mhz=3000.0, temperature_celsius=20.0, power_watts=100.0,
                    power_limit_watts=900.0)
            for s in HEALTHY.peers[0].samples
        ),
    )  # fmt: skip
    more = replace(
        found, peers=(*found.peers, healthy), peer_hosts=(*found.peer_hosts, *HEALTHY.peer_hosts)
    )
    assert_no_less_sure(found, more)


@given(symptoms)
def test_an_answer_is_never_empty_and_ordered_by_how_sure_it_is(found: Symptoms) -> None:
    causes = explain(found)
    order = [HEIGHT[cause.sure] for cause in causes]
    assert causes and order == sorted(order, reverse=True)
    assert all(cause.words for cause in causes)
