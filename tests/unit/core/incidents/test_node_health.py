"""Whether a node is fit for work: states that name a device and last, nothing that needs peers."""

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper.core.incidents.node_health import (
    MAX_LINE,
    REPEAT_S,
    STALE_S,
    Fitness,
    NodeHealth,
    assess_node,
    current_health,
    decode_node_health,
    encode_node_health,
    must_write,
)
from pacekeeper.core.telemetry.samples import DeviceSample
from support.symptoms import DEVICE, HEALTH

FIT, UNFIT, UNKNOWN = Fitness.FIT, Fitness.UNFIT, Fitness.UNKNOWN


def node_of(*changed: dict[str, Any]) -> tuple[DeviceSample, ...]:
    """One device for each change of a healthy one."""
    return tuple(
        replace(DEVICE, device_uuid=str(at), **({"device_index": at} | change))
        for at, change in enumerate(changed)
    )


def said(*devices: DeviceSample, nvml: str = "ok", before: NodeHealth | None = None) -> NodeHealth:
    return assess_node(before, devices, nvml=nvml, node="n", now_unix_s=100.0)


def health(**changed: Any) -> dict[str, Any]:
    return {"health": replace(HEALTH, **changed)}


CASES: list[tuple[tuple[dict[str, Any], ...], Fitness, str, str]] = [
    (({}, {}), FIT, "DevicesFit", "2 devices answer"),
    (({}, {"is_lost": True}), UNFIT, "DeviceLost", "device 1 is lost"),
    (({"is_lost": True},) * 3, UNFIT, "DeviceLost", "devices 0, 1, 2 are lost"),
    (({"is_lost": True, "device_index": 4},) * 2, UNFIT, "DeviceLost", "device 4 is lost"),
    (({}, health(recovery_action=2)), UNFIT, "RecoveryNeeded", "device 1 is to be reset (driver"),
    ((health(has_remap_failed=True),), UNFIT, "RowRemapFailed", "out of spare memory rows"),
    ((health(is_remap_pending=True), {}), FIT, "RowRemapPending", "device 0 is to be reset when"),
    (({"health": None}, {}), FIT, "DevicesFit", "2 devices answer"),
    (({"sm_clock_mhz": 300.0, "clock_event_reasons": 0x40},), FIT, "DevicesFit", "1 devices"),
    ((health(num_xids=9, xids=(13, 31)),), FIT, "DevicesFit", "1 devices"),
]


@pytest.mark.parametrize(("changed", "fitness", "reason", "words"), CASES)
def test_what_makes_a_node_unfit(
    changed: tuple[dict[str, Any], ...], fitness: Fitness, reason: str, words: str
) -> None:
    verdict = said(*node_of(*changed))
    assert (verdict.fitness, verdict.reason) == (fitness, reason)
    assert words in verdict.words


def test_where_no_device_answers_nobody_knows() -> None:
    verdict = said(nvml="NVML hangs: no answer for more than 10 s")
    assert (verdict.fitness, verdict.reason) == (UNKNOWN, "NoDeviceAnswers")
    assert "NVML hangs" in verdict.words


def test_a_device_that_never_answered_is_missed_all_the_same() -> None:
    verdict = said(*node_of({}), nvml="device 1 is lost")
    assert (verdict.fitness, verdict.words) == (UNFIT, "device 1 is lost")


def test_a_verdict_tells_since_when_it_holds() -> None:
    first = assess_node(None, node_of({}), nvml="ok", node="n", now_unix_s=10.0)
    second = assess_node(first, node_of({}, {}), nvml="ok", node="n", now_unix_s=20.0)
    lost = assess_node(second, node_of({"is_lost": True}), nvml="ok", node="n", now_unix_s=30.0)
    assert [v.since_unix_s for v in (first, second, lost)] == [10.0, 10.0, 30.0]
    assert lost.written_unix_s == 30.0


def test_a_verdict_comes_back_as_it_was() -> None:
    verdict = said(*node_of({"is_lost": True}))
    assert decode_node_health(encode_node_health(verdict)) == verdict


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b"\xff", b"[" * 60_000]
    + [encode_node_health(said()).replace(b'"unknown"', b'"dead"')]
    + [
        encode_node_health(said()).replace(b"100.0", value)
        for value in (b'"x"', b"NaN", b"Infinity", b"1" * 400, b"-1.0", b"1e12")
    ],
)
def test_what_is_no_verdict_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_node_health(data)


@pytest.mark.parametrize(
    ("age_s", "fitness"),
    [
        (0.0, FIT),
        (STALE_S, FIT),
        (-STALE_S, FIT),
        (STALE_S + 1, UNKNOWN),
        (-STALE_S - 1, UNKNOWN),
    ],
)
def test_an_old_verdict_says_nothing_of_now(age_s: float, fitness: Fitness) -> None:
    assert current_health(said(*node_of({})), now_unix_s=100.0 + age_s).fitness is fitness


def test_a_line_is_as_long_as_its_readers_take() -> None:
    verdict = said(*node_of(*({"is_lost": True},) * 60))
    assert len(verdict.line) == MAX_LINE and verdict.line.startswith("unfit: devices 0, 1")
    assert said(*node_of({})).line == "fit: 1 devices answer"


def test_the_same_verdict_is_said_again_only_now_and_then() -> None:
    fit = said(*node_of({}, {}))
    lost = said(*node_of({}, {"is_lost": True}), before=fit)
    assert must_write(None, fit)
    assert must_write(fit, lost)
    assert not must_write(fit, replace(fit, written_unix_s=100.0 + REPEAT_S / 2))
    assert must_write(fit, replace(fit, written_unix_s=100.0 + REPEAT_S))
    assert must_write(fit, replace(fit, written_unix_s=99.0)), "the clock was set back"
    assert REPEAT_S < STALE_S / 2, "who reads must not call a living agent silent"
