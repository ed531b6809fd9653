"""The `Detector` of NVIDIA Resiliency Extension, answered by pacekeeper: change one import.

    from pacekeeper.trainer.adapters import nvrx as straggler

Sections are timed for reports of the same shape and formula (`nvrx_report`), and told to the ring
where a job is named: a step is what lies between two calls of
`generate_report_if_interval_elapsed`, or until a section's name comes again. See
docs/trainer-nvrx.md.
"""

import functools
import inspect
import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from pacekeeper.core.telemetry.samples import JOB_NAME_RULE, is_job_name
from pacekeeper.trainer.adapters import nvrx_report
from pacekeeper.trainer.adapters.nvrx_report import (
    RankTimes,
    Report,
    Statistic,
    StragglerId,
    Summary,
)
from pacekeeper.trainer.adapters.nvrx_steps import SectionSteps
from pacekeeper.trainer.adapters.reporter import Teller, attach
from pacekeeper.trainer.distributed.device import new_event

__all__ = ["CallableId", "Detector", "Report", "Statistic", "StragglerId"]
JOB_VARIABLE = "PACEKEEPER_JOB"
RELATIVE, INDIVIDUAL = "relative_perf_scores", "individual_perf_scores"
MAX_TIMES = 8192  # of a section between two reports
ESTIMATED_STEPS = 16  # after which the interval is known in steps
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallableId:
    """A function of a module, a class or an object, by its name there."""

    obj: object
    name: str
    arg_filter_fn: Callable[[inspect.BoundArguments], bool] | None = None
    extra_args_fn: Callable[[inspect.BoundArguments], dict[str, Any]] | None = None
    ignored_args: tuple[str, ...] | None = None

    def __str__(self) -> str:
        owner = self.obj
        if inspect.ismodule(owner):
            return f"{owner.__name__}.{self.name}"
        if inspect.isclass(owner):
            return f"{owner.__module__}.{owner.__name__}.{self.name}"
        return f"{type(owner).__name__}.{self.name}"


@dataclass(slots=True)
class _Section:
    entries: int = 0
    times_ms: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    events: deque[tuple[Any, Any]] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))


@dataclass(slots=True)
class _Interval:
    """After how many steps a report is due: all ranks count the same."""

    wanted_s: float
    least_steps: int
    step: int = 0
    steps: int | None = None
    last_s: float | None = None
    took_s: list[float] = field(default_factory=list)

    def count(self) -> None:
        self.step += 1
        if self.steps is not None:
            return
        now_s = time.monotonic()
        if self.last_s is not None:
            self.took_s.append(now_s - self.last_s)
        self.last_s = now_s
        if len(self.took_s) == ESTIMATED_STEPS:
            median_s = sorted(self.took_s)[(ESTIMATED_STEPS - 1) // 2]
            wanted = self.wanted_s / median_s if median_s else 1.0
            self.steps = int(max(max(_from_all(wanted)), self.least_steps, 1))

    @property
    def is_over(self) -> bool:
        return self.steps is not None and self.step % self.steps == 0


class Detector:
    """As there: one per process, of class methods."""

    initialized = False
    _is_relative: bool
    _is_individual: bool
    _gathers: bool
    _every: int
    _node: str
    _interval: _Interval
    _steps: SectionSteps
    _sections: dict[str, _Section]
    _originals: dict[CallableId, Any]
    _names: set[str]  # of all sections that any rank ever had
    _best: dict[str, float]  # least medians of this rank's sections
    _best_device: dict[str, float]

    def __new__(cls) -> "Detector":
        raise RuntimeError(f"class {cls.__name__} should not be instantiated")

    @classmethod
    def initialize(
        cls,
        scores_to_compute: Sequence[str] | str = "all",
        gather_on_rank0: bool = True,
        profiling_interval: int = 1,
        report_time_interval: float = 60,
        node_name: str | None = None,
        *,
        job: str | None = None,
        model: torch.nn.Module | None = None,
        ring_dir: str | None = None,
    ) -> None:
        """As there. Ours: `job` (default: the environment's PACEKEEPER_JOB; without one nothing
        is told to an agent) and `model`, whose passes are then what is told as computing, up to
        where ranks wait for each other, and not the sections.

        Raises ValueError for a wrong job name.
        """
        assert not cls.initialized, "Detector is initialized already"
        job = job or os.environ.get(JOB_VARIABLE) or None
        if job is not None and not is_job_name(job):
            raise ValueError(f"job name {job!r}: expected {JOB_NAME_RULE}")
        if job is None:
            _log.warning("no job is named: sections are reported here and told to no agent")
        wanted = (RELATIVE, INDIVIDUAL) if scores_to_compute == "all" else scores_to_compute
        cls._is_relative, cls._is_individual = RELATIVE in wanted, INDIVIDUAL in wanted
        cls._gathers = gather_on_rank0
        cls._every = profiling_interval
        cls._node = node_name or socket.gethostname()
        cls._interval = _Interval(report_time_interval, profiling_interval)
        cls._sections, cls._originals = {}, {}
        cls._names, cls._best, cls._best_device = set(), {}, {}
        cls._steps = SectionSteps(lambda: _teller(job, ring_dir) if job else None, model)
        cls.initialized = True

    @classmethod
    def shutdown(cls) -> None:
        """What was wrapped is as it was; the ring stays for the agent to read to its end."""
        if cls.initialized:
            cls.restore_original_callables()
            cls._steps.close()
        cls.initialized = False

    @classmethod
    @contextmanager
    def detection_section(
        cls, name: str | None = None, profile_cuda: bool = True
    ) -> Iterator[None]:
        """A part of a step. `profile_cuda`: it computes, its time is one of the device, too."""
        if not cls.initialized:
            raise RuntimeError("Detector is not initialized.")
        name = name or _place_of_caller()
        section = cls._sections.setdefault(name, _Section())
        is_timed = section.entries % cls._every == 0
        section.entries += 1
        on_device = is_timed and profile_cuda and torch.cuda.is_available()
        cls._steps.enter(name, computes=profile_cuda)
        began = _mark() if on_device else None
        began_ns = time.perf_counter_ns()
        try:
            yield
        except BaseException:
            cls._steps.fail()
            raise
        if is_timed:
            section.times_ms.append((time.perf_counter_ns() - began_ns) * 1e-6)
        if began is not None:
            section.events.append((began, _mark()))
        cls._steps.leave(computes=profile_cuda)

    @classmethod
    def wrap_callables(cls, callable_ids: list[CallableId], profile_cuda: bool = True) -> None:
        """Each call of them is a section of their name, until `shutdown`."""
        for one in callable_ids:
            original = getattr(one.obj, one.name)
            cls._originals.setdefault(one, original)
            setattr(one.obj, one.name, cls._in_section(original, str(one), profile_cuda))

    @classmethod
    def restore_original_callables(cls) -> None:
        """Callables are as they were before they were wrapped."""
        while cls._originals:
            one, original = cls._originals.popitem()
            setattr(one.obj, one.name, original)

    @classmethod
    def generate_report(cls) -> Report | None:
        """Of the times since the last one. All ranks call it; None where rank 0 gathers and this
        is another.
        """
        assert cls.initialized, "Detector is not initialized"
        began_s = time.perf_counter()
        sections = {
            name: nvrx_report.summary_of(section.times_ms)
            for name, section in cls._sections.items()
            if section.times_ms
        }
        device = {name: nvrx_report.summary_of(t) for name, t in cls._device_times().items() if t}
        for section in cls._sections.values():
            section.times_ms.clear()
        own = cls._own_times(sections, device)
        is_asking = cls._gathers or cls._is_relative
        told = [RankTimes(**one) for one in _from_all(_as_json(own))] if is_asking else [own]
        if cls._gathers and own.rank:
            return None
        shown = told if cls._gathers else [own]
        if cls._gathers:
            cls._names |= set[str]().union(*(one.sections for one in told))
        names = cls._names if cls._gathers else None
        relative = nvrx_report.scores(told, shown, names) if cls._is_relative else ({}, {})
        individual: tuple[dict[int, float], dict[str, dict[int, float]]] = ({}, {})
        if cls._is_individual:
            by_rank = {one.rank: one.own_sections for one in shown}
            individual = (
                {one.rank: one.own_device for one in shown},
                nvrx_report.table(by_rank, names),
            )
        return Report(
            gpu_relative_perf_scores=relative[0],
            section_relative_perf_scores=relative[1],
            gpu_individual_perf_scores=individual[0],
            section_individual_perf_scores=individual[1],
            rank_to_node={one.rank: one.node for one in shown},
            local_section_summaries=sections,
            local_kernel_summaries=device,
            generate_report_elapsed_time=(time.perf_counter() - began_s) * 1e3,
            gather_on_rank0=cls._gathers,
            rank=own.rank,
            suspect_ranks=cls._steps.suspect_ranks(),
        )

    @classmethod
    def generate_report_if_interval_elapsed(cls) -> Report | None:
        """Call it once per step on every rank; a report when it is due, else None."""
        assert cls.initialized, "Detector is not initialized"
        cls._steps.next_step()
        cls._interval.count()
        return cls.generate_report() if cls._interval.is_over else None

    @classmethod
    def is_interval_elapsed(cls) -> bool:
        """Was a report due in the newest call of `generate_report_if_interval_elapsed`?"""
        return cls._interval.is_over

    @classmethod
    def _in_section(
        cls, call: Callable[..., Any], name: str, profile_cuda: bool
    ) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with cls.detection_section(name, profile_cuda=profile_cuda):
                return call(*args, **kwargs)

        return wrapped

    @classmethod
    def _device_times(cls) -> dict[str, list[float]]:
        """Milliseconds of the events that the device has passed; the others wait their turn."""
        found: dict[str, list[float]] = {}
        for name, section in cls._sections.items():
            while section.events and section.events[0][1].query():
                began, ended = section.events.popleft()
                found.setdefault(name, []).append(began.elapsed_time(ended))
        return found

    @classmethod
    def _own_times(cls, sections: dict[str, Summary], device: dict[str, Summary]) -> RankTimes:
        medians = {name: one[Statistic.MED] for name, one in sections.items()}
        spent = {
            name: (one[Statistic.MED], one[Statistic.AVG] * one[Statistic.NUM])
            for name, one in device.items()
        }
        for best, now in (
            (cls._best, medians),
            (cls._best_device, {name: median for name, (median, _) in spent.items()}),
        ):
            for name, median in now.items():
                best[name] = min(best.get(name, median), median)
        rank = dist.get_rank() if _is_distributed() else 0
        return RankTimes(
            rank=rank,
            node=cls._node,
            sections=medians,
            device=spent,
            own_sections=nvrx_report.against(cls._best, medians),
            own_device=nvrx_report.weighted(cls._best_device, spent),
        )


def _teller(job: str, ring_dir: str | None) -> Teller:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return Teller(attach(job=job, device=device, ring_dir=ring_dir))


def _place_of_caller() -> str:
    """File and line of the `with`, past the two frames of the context manager's own."""
    frame = inspect.currentframe()
    for _ in range(3):
        frame = frame.f_back if frame is not None else None
    if frame is None:
        return "?"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _mark() -> Any:
    event = new_event()
    event.record()
    return event


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _as_json(own: RankTimes) -> dict[str, Any]:
    return {name: getattr(own, name) for name in RankTimes.__slots__}


def _from_all(value: Any) -> list[Any]:
    """What all ranks say, in their order, as JSON: names of sections need not be known before."""
    if not _is_distributed() or dist.get_world_size() == 1:
        return [value]
    place = torch.device("cpu")
    if dist.get_backend() == "nccl":
        place = torch.device("cuda", torch.cuda.current_device())
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(place)
    size = torch.tensor([data.numel()], device=place)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(one.item()) for one in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=place)
    padded[: data.numel()] = data
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [
        json.loads(bytes(one[: int(length.item())].tolist()))
        for one, length in zip(found, sizes, strict=True)
    ]
