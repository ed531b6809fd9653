"""NVML field values: the ids to query, and their decoding to base units. Pure.

Ids are numbers because older bindings lack the names of newer fields. Three ids are not stable:
the times of hardware slowdown have other ids in newer drivers, and their old ids became settings of
power smoothing. Times are 64 bits wide, settings are not. If both sets of ids answer with 64 bits,
the meaning is unknown and none is reported.
"""

import struct
from collections.abc import Iterable, Mapping
from typing import TypeVar

Key = tuple[int, int]  # field id, scope: a link, or all links, or 0
Number = int | float
T = TypeVar("T", int | float, int | float | bool)

ALL_LINKS = 0xFFFFFFFF
# nvmlFieldValue_t: id, scope, time stamp, latency, type of the value, return code, value.
ENTRY = struct.Struct("@IIqqII8s")
# nvmlValueType_t -> how its eight bytes are read.
_TYPES = {
    0: struct.Struct("@d"),
    1: struct.Struct("@I4x"),
    2: struct.Struct("@L"),
    3: struct.Struct("@Q"),
    4: struct.Struct("@q"),
    5: struct.Struct("@i4x"),
    6: struct.Struct("@H6x"),
}
_WIDE = (2, 3)  # 64 bits, not negative
_MAX_VALUE = 1 << 63  # larger counts and sizes are errors of the driver
_SUCCESS, _NOT_SUPPORTED, _INVALID_ARGUMENT = 0, 3, 2

# Times in nanoseconds.
_THROTTLED = {
    "power_cap_held_s": 74,
    "sync_boost_held_s": 76,
    "board_limit_held_s": 77,
    "reliability_held_s": 79,
}
_SW_THERMAL = 75
_SLOWDOWNS = ("sw_thermal_held_s", "hw_thermal_held_s", "power_brake_held_s")
_SLOWDOWN_IDS = ((269, 270, 271), (251, 252, 253))  # newer drivers, older ones

# Of a sample: name -> (id, scope, factor to base units).
_SAMPLE: Mapping[str, tuple[int, int, float]] = {
    "memory_temperature_celsius": (82, 0, 1.0),
    "power_now_watts": (186, 0, 1e-3),
}
_SAMPLE_COUNTS: Mapping[str, tuple[int, int, int]] = {
    "pcie_sent_bytes": (197, 0, 1),
    "pcie_received_bytes": (198, 0, 1),
    "nvlink_sent_bytes": (138, ALL_LINKS, 1024),
    "nvlink_received_bytes": (139, ALL_LINKS, 1024),
}
# Of a device's health: name -> ids, added up.
_HEALTH: Mapping[str, tuple[int, ...]] = {
    "ecc_corrected": (3,),
    "ecc_uncorrected_ever": (6,),
    "rows_remapped": (142, 143),
    "is_remap_pending": (144,),
    "has_remap_failed": (145,),
    "pcie_recoveries": (169,),
    # Receiver errors, bad packets of both layers, NAKs both ways, link CRC, lanes.
    "pcie_errors": (174, 175, 176, 177, 178, 182, 183),
    "pcie_fatal_errors": (179, 180),
    "recovery_action": (230,),
}
_SMALL = ("recovery_action", "nvlinks", "nvlinks_up")  # 32-bit fields of a report
_MAX_SMALL = 1 << 32
_FLAGS = ("is_remap_pending", "has_remap_failed")
_POWER_LIMITS = {"power_limit_default_watts": 189, "power_limit_max_watts": 188}
# Of each link. Up to Hopper, and from Blackwell on, errors have different ids.
_STATE, _SPEED = 165, 164
_LINK_COUNTS: Mapping[str, tuple[int, ...]] = {
    "nvlink_replays": (161,),
    "nvlink_recoveries": (162, 215),
    # CRC; malformed, overrun, damaged, remotely damaged, link integrity, discarded.
    "nvlink_errors": (163, 206, 207, 208, 209, 211, 212),
}
_LINK_BYTES = {"nvlink_sent_bytes": 202, "nvlink_received_bytes": 204}


def keys(num_links: int) -> tuple[Key, ...]:
    """All keys to query of a device with this number of NVLinks."""
    whole = [*_THROTTLED.values(), _SW_THERMAL, *(i for ids in _SLOWDOWN_IDS for i in ids)]
    whole += [i for ids in _HEALTH.values() for i in ids]
    whole += _POWER_LIMITS.values()
    found = [(field, 0) for field in whole]
    found += [(field, scope) for field, scope, _ in _SAMPLE.values()]
    found += [
        (field, scope)
        for field, scope, _ in _SAMPLE_COUNTS.values()
        if num_links or scope != ALL_LINKS
    ]
    per_link = [_STATE, _SPEED, *(i for ids in _LINK_COUNTS.values() for i in ids)]
    per_link += _LINK_BYTES.values()
    found += [(field, link) for link in range(num_links) for field in per_link]
    return tuple(found)


def decode(data: bytes | memoryview) -> tuple[dict[Key, tuple[int, Number]], frozenset[Key]]:
    """Decode an array of nvmlFieldValue_t.

    Returns:
        (type, value) by key for the answered fields, and the keys that the device does not support.
    """
    answers: dict[Key, tuple[int, Number]] = {}
    refused = []
    for field, scope, _, _, kind, code, raw in ENTRY.iter_unpack(data):
        if code == _SUCCESS and kind in _TYPES:
            answers[field, scope] = kind, _TYPES[kind].unpack(raw)[0]
        elif code in (_NOT_SUPPORTED, _INVALID_ARGUMENT):
            refused.append((field, scope))
    return answers, frozenset(refused)


def sample_fields(answers: Mapping[Key, tuple[int, Number]]) -> dict[str, Number]:
    """Fields of a DeviceSample by name; unanswered ones are left out."""
    answers = _valid_answers(answers)
    found: dict[str, Number] = {}
    for name, field in _THROTTLED.items():
        if (value := _wide(answers, field)) is not None:
            found[name] = value * 1e-9
    found |= _slowdowns(answers)
    for name, (field, scope, factor) in _SAMPLE.items():
        if (field, scope) in answers:
            found[name] = answers[field, scope][1] * factor
    for name, field in _LINK_BYTES.items():
        if per_link := _link_values(answers, (field,)):
            found[name] = int(sum(per_link))
    for name, (field, scope, unit) in _SAMPLE_COUNTS.items():
        if (field, scope) in answers:
            found[name] = int(answers[field, scope][1]) * unit
    return _storable(found)


def health_fields(answers: Mapping[Key, tuple[int, Number]]) -> dict[str, Number | bool]:
    """Fields of a DeviceHealth by name; unanswered ones are left out."""
    answers = _valid_answers(answers)
    found: dict[str, Number | bool] = {}
    for name, ids in _HEALTH.items():
        values = [answers[field, 0][1] for field in ids if (field, 0) in answers]
        if values:
            found[name] = bool(values[0]) if name in _FLAGS else int(sum(values))
    for name, field in _POWER_LIMITS.items():
        if (field, 0) in answers:
            found[name] = answers[field, 0][1] * 1e-3
    states = {scope: value for (field, scope), (_, value) in answers.items() if field == _STATE}
    if states:
        up = [link for link, state in states.items() if state]
        found["nvlinks"], found["nvlinks_up"] = len(states), len(up)
        speeds = [answers[_SPEED, link][1] for link in up if (_SPEED, link) in answers]
        if len(speeds) == len(up):
            found["nvlink_bytes_per_s"] = sum(speeds) * 1e6
    for name, ids in _LINK_COUNTS.items():
        if counts := _link_values(answers, ids):
            found[name] = int(sum(counts))
    return _storable(found)


def _valid_answers(answers: Mapping[Key, tuple[int, Number]]) -> dict[Key, tuple[int, Number]]:
    """The answers without negative, infinite, NaN and oversized values."""
    return {key: one for key, one in answers.items() if 0 <= one[1] < _MAX_VALUE}


def _storable(found: Mapping[str, T]) -> dict[str, T]:
    """The fields without values that exceed their type in a report."""
    return {
        name: v for name, v in found.items() if v < (_MAX_SMALL if name in _SMALL else _MAX_VALUE)
    }


def _slowdowns(answers: Mapping[Key, tuple[int, Number]]) -> dict[str, Number]:
    """Seconds of hardware slowdown, from the one set of ids that has 64-bit values."""
    sets = [ids for ids in _SLOWDOWN_IDS if any(_wide(answers, i) is not None for i in ids)]
    found: dict[str, Number] = {}
    if len(sets) == 1:
        for name, field in zip(_SLOWDOWNS, sets[0], strict=True):
            if (value := _wide(answers, field)) is not None:
                found[name] = value * 1e-9
    older = _wide(answers, _SW_THERMAL)
    if older is not None:
        found.setdefault("sw_thermal_held_s", older * 1e-9)
    return found


def _wide(answers: Mapping[Key, tuple[int, Number]], field: int) -> Number | None:
    kind, value = answers.get((field, 0), (None, 0))
    return value if kind in _WIDE else None


def _link_values(answers: Mapping[Key, tuple[int, Number]], fields: Iterable[int]) -> list[Number]:
    wanted = frozenset(fields)
    return [
        value
        for (field, scope), (_, value) in answers.items()
        if field in wanted and scope != ALL_LINKS
    ]
