"""Are slow links found and located, and is a healthy fabric left alone?

`python -m benchmarks.link_faults`; minutes, and some more with `--real`. Simulated: 16 ranks on 4
nodes exchange rows in all-to-alls over a fabric whose pairs inside nodes are four times as fast,
with one node that has always been slower. Noise is recorded: the all-reduces of 64 ranks of a real
mixture of experts (SmartMoE), in blocks of consecutive steps for transfers, drawn at random for
pairs. The detector and the verdict are those of live jobs; the machine and the trainer around them
are not in it. Real: a job of the engine between network namespaces, whose links become slow by the
kernel's token bucket, or by a userspace proxy that also delays and loses frames. `--real` needs
`OMP_NUM_THREADS=1`: a process with threads cannot enter a namespace.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.link_places import LinkPlace, PlaceKind
from pacekeeper.core.telemetry.pair_probe import Pair
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.detector.state import begin
from pacekeeper.predictor.links.pair_rates import LinkVerdict, PairHistory, PairRates, judge_pairs
from pacekeeper.predictor.links.slow_links import transfer_sample, update_links

NUM_NODES, PER_NODE = 4, 4
NODE_OF = {rank: f"node-{rank // PER_NODE}" for rank in range(NUM_NODES * PER_NODE)}
INSIDE_S_PER_BYTE, BETWEEN_S_PER_BYTE = 1e-10, 4e-10
OLD_NODE, OLD_SLOWDOWN = "node-3", 1.6  # since ever: no fault
KINDS = (PlaceKind.PORT, PlaceKind.NODE, PlaceKind.PAIR)
FACTORS = (1.5, 2.0, 4.0)
HEALTHY_STEPS, FAULT_STEPS = 80, 40
NOISE_COLUMN = "backward-params-all-reduce|total"


def recorded_noise(folder: Path) -> Array:
    """Log of an all-reduce's time over its rank's median [iterations, ranks]."""
    import pyarrow.parquet as pq  # has threads: processes of `--real` import this module

    path = folder / "smartmoe_ranktimes" / "rank_times_static.parquet"
    table = pq.read_table(path, columns=["rank", "iteration", NOISE_COLUMN])
    ranks, column = np.unique(table["rank"].to_numpy(), return_inverse=True)
    steps, row = np.unique(table["iteration"].to_numpy(), return_inverse=True)
    times = np.full((len(steps), len(ranks)), np.nan)
    times[row, column] = table[NOISE_COLUMN].to_numpy()
    logs = np.log(times[1:])  # the first iteration connects
    found: Array = logs - np.median(logs, axis=0)
    return found


@dataclass(kw_only=True)
class Fabric:
    """Sixteen ranks and their links, with recorded noise and perhaps one slow place."""

    noise: Array
    draw: np.random.Generator
    slow: Mapping[Pair, float] = field(default_factory=dict)
    _block: Array = field(default_factory=lambda: np.empty((0, 0)))

    def pair_s_per_byte(self) -> dict[Pair, float]:
        found = {}
        for pair in combinations(NODE_OF, 2):
            nodes = {NODE_OF[rank] for rank in pair}
            s_per_byte = BETWEEN_S_PER_BYTE if len(nodes) > 1 else INSIDE_S_PER_BYTE
            s_per_byte *= OLD_SLOWDOWN if len(nodes) > 1 and OLD_NODE in nodes else 1.0
            found[pair] = s_per_byte * self.slow.get(pair, 1.0)
        return found

    def steps(self, first: int, count: int) -> Iterator[tuple[int, Array, Array]]:
        """Yield (step, seconds, bytes) of each rank: the slowest of its exchanges counts."""
        pairs = self.pair_s_per_byte()
        slowest = np.array(
            [max(s for pair, s in pairs.items() if rank in pair) for rank in NODE_OF]
        )
        for step in range(first, first + count):
            moved = self.draw.integers(20_000_000, 40_000_000, len(NODE_OF)).astype(float)
            part_s = slowest * moved / (len(NODE_OF) - 1)
            yield step, part_s * np.exp(self._row(step)), moved

    def rates(self, step: int) -> PairRates:
        """Return what a probe of pairs measures now."""
        noise = self.draw.choice(self.noise.ravel(), (len(NODE_OF) ** 2, 3))
        medians = iter(np.exp(np.median(noise, axis=1)).tolist())
        found = {pair: s * next(medians) for pair, s in self.pair_s_per_byte().items()}
        return PairRates(step=step, ranks=tuple(NODE_OF), s_per_byte=found)

    def _row(self, step: int) -> Array:
        """Return the noise of a step: of consecutive iterations, from a random one on."""
        at = step % 25
        if at == 0 or not len(self._block):
            start = int(self.draw.integers(0, len(self.noise) - 25))
            ranks = self.draw.choice(self.noise.shape[1], len(NODE_OF), replace=False)
            self._block = self.noise[start : start + 25, ranks]
        row: Array = self._block[at]
        return row


def planted(kind: PlaceKind, draw: np.random.Generator) -> LinkPlace:
    """Return a random place of a kind."""
    rank = int(draw.integers(len(NODE_OF)))
    if kind is PlaceKind.PORT:
        return LinkPlace(kind=kind, ranks=(rank,), nodes=(NODE_OF[rank],))
    if kind is PlaceKind.NODE:
        ranks = tuple(other for other in NODE_OF if NODE_OF[other] == NODE_OF[rank])
        return LinkPlace(kind=kind, ranks=ranks, nodes=(NODE_OF[rank],))
    away = [other for other in NODE_OF if NODE_OF[other] != NODE_OF[rank]]
    pair = tuple(sorted((rank, int(draw.choice(away)))))
    nodes = tuple(sorted({NODE_OF[end] for end in pair}))
    return LinkPlace(kind=kind, ranks=pair, nodes=nodes)


def slow_pairs(place: LinkPlace, factor: float) -> dict[Pair, float]:
    """Return the pairs that use a place, with their slowdown."""
    num_ends = {PlaceKind.PORT: 1, PlaceKind.PAIR: 2, PlaceKind.NODE: 1}[place.kind]
    return {
        pair: factor
        for pair in combinations(NODE_OF, 2)
        if len({*pair} & {*place.ranks}) == num_ends
    }


def trial(noise: Array, place: LinkPlace | None, factor: float, seed: int) -> dict[str, Any]:
    """Play one job; return when a slow link was found, and where."""
    fabric = Fabric(noise=noise, draw=np.random.default_rng(seed))
    config, links, history = DetectorConfig(), begin(), PairHistory()
    history = history.learn(fabric.rates(0))
    for first, count in ((0, HEALTHY_STEPS), (HEALTHY_STEPS, FAULT_STEPS)):
        if first and place is not None:
            fabric.slow = slow_pairs(place, factor)
        for step, took_s, moved in fabric.steps(first, count):
            sample = transfer_sample(step, 1, tuple(NODE_OF), took_s, moved)
            assert sample is not None, "all ranks report"
            links, judgement = update_links(config, links, sample, NODE_OF)
            found = [*judgement.findings]
            found += [] if judgement.common.found is None else [judgement.common.found]
            if not found:
                continue
            worst = max(finding.slowdown for finding in found)
            verdict = judge_pairs(fabric.rates(step), history, NODE_OF, suspected=worst)
            is_early = place is None or step < HEALTHY_STEPS
            return {
                "found": not is_early,
                "false": is_early,
                "confirmed": bool(verdict.places),
                "delay": step - HEALTHY_STEPS + 1,
                **located(verdict, place),
            }
    return {"found": False, "false": False, "confirmed": False, "located": False}


def located(verdict: LinkVerdict, place: LinkPlace | None) -> dict[str, Any]:
    """Return whether a verdict names the place alone, or among others, and the speed's error."""
    first = verdict.places[0] if verdict.places else None
    is_named = first is not None and first.place == place and len(verdict.places) == 1
    return {
        "located": is_named,
        "ambiguous": first is not None and not is_named and place in first.candidates,
        "slowdown": first.slowdown if first is not None else None,
    }


def simulate(noise: Array, trials: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each kind of fault and factor, and one of healthy fabrics."""
    rows = []
    for kind in KINDS:
        for factor in FACTORS:
            draw = np.random.default_rng([seed, KINDS.index(kind), round(factor * 10)])
            told = [
                trial(noise, planted(kind, draw), factor, int(draw.integers(1 << 31)))
                for _ in range(trials)
            ]
            found = [one for one in told if one["found"]]
            speeds = [one["slowdown"] for one in found if one["located"]]
            rows.append(
                {
                    "fault": str(kind),
                    "factor": factor,
                    "trials": trials,
                    "found": len(found),
                    "located": sum(one["located"] for one in found),
                    "ambiguous": sum(one["ambiguous"] for one in found),
                    "median_delay": float(np.median([one["delay"] for one in found] or [np.nan])),
                    "false_before": sum(one["false"] for one in told),
                    "speed_error": float(
                        np.median([abs(speed / factor - 1.0) for speed in speeds] or [np.nan])
                    ),
                }
            )
    told = [trial(noise, None, 1.0, seed * 1000 + number) for number in range(trials)]
    rows.append(
        {
            "fault": "none",
            "factor": 1.0,
            "trials": trials,
            "false_suspected": sum(one["false"] for one in told),
            "false": sum(one["false"] and one["confirmed"] for one in told),
        }
    )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RealCase:
    """A fault of the link of `node`: by the kernel's token bucket, or by a proxy's shape."""

    name: str
    num_nodes: int
    per_node: int
    place: LinkPlace | None
    node: int = 1
    bytes_per_s: float = 0.0
    shape: Mapping[str, float] = field(default_factory=dict)
    peer: int | None = None


RATE = 1.5e6  # bytes per second
PORT_1 = LinkPlace(kind=PlaceKind.PORT, ranks=(1,), nodes=("node-1",))
PAIR_13 = LinkPlace(kind=PlaceKind.PAIR, ranks=(1, 3), nodes=("node-1", "node-3"))
NODE_1 = LinkPlace(kind=PlaceKind.NODE, ranks=(2, 3), nodes=("node-1",))
REAL = (
    RealCase(name="none", num_nodes=4, per_node=1, place=None),
    RealCase(name="port, token bucket", num_nodes=4, per_node=1, place=PORT_1, bytes_per_s=RATE),
    RealCase(name="node, token bucket", num_nodes=3, per_node=2, place=NODE_1, bytes_per_s=RATE),
    RealCase(
        name="pair, proxy", num_nodes=4, per_node=1, place=PAIR_13, peer=3,
        shape={"bytes_per_s": RATE},
    ),
    RealCase(
        name="port, delay and loss", num_nodes=4, per_node=1, place=PORT_1,
        shape={"delay_s": 0.04, "loss": 0.01},
    ),
)  # fmt: skip
REAL_HEALTHY_STEPS, REAL_STEPS = 24, 120  # until a probe has located it, at most


def play_real(case: RealCase, folder: Path) -> dict[str, Any]:
    """Run a job between namespaces; return what was found of its slow link."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from support.exact_jobs import exact_job
    from support.fleet import Fleet
    from support.networks import Network
    from support.watched_fleets import WatchedFleet

    config = ControllerConfig(detector=DetectorConfig(warmup_steps=8, canary_period_steps=0))
    job = exact_job(
        folder, steps=100_000, row_tokens=256, time_transfers=True, peer_timeout_s=60.0,
        rows_per_step=4 * case.num_nodes * case.per_node // 2,
    )  # fmt: skip
    proxied = (case.node,) if case.shape else ()
    with ExitStack() as stack:
        network = stack.enter_context(Network(case.num_nodes, proxied=proxied))
        fleet = Fleet(
            directory=folder, config=job, num_nodes=case.num_nodes, ranks_per_node=case.per_node,
            network=network,
        )  # fmt: skip
        stack.enter_context(fleet)
        watched = stack.enter_context(WatchedFleet(fleet=fleet, config=config))

        def until(step: int, *, found: bool = False) -> None:
            def is_there() -> bool:
                watched.poll()
                return watched.step >= step or (found and any(f.places for f in watched.findings))

            fleet.await_(is_there)

        until(REAL_HEALTHY_STEPS)
        early, onset = len(watched.findings), watched.step
        if case.bytes_per_s:
            network.limit(case.node, case.bytes_per_s)
        if case.shape:
            peer = "" if case.peer is None else network.host(case.peer)
            network.shape(case.node, **case.shape, peer=peer)
        until(onset + REAL_STEPS, found=True)
        findings = watched.findings
        job_state = watched.job
        verdict = None if job_state is None else job_state.detection.link_probes.verdict
    late = findings[early:]
    return {
        "case": case.name,
        "found": bool(late) and case.place is not None,
        "false": early + (len(late) if case.place is None else 0),
        "delay": min(f.step for f in late) - onset if late else None,
        "verdict": "" if verdict is None else str(verdict),
        **(located(verdict, case.place) if verdict is not None else {"located": False}),
    }


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(_text(row.get(name)) for name in columns))
    console.print(table)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Print tables and one line of JSON; the exit status says whether the bars hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--trials", type=int, default=40, help="simulated jobs per row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="jobs between namespaces, too")
    options = parser.parse_args()
    console = Console(width=190)
    simulated = simulate(recorded_noise(options.data), options.trials, options.seed)
    show(console, "simulated fabrics, recorded noise", simulated)
    real: list[dict[str, Any]] = []
    skipped = "" if options.real else "not asked for"
    if options.real:
        import pytest

        for case in REAL:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    real.append(play_real(case, Path(folder)))
                except pytest.skip.Exception as error:
                    skipped = f"{case.name}: {error}"
                except AssertionError as error:  # the job failed, or made no steps in time
                    real.append({"case": case.name, "error": str(error).splitlines()[-1:]})
        show(console, "jobs between network namespaces", real)
    faults = [row for row in simulated if row["fault"] != "none" and row["factor"] >= 2.0]
    holds = {
        "x2 and more is found": all(row["found"] >= 0.95 * row["trials"] for row in faults),
        "what is found is located": all(row["located"] >= 0.95 * row["found"] for row in faults),
        "no healthy fabric is accused": simulated[-1]["false"] == 0,
    }
    print(json.dumps({"simulated": simulated, "real": real, "skipped": skipped, "holds": holds}))
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
