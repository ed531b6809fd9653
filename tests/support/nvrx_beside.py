"""NVIDIA Resiliency Extension's own detector beside ours: the same calls, the same clock, no GPU.

Of theirs only what needs CUDA is replaced: its profiler of kernels (there are none), `synchronize`
and the number of the device.
"""

import math
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from pacekeeper.trainer.adapters import nvrx

PLACES = ("nvidia_resiliency_ext.attribution.straggler", "nvidia_resiliency_ext.straggler")
SECTIONS = ("fwd", "bwd", "optimizer")


def place_of_theirs() -> str | None:
    """Where it is imported from, in its newer and older form; None where it is not installed."""
    for place in PLACES:
        try:
            if find_spec(place) is not None:
                return place
        except ModuleNotFoundError:
            continue
    return None


class NoKernels:
    """What the profiler's extension says of a run in which no kernel was launched."""

    def __init__(self, **_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return dict


class Time:
    """A clock that only we move."""

    def __init__(self) -> None:
        self.now_ns = 0

    def pass_ms(self, span_ms: float) -> None:
        self.now_ns += round(span_ms * 1e6)


@contextmanager
def both(time: Time, **options: Any) -> Iterator[tuple[Any, Any]]:
    """(theirs, ours), initialized with the same options."""
    place = place_of_theirs()
    assert place is not None
    extension: Any = ModuleType("nvrx_cupti_module")
    extension.CuptiProfiler = NoKernels
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, nvrx_cupti_module=extension))
        stack.enter_context(mock.patch("torch.cuda.synchronize"))
        stack.enter_context(mock.patch("torch.cuda.current_device", return_value="cpu"))
        stack.enter_context(mock.patch("time.perf_counter_ns", lambda: time.now_ns))
        stack.enter_context(mock.patch("time.monotonic", lambda: time.now_ns * 1e-9))
        theirs: Any = __import__(place, fromlist=["Detector"])
        for one in (theirs, nvrx):
            one.Detector.initialize(**options)
            stack.callback(one.Detector.shutdown)
        yield theirs.Detector, nvrx.Detector


def section(detectors: tuple[Any, Any], name: str, time: Time, span_ms: float) -> None:
    theirs, ours = detectors
    with theirs.detection_section(name), ours.detection_section(name):
        time.pass_ms(span_ms)


def unlike(theirs: Any, ours: Any) -> list[str]:
    """What two reports say differently: names of fields; nothing where both are none."""
    if theirs is None or ours is None:
        return [] if theirs is ours else ["one report is none"]
    found = [
        name
        for name in (
            "gpu_relative_perf_scores",
            "section_relative_perf_scores",
            "gpu_individual_perf_scores",
            "section_individual_perf_scores",
            "rank_to_node",
            "gather_on_rank0",
            "rank",
        )
        if not same(getattr(theirs, name), getattr(ours, name))
    ]
    for name, summary in theirs.local_section_summaries.items():
        own = ours.local_section_summaries[name]
        mine = {statistic.name: value for statistic, value in own.items()}
        if not same({statistic.name: value for statistic, value in summary.items()}, mine):
            found.append(f"summary of {name}")
    named = [_plain(report.identify_stragglers()) for report in (theirs, ours)]
    return found if named[0] == named[1] else [*found, f"named: {named}"]


def same(one: Any, other: Any) -> bool:
    """Theirs go through float32."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _plain(named: dict[str, Any]) -> dict[str, Any]:
    def ids(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: ids(part) for name, part in value.items()}
        return sorted((one.rank, one.node) for one in value)

    return {key: ids(value) for key, value in named.items()}


def train(directory: Path, rank: int, ranks: tuple[int, ...]) -> dict[str, Any]:
    """A rank of a run in the published pattern; the last one is slow, and alone in one section."""
    store = FileStore(str(directory / "store"), len(ranks))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(ranks))
    draw, time = random.Random(rank), Time()
    differences, named, reports = list[str](), list[Any](), 0
    for gathers in (True, False):
        with both(
            time, gather_on_rank0=gathers, report_time_interval=0.05, node_name=f"node-{rank}"
        ) as pair:
            for step in range(64):
                for name in SECTIONS:
                    slow = 2.0 if rank == ranks[-1] and step >= 32 else 1.0
                    section(pair, name, time, draw.uniform(1.0, 1.1) * slow)
                if rank == ranks[-1]:
                    section(pair, "alone", time, 3.0)
                found = [one.generate_report_if_interval_elapsed() for one in pair]
                if pair[0].is_interval_elapsed() != pair[1].is_interval_elapsed():
                    differences.append(f"step {step}: one is due")
                differences += [f"step {step}: {what}" for what in unlike(*found)]
                if found[1] is not None:
                    reports += 1
                    named.append(_plain(found[1].identify_stragglers()))
    dist.destroy_process_group()
    return {"differences": differences, "reports": reports, "named": named[-1:]}
