"""Field values: base units, links added up, no guess where drivers mean different things."""

import pytest

from pacekeeper.agent.nvml import fields
from pacekeeper.agent.nvml.fields import (
    ALL_LINKS,
    ENTRY,
    decode,
    health_fields,
    keys,
    sample_fields,
)

UINT, WIDE = 1, 3
Answers = dict[tuple[int, int], tuple[int, int | float]]


def entry(field: int, scope: int, kind: int, code: int, raw: bytes) -> bytes:
    return ENTRY.pack(field, scope, 0, 0, kind, code, raw.ljust(8, b"\0"))


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        (0, b"\0\0\0\0\0\0\xf8\x3f", 1.5),
        (1, b"\xff\xff\xff\xff\xaa", 0xFFFFFFFF),
        (3, b"\xff" * 8, 2**64 - 1),
        (4, b"\xff" * 8, -1),
        (5, b"\xff\xff\xff\xff", -1),
        (6, b"\x02\x01\xff", 0x0102),
    ],
)
def test_each_type_of_value_is_read_as_it_is(kind: int, raw: bytes, value: float) -> None:
    answers, refused = decode(entry(82, 0, kind, 0, raw))
    assert (answers, refused) == ({(82, 0): (kind, value)}, frozenset())


def test_what_is_not_supported_is_refused_for_good_and_what_failed_is_not() -> None:
    data = b"".join(entry(field, 7, UINT, code, b"") for field, code in ((1, 3), (2, 2), (3, 999)))
    assert decode(data) == ({}, frozenset({(1, 7), (2, 7)}))
    assert decode(entry(1, 0, 99, 0, b"")) == ({}, frozenset()), (
        "a type from after this was written"
    )


def test_times_are_seconds_powers_watts_and_bytes_bytes() -> None:
    told = sample_fields(
        {
            (74, 0): (WIDE, 1_500_000_000),
            (186, 0): (UINT, 610_500),
            (82, 0): (UINT, 64),
            (197, 0): (WIDE, 5),
            (138, ALL_LINKS): (WIDE, 3),
        }
    )
    assert told == {
        "power_cap_held_s": 1.5,
        "power_now_watts": 610.5,
        "memory_temperature_celsius": 64,
        "pcie_sent_bytes": 5,
        "nvlink_sent_bytes": 3 * 1024,
    }


SLOWDOWN = {"sw_thermal_held_s": 1.0, "hw_thermal_held_s": 2.0, "power_brake_held_s": 3.0}
NEWER: Answers = {(269, 0): (WIDE, 10**9), (270, 0): (WIDE, 2 * 10**9), (271, 0): (WIDE, 3 * 10**9)}
OLDER: Answers = {(251, 0): (WIDE, 10**9), (252, 0): (WIDE, 2 * 10**9), (253, 0): (WIDE, 3 * 10**9)}
SMOOTHING: Answers = {(251, 0): (UINT, 1), (252, 0): (UINT, 2), (253, 0): (UINT, 0)}
SETTINGS: Answers = {(269, 0): (UINT, 1), (270, 0): (UINT, 50), (271, 0): (UINT, 9)}


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (NEWER, SLOWDOWN),
        (OLDER, SLOWDOWN),
        (NEWER | SMOOTHING, SLOWDOWN),
        (OLDER | SETTINGS, SLOWDOWN),
        (NEWER | OLDER, {}),
        (SMOOTHING, {}),
        ({(75, 0): (WIDE, 5 * 10**9)}, {"sw_thermal_held_s": 5.0}),
        (OLDER | {(75, 0): (WIDE, 5 * 10**9)}, SLOWDOWN),
    ],
)
def test_ids_that_changed_their_meaning_are_told_only_where_they_can_be_times(
    answers: Answers, told: dict[str, float]
) -> None:
    assert sample_fields(answers) == pytest.approx(told)


def test_health_is_added_up_over_links_and_kinds_of_errors() -> None:
    answers: Answers = {(165, link): (UINT, link != 2) for link in range(4)}
    answers |= {(164, link): (UINT, 26_562) for link in range(4)}
    answers |= {(161, link): (WIDE, link) for link in range(4)}
    answers |= {(208, 1): (WIDE, 7), (163, 1): (WIDE, 1)}
    answers |= {(174, 0): (WIDE, 2), (183, 0): (WIDE, 3), (179, 0): (WIDE, 1)}
    answers |= {(142, 0): (UINT, 4), (143, 0): (UINT, 5), (144, 0): (UINT, 1), (145, 0): (UINT, 0)}
    answers |= {(230, 0): (UINT, 2), (189, 0): (UINT, 700_000), (3, 0): (WIDE, 9)}
    assert health_fields(answers) == {
        "nvlinks": 4,
        "nvlinks_up": 3,
        "nvlink_bytes_per_s": 3 * 26_562e6,
        "nvlink_replays": 6,
        "nvlink_errors": 8,
        "pcie_errors": 5,
        "pcie_fatal_errors": 1,
        "rows_remapped": 9,
        "is_remap_pending": True,
        "has_remap_failed": False,
        "recovery_action": 2,
        "power_limit_default_watts": 700.0,
        "ecc_corrected": 9,
    }


def test_what_nobody_answered_is_not_told() -> None:
    assert (sample_fields({}), health_fields({})) == ({}, {})


def test_a_speed_that_one_link_does_not_tell_is_not_added_up() -> None:
    answers: Answers = {(165, 0): (UINT, 1), (165, 1): (UINT, 1), (164, 0): (UINT, 9)}
    assert "nvlink_bytes_per_s" not in health_fields(answers)


def test_links_are_asked_for_where_there_are_some() -> None:
    assert all(scope == 0 for _, scope in keys(0))
    assert {scope for _, scope in keys(2)} == {0, 1, ALL_LINKS}
    assert len(set(keys(18))) == len(keys(18))
    assert fields.ENTRY.size == 40


def test_what_no_device_can_mean_is_left_out_of_what_is_told() -> None:
    """A driver's nonsense must not be more than a report can hold: the agent would end of it."""
    bytes_sent, states, action = 202, 165, 230
    nonsense = {(3, 0): (4, -1), (6, 0): (0, float("nan")), (82, 0): (0, float("inf"))}
    large = {(bytes_sent, link): (3, (1 << 63) - 1) for link in range(4)}
    told = sample_fields(nonsense | large)
    assert not {"nvlink_sent_bytes", "memory_temperature_celsius"} & told.keys()
    health = health_fields(nonsense | {(states, 0): (1, 1), (action, 0): (3, 1 << 32)})
    assert health.keys() == {"nvlinks", "nvlinks_up"}
