"""Is a node fit for work, by what its agent alone can know? What its devices say, not how fast.

Who drains nodes (Slurm, Kubernetes) asks for it: it must hold without peers and without a
controller, so only states count that name a device and last until somebody mends it.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from pacekeeper.core.telemetry.samples import DeviceSample

FILE_NAME = ".verdict.json"  # in the ring directory; no job has a name like this
STALE_S = 30.0
REPEAT_S = 5.0  # an agent says the same again as often, another verdict at once
MAX_LINE = 80  # characters: node-problem-detector cuts what is longer
CONDITION = "PacekeeperUnfit"  # of a Kubernetes node
LAST_UNIX_S = 253402300799.0  # the end of the year 9999: no calendar goes on
_TIMES = ("since_unix_s", "written_unix_s")


class Fitness(StrEnum):
    FIT = "fit"
    UNFIT = "unfit"
    UNKNOWN = "unknown"  # nobody looked lately, or no device answers


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """`reason` is one word for programs, `words` for people; `since_unix_s`: it was another one."""

    node: str
    fitness: Fitness
    reason: str
    words: str
    since_unix_s: float
    written_unix_s: float

    @property
    def line(self) -> str:
        """One line for people, of at most MAX_LINE characters."""
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
    """The verdict of now. `nvml` is "ok", or says why devices are missing."""
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
    """Is it to be written? A clock that was set back makes the old one's time worthless."""
    if before is None or (before.fitness, before.words) != (verdict.fitness, verdict.words):
        return True
    age_s = verdict.written_unix_s - before.written_unix_s
    return not 0.0 <= age_s < REPEAT_S


def _judged(devices: Sequence[DeviceSample], nvml: str) -> tuple[Fitness, str, str]:
    faults = (
        ("DeviceLost", "lost", [d for d in devices if d.is_lost]),
        ("RecoveryNeeded", "to be reset by its driver's word", _of_health(devices, _asks)),
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
    """MIG instances are of one device."""
    numbers = sorted({device.device_index for device in devices})
    listed = ", ".join(map(str, numbers))
    return f"device {listed} is" if len(numbers) == 1 else f"devices {listed} are"


def encode_node_health(verdict: NodeHealth) -> bytes:
    """One JSON object."""
    return json.dumps(asdict(verdict)).encode() + b"\n"


def decode_node_health(data: bytes) -> NodeHealth:
    """The verdict in `data`. Raises ValueError where it is none."""
    try:
        told = json.loads(data)
    except RecursionError:
        raise ValueError("no verdict: nested too deep") from None
    if not isinstance(told, dict) or set(told) != set(NodeHealth.__slots__):
        raise ValueError(f"no verdict: expected the fields {', '.join(NodeHealth.__slots__)}")
    for name, value in told.items():
        if not (_is_time(value) if name in _TIMES else isinstance(value, str)):
            raise ValueError(f"no verdict: impossible {name} {value!r:.40}")
    return NodeHealth(**told | {"fitness": Fitness(told["fitness"])})


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and 0.0 <= value <= LAST_UNIX_S


def unknown_health(why: str, *, node: str, now_unix_s: float) -> NodeHealth:
    """Where there is no verdict, or none to be trusted."""
    return NodeHealth(
        node=node,
        fitness=Fitness.UNKNOWN,
        reason="NothingKnown",
        words=why,
        since_unix_s=now_unix_s,
        written_unix_s=now_unix_s,
    )


def current_health(verdict: NodeHealth, *, now_unix_s: float) -> NodeHealth:
    """The verdict, or that it is too old to say anything of now. A clock may be set back a bit."""
    age_s = now_unix_s - verdict.written_unix_s
    if -STALE_S <= age_s <= STALE_S:
        return verdict
    why = f"the agent has said nothing for {age_s:.0f} s"
    if age_s < 0.0:
        why = f"the agent's word is of {-age_s:.0f} s from now: the clock was set back"
    return unknown_health(why, node=verdict.node, now_unix_s=now_unix_s)
