"""Others' own code beside ours on the same records: NVRx's reports, StragglerAnalysis' what-if.

`python -m benchmarks.originals --nvrx DIR --straggler-analysis DIR [--site DIR]`. None of it is
part of this project: DIR holds the unpacked wheel `nvidia-resiliency-ext` 0.4.1 (or it is
installed), a clone of ByteDance-Seed/StragglerAnalysis, and what that imports (pandas below 3,
pyyaml, tqdm). What is not there is skipped, and said. NVRx's `ReportGenerator` runs once per rank
with its collectives done by hand (a minimum over the ranks); it is given a section, seconds of
compute per step, and no kernels. Our reading of its rule, the baseline of the other benchmarks, is
asked the same: reports on which both name the same ranks are counted.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.baselines import NvrxIndividual, NvrxRelative
from benchmarks.rank_traces import accused, matrix, slowed, steps_of
from pacekeeper.predictor.cost.features import Array, Flags
from pacekeeper.predictor.recorded.analyze import analyze
from pacekeeper.predictor.recorded.trace import Trace
from pacekeeper.simulator.readers.bytedance import read_bytedance

TRACES = ("AR", "SE", "ST")
FACTORS = (1.05, 1.2, 1.3, 1.4, 1.6)  # of a rank of SE, from the middle of the record on
SLOW_AT = 5  # position of that rank among the workers
PACKAGE = "nvidia_resiliency_ext"
SECTION = "compute"
SAME = 1e-3  # of S: both sum the same operations
Named = list[tuple[set[int], set[int]]]  # of each report: by the fastest rank, by the own best


def nvrx_at(folder: Path | None) -> ModuleType | None:
    """The module of its reports; None where it is not there.

    Its packages are entered without running them: they load the part that needs CUDA.
    """
    if folder is None:
        spec = find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            return None
        root = Path(spec.submodule_search_locations[0])
    else:
        root = folder / PACKAGE
    if not (root / "straggler" / "reporting.py").exists():
        return None
    for name, path in ((PACKAGE, root), (f"{PACKAGE}.straggler", root / "straggler")):
        package = ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    return importlib.import_module(f"{PACKAGE}.straggler.reporting")


def nvrx_reports(reporting: Any, times_s: Array, window: int) -> Named:
    """Whom its reports name, one every `window` steps; times_s [steps, ranks]."""
    import torch

    statistic, transport = reporting.Statistic, reporting.dist_utils
    num_ranks = times_s.shape[1]
    scores = ["relative_perf_scores", "individual_perf_scores"]
    makers = [
        reporting.ReportGenerator(scores, gather_on_rank0=False, node_name=str(rank))
        for rank in range(num_ranks)
    ]
    named: Named = []
    for end in range(window, len(times_s) + 1, window):
        stretch = torch.tensor(times_s[end - window : end])
        said: list[Any] = []

        def told(tensor: Any, said: list[Any] = said, **_: Any) -> None:
            said.append(tensor.clone())

        def least(tensor: Any, said: list[Any] = said, **_: Any) -> None:
            tensor.copy_(torch.stack(said).min(dim=0).values)

        for transport.all_reduce in (told, least):  # what each says, then what comes of it
            reports = []
            for rank, maker in enumerate(makers):
                transport.get_rank = lambda group, rank=rank: rank
                own = {
                    statistic.MED: torch.median(stretch[:, rank]).item(),
                    statistic.AVG: stretch[:, rank].mean().item(),
                    statistic.NUM: window,
                }
                reports.append(maker.generate_report({SECTION: own}, {}))
        relative, individual = set[int](), set[int]()
        for report in reports:
            found = report.identify_stragglers()
            sections = found["straggler_sections_relative"].get(SECTION, ())
            relative |= {one.rank for one in sections}
            sections = found["straggler_sections_individual"].get(SECTION, ())
            individual |= {one.rank for one in sections}
        named.append((relative, individual))
    return named


def read_by_us(times_s: Array, stages: Sequence[int]) -> Named:
    """The same of the baselines that stand for it."""
    rules = NvrxRelative(), NvrxIndividual()
    relative, individual = (rule.flags(times_s, stages) for rule in rules)
    window = rules[0].window

    def at(flags: Flags, end: int) -> set[int]:
        return set(np.flatnonzero(flags[end - 1]).tolist())

    ends = range(window, len(times_s) + 1, window)
    return [(at(relative, end), at(individual, end)) for end in ends]


def show_nvrx(
    console: Console, reporting: ModuleType, traces: Mapping[str, Trace]
) -> list[dict[str, Any]]:
    """Whom NVRx names, whether we read its rule rightly, and whom ours names."""
    table = Table(title=f"{PACKAGE}: ranks named in any report (threshold 0.75)")
    for column in ("record", "reports", "as read by us", "fastest rank", "own best", "pacekeeper"):
        table.add_column(column, justify="right")
    rows = []
    for name, trace in traces.items():
        times_s, stages, ranks = matrix(trace)
        theirs, ours = nvrx_reports(reporting, times_s, 10), read_by_us(times_s, stages)
        same = sum(one == other for one, other in zip(theirs, ours, strict=True))
        relative, individual = (set().union(*(report[i] for report in theirs)) for i in (0, 1))
        row = {
            "record": name,
            "reports": len(theirs),
            "same": same,
            "fastest_rank": sorted(ranks[i] for i in relative),
            "own_best": sorted(ranks[i] for i in individual),
            "pacekeeper": sorted(accused(trace)),
        }
        rows.append(row)
        shown = [row["fastest_rank"], row["own_best"], row["pacekeeper"]]
        table.add_row(name, str(len(theirs)), str(same), *map(_few, shown))
    console.print(table)
    return rows


def _few(ranks: Any) -> str:
    return f"{len(ranks)} ranks" if len(ranks) > 4 else ", ".join(map(str, ranks)) or "nobody"


def analysed(clone: Path, site: Path | None, data: Path, name: str) -> dict[str, Any] | None:
    """What their `wia.py` makes of a trace; None where it fails, its last words printed."""
    paths = [str(clone), *([str(site)] if site is not None else [])]
    with tempfile.TemporaryDirectory(prefix="pacekeeper-originals-") as folder:
        command = [sys.executable, str(clone / "analyzer" / "wia.py"), "--root", folder]
        command += ["--dump-dir", folder, "--metadata", str(data / f"meta-{name}.yaml")]
        command += ["--trace", str(data / f"trace-{name}.parquet")]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )
        results = list(Path(folder).glob("*.json"))
        if done.returncode or not results:
            print(f"{name}: their analysis failed: {done.stderr.strip()[-300:]}")
            return None
        found: dict[str, Any] = json.loads(results[0].read_text())
        return found


def show_what_if(
    console: Console, clone: Path, site: Path | None, data: Path
) -> list[dict[str, Any]]:
    """S and its largest part by data-parallel rank and by stage, theirs and ours, with the time."""
    table = Table(title="StragglerAnalysis: step time over that without stragglers")
    for column in ("record", "S, theirs", "S, ours", "apart", "worst dp", "worst stage", "seconds"):
        table.add_column(column, justify="right")
    rows = []
    for name in TRACES:
        began_s = time.perf_counter()
        theirs = analysed(clone, site, data, name)
        middle_s = time.perf_counter()
        ours = analyze(read_bytedance(data / f"trace-{name}.parquet")).what_if
        ended_s = time.perf_counter()
        if theirs is None or ours is None:
            continue
        slowdown = theirs["blocking_slowdown"]
        apart = abs(ours.slowdown / slowdown - 1.0)
        worst = [
            (max(of, key=lambda part: of[part]), max(own, key=lambda part: own[part]))
            for of, own in (
                (theirs["blocking_decompose_by_dp_rank"], ours.by_dp),
                (theirs["blocking_decompose_by_stage"], ours.by_stage),
            )
        ]
        rows.append(
            {
                "record": name,
                "S_theirs": slowdown,
                "S_ours": ours.slowdown,
                "apart": apart,
                "worst_dp": worst[0],
                "worst_stage": worst[1],
                "theirs_s": round(middle_s - began_s, 2),
                "ours_s": round(ended_s - middle_s, 2),
            }
        )
        table.add_row(
            name, f"{slowdown:.4f}", f"{ours.slowdown:.4f}", f"{apart:.1e}",
            *(f"{their} / {own}" for their, own in worst),
            f"{middle_s - began_s:.1f} / {ended_s - middle_s:.1f}",
        )  # fmt: skip
    console.print(table)
    return rows


def records(folder: Path) -> dict[str, Trace]:
    traces = {name: read_bytedance(folder / f"trace-{name}.parquet") for name in TRACES}
    steps = steps_of(traces["SE"])
    middle = int(steps[len(steps) // 2])
    rank = traces["SE"].workers[SLOW_AT].rank
    for factor in FACTORS:
        traces[f"SE x{factor}"] = slowed(traces["SE"], rank, middle, factor)
    return traces


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--nvrx", type=Path, help=f"folder with {PACKAGE}; default: as installed")
    parser.add_argument("--straggler-analysis", type=Path, help="a clone of their repository")
    parser.add_argument("--site", type=Path, help="folder with the packages that it imports")
    options = parser.parse_args()
    folder = options.data / "bytedance_straggler"
    console = Console(width=120)
    result: dict[str, Any] = {"nvrx": None, "straggler_analysis": None}
    reporting = nvrx_at(options.nvrx)
    if reporting is None:
        console.print(f"{PACKAGE} is not there: skipped")
    else:
        result["nvrx"] = show_nvrx(console, reporting, records(folder))
    clone = options.straggler_analysis
    if clone is None or not (clone / "analyzer" / "wia.py").exists():
        console.print("StragglerAnalysis is not there: skipped")
    else:
        result["straggler_analysis"] = show_what_if(console, clone, options.site, folder)
    print(json.dumps(result))
    reports_fit = all(row["same"] == row["reports"] for row in result["nvrx"] or ())
    parts_fit = all(row["apart"] <= SAME for row in result["straggler_analysis"] or ())
    return 0 if reports_fit and parts_fit else 1


if __name__ == "__main__":
    sys.exit(main())
