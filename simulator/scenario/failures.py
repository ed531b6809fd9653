"""[failures] of a scenario file: who is lost, slow and back, and when; recorded or drawn."""

from dataclasses import dataclass, fields
from math import inf
from pathlib import Path

from pacekeeper.core.errors import ConfigError
from pacekeeper.simulator.cluster.fault_generator import FaultKind, FaultRule, drawn_history
from pacekeeper.simulator.cluster.fault_log import read_faults
from pacekeeper.simulator.cluster.history import History
from pacekeeper.simulator.cluster.spot_trace import read_spot

ARRIVALS = ("regular", "random")
# Keys that mean something, by source: any other one would be a wish that nobody hears.
KEYS_OF_SOURCE = {
    "spot": ("file", "start_s", "duration_s", "time_unit_s", "max_nodes"),
    "faults": ("file", "num_nodes", "start_s", "duration_s", "slow_speed", "max_nodes",
               "nodes_per_rack"),
    "drawn": ("num_nodes", "kinds", "every_s", "mended_after_s", "mended_late_s", "arrivals",
              "slow_speed", "duration_s", "max_nodes", "nodes_per_rack"),
}  # fmt: skip
SOURCES = tuple(KEYS_OF_SOURCE)
MOST_FAULTS = 100_000  # what is more would be played for days


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """[failures]; 0 and "" mean: not given."""

    source: str
    file: str = ""
    num_nodes: int = 0
    start_s: float = 0.0
    duration_s: float = 0.0
    max_nodes: int = 0
    time_unit_s: float = 0.0
    slow_speed: float = 0.0
    kinds: str = ""
    every_s: float = 0.0
    mended_after_s: float = 0.0
    mended_late_s: float = 0.0
    arrivals: str = "regular"
    nodes_per_rack: int = 0

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source: expected one of {', '.join(SOURCES)}, got {self.source!r}")
        needed = {
            "spot": ("file",),
            "faults": ("file", "num_nodes"),
            "drawn": ("num_nodes", "kinds", "every_s", "duration_s"),
        }[self.source]
        for name in needed:
            if not getattr(self, name):
                raise ValueError(f"{name}: missing, source = {self.source!r} needs it")
        for name in (f.name for f in fields(self) if f.type in (int, float)):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")
        known = set(FaultKind)
        if self.kinds and not set(self.kinds.split("+")) <= known:
            raise ValueError(f"kinds: expected {' or '.join(sorted(known))}, or several joined by "
                             f"'+', got {self.kinds!r}")  # fmt: skip
        if FaultKind.RACK in self.kinds.split("+") and not self.nodes_per_rack:
            raise ValueError("nodes_per_rack: missing, kinds with 'rack' need it")
        has_slow = FaultKind.SLOW in self.kinds.split("+")
        if self.kinds and self.slow_speed and not has_slow:
            raise ValueError(f"slow_speed: expected kinds with 'slow', got {self.kinds!r}")
        is_slow = has_slow or self.slow_speed > 0.0
        if is_slow and not 0.0 < self.slow_speed < 1.0:
            raise ValueError(f"slow_speed: expected above 0 and below 1, got {self.slow_speed}")
        if self.arrivals not in ARRIVALS:
            expected = ", ".join(ARRIVALS)
            raise ValueError(f"arrivals: expected one of {expected}, got {self.arrivals!r}")
        if self.mended_late_s and not 0.0 < self.mended_after_s < self.mended_late_s:
            raise ValueError("mended_late_s: expected above mended_after_s, and that above 0")
        if self.source == "drawn" and self.duration_s > MOST_FAULTS * self.every_s:
            raise ValueError(f"every_s: expected at most {MOST_FAULTS:,} faults over duration_s")
        check_path(self.file)

    def drawn(self, seed: int) -> History:
        """By its rule; of `source = "drawn"`."""
        rule = FaultRule(
            kinds=tuple(FaultKind(kind) for kind in self.kinds.split("+")),
            every_s=self.every_s,
            slow_speed=self.slow_speed or 0.5,  # of a rule without slow nodes
            mended_after_s=self.mended_after_s or inf,
            mended_late_s=self.mended_late_s or None,
            is_random=self.arrivals == "random",
            nodes_per_rack=self.nodes_per_rack or 1,
        )
        return drawn_history(rule, num_nodes=self.num_nodes, duration_s=self.duration_s, seed=seed)


def check_path(file: str) -> None:
    """Raises ValueError for what no file is named."""
    if "\0" in file:
        raise ValueError(f"file: expected a path, got {file!r}")


def recorded(failures: Failures, path: Path) -> History | None:
    """What the file of the scenario at `path` has recorded; None where all is drawn.

    Raises DataError for a damaged file, ConfigError for a part that it has not.
    """
    if failures.source == "drawn":
        return None
    file = path.parent / failures.file
    if failures.source == "spot":
        history = read_spot(file, unit_s=failures.time_unit_s or None)
    else:
        history = read_faults(
            file, num_nodes=failures.num_nodes, slow_speed=failures.slow_speed or None
        )
    if not (failures.start_s or failures.duration_s):
        return history
    try:
        return history.cut(start_s=failures.start_s, duration_s=failures.duration_s or None)
    except ValueError as error:
        raise ConfigError(f"{path}: [failures] start_s, duration_s: {error}") from None
