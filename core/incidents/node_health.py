"""Fitness of a node, judged from the state of its devices alone, not from their speed.

Cluster managers that drain nodes (Slurm, Kubernetes) read it from a file that the agent writes. It
must hold without other ranks and without a controller, so only states count that identify a device
and last until it is repaired.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from pacekeeper.core.telemetry.samples import DeviceSample
from pacekeeper.core.text import format_s

FILE_NAME = ".verdict.json"  # in the ring directory; no job has a name like this
STALE_S = 30.0
REPEAT_S = 5.0  # an agent says the same again as often, another verdict at once
MAX_LINE = 80  # characters: node-problem-detector cuts what is longer
CONDITION = "PacekeeperUnfit"  # of a Kubernetes node
LAST_UNIX_S = 253402300799.0  # the end of the year 9999: no calendar goes on
_TIMES = ("since_unix_s", "written_unix_s")


class Fitness(StrEnum):
    """Whether a node may get work; UNKNOWN: no recent report, or no device answers."""

    FIT = "fit"
    UNFIT = "unfit"
    UNKNOWN = "unknown"  # nobody looked lately, or no device answers


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """The fitness of a node at one time.

    `reason` is one word for programs, `words` a text for people; `since_unix_s`: start of this
    state.
    """

    node: str
    fitness: Fitness
    reason: str
    words: str
    since_unix_s: float
    written_unix_s: float

    @property
    def line(self) -> str:
        """One line of at most MAX_LINE characters."""
        text = f"{self.fitness}: {self.words}"
        return text if len(text) <= MAX_LINE else f"{text[: MAX_LINE - 3]}..."


def assess_node(
    before: NodeHealth | None,
    devices: Sequence[DeviceSample],
    *,
    nvml: str,
    node: str,
    now_unix_s: float,
) -> NodeHealth:
    """The health of a node now.

    Args:
        before: the previous health, for the start of an unchanged state.
        devices: the newest sample of each device.
        nvml: "ok", or the reason why devices are missing.
        node: the name of the node.
        now_unix_s: the current time.
    """
    fitness, reason, words = _judged(devices, nvml)
    is_same = before is not None and (before.fitness, before.reason) == (fitness, reason)
    return NodeHealth(
        node=node,
        fitness=fitness,
        reason=reason,
        words=words,
        since_unix_s=before.since_unix_s if before is not None and is_same else now_unix_s,
        written_unix_s=now_unix_s,
    )


def must_write(before: NodeHealth | None, verdict: NodeHealth) -> bool:
    """Whether `verdict` must be written: it differs from `before`, or that one is old.

    A negative age means that the clock was set back, so the old time is invalid.
    """
    if before is None or (before.fitness, before.words) != (verdict.fitness, verdict.words):
        return True
    age_s = verdict.written_unix_s - before.written_unix_s
    return not 0.0 <= age_s < REPEAT_S


def _judged(devices: Sequence[DeviceSample], nvml: str) -> tuple[Fitness, str, str]:
    faults = (
        ("DeviceLost", "lost", [d for d in devices if d.is_lost]),
        ("RecoveryNeeded", "to be reset (driver recovery action)", _of_health(devices, _asks)),
        ("RowRemapFailed", "out of spare memory rows", _of_health(devices, _failed)),
    )
    for reason, what, found in faults:
        if found:
            return Fitness.UNFIT, reason, f"{_names(found)} {what}"
    if nvml != "ok" and devices:
        return Fitness.UNFIT, "DeviceLost", nvml
    if not devices:
        return Fitness.UNKNOWN, "NoDeviceAnswers", f"no device answers: {nvml}"
    pending = _of_health(devices, _waits)
    if pending:
        return Fitness.FIT, "RowRemapPending", f"{_names(pending)} to be reset when convenient"
    return Fitness.FIT, "DevicesFit", f"{len(devices)} devices answer"


def _asks(device: DeviceSample) -> bool:
    return device.health is not None and bool(device.health.recovery_action)


def _failed(device: DeviceSample) -> bool:
    return device.health is not None and bool(device.health.has_remap_failed)


def _waits(device: DeviceSample) -> bool:
    return device.health is not None and bool(device.health.is_remap_pending)


def _of_health(devices: Sequence[DeviceSample], has: Any) -> list[DeviceSample]:
    return [device for device in devices if has(device)]


def _names(devices: Iterable[DeviceSample]) -> str:
    """ "device 0 is" or "devices 0, 1 are"; MIG instances count as their device."""
    numbers = sorted({device.device_index for device in devices})
    listed = ", ".join(map(str, numbers))
    return f"device {listed} is" if len(numbers) == 1 else f"devices {listed} are"


def encode_node_health(verdict: NodeHealth) -> bytes:
    """The JSON form, one object on one line."""
    return json.dumps(asdict(verdict)).encode() + b"\n"


def decode_node_health(data: bytes) -> NodeHealth:
    """Parse the JSON form.

    Raises:
        ValueError: the data is not the health of a node.
    """
    try:
        fields = json.loads(data)
    except RecursionError:
        raise ValueError("no node health: nested too deep") from None
    if not isinstance(fields, dict) or set(fields) != set(NodeHealth.__slots__):
        raise ValueError(f"no node health: expected the fields {', '.join(NodeHealth.__slots__)}")
    for name, value in fields.items():
        if not (_is_time(value) if name in _TIMES else isinstance(value, str)):
            raise ValueError(f"no node health: impossible {name} {value!r:.40}")
    return NodeHealth(**fields | {"fitness": Fitness(fields["fitness"])})


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and 0.0 <= value <= LAST_UNIX_S


def unknown_health(why: str, *, node: str, now_unix_s: float) -> NodeHealth:
    """The health of a node without a usable report; `why` is the reason."""
    return NodeHealth(
        node=node,
        fitness=Fitness.UNKNOWN,
        reason="NothingKnown",
        words=why,
        since_unix_s=now_unix_s,
        written_unix_s=now_unix_s,
    )


def current_health(verdict: NodeHealth, *, now_unix_s: float) -> NodeHealth:
    """`verdict`, or unknown health if it is too old. A clock may be set back by STALE_S."""
    age_s = now_unix_s - verdict.written_unix_s
    if -STALE_S <= age_s <= STALE_S:
        return verdict
    why = f"the agent has not reported for {format_s(age_s)}"
    if age_s < 0.0:
        why = f"the last report is {format_s(-age_s)} in the future: the clock was set back"
    return unknown_health(why, node=verdict.node, now_unix_s=now_unix_s)
