"""Figures of the simulation report: throughput over time, and use of time per policy."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pacekeeper.cli.analysis.html import inline_png
from pacekeeper.cli.analysis.simulate_text import shown_uses, time_unit
from pacekeeper.simulator.engine.event_loop import SimulationResult
from pacekeeper.simulator.engine.statistics import Summary, mean_pace, rates
from pacekeeper.simulator.policies.base import Use
from pacekeeper.simulator.scenario.loader import Scenario

Array = npt.NDArray[np.float64]

NUM_WINDOWS = 80
MIN_LABELLED_SHARE = 0.035  # a smaller share has no room for its label
# Colour-blind safe (Okabe and Ito); policies in their order.
POLICY_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
USE_COLOURS = {
    Use.TRAINED: "#3a7d44", Use.HELD_UP: "#a9cf9f", Use.SAVED: "#5b7db1",
    Use.NOTICED: "#f4d58d", Use.PLANNED: "#e8b54d", Use.REGROUPED: "#e0a458",
    Use.MOVED: "#c98a2b", Use.REDONE: "#c1440e", Use.BROKEN_OFF: "#e58a6a",
    Use.RESTARTED: "#8e2b33", Use.WAITED: "#9a9a9a",
}  # fmt: skip


def policy_colour(place: int) -> str:
    """Return the colour of the policy at this position."""
    return POLICY_COLOURS[place % len(POLICY_COLOURS)]


def throughput_picture(known: Scenario, found: Mapping[str, Sequence[SimulationResult]]) -> str:
    """Draw throughput, useful samples and number of nodes over time.

    Means over seeds; the band of useful samples spans all seeds; nodes are those of the first seed.

    Returns:
        A data URL.
    """
    figure, (rate, total, nodes) = _figure(8.0, (5, 5, 2))
    outcomes = next(iter(found.values()))
    end_s = outcomes[0].duration_s
    unit_s, unit = time_unit(end_s)
    histories = [known.history(outcome.seed) for outcome in outcomes]
    pace = np.mean([mean_pace(history, NUM_WINDOWS) for history in histories], axis=0)
    times = np.array([at_s for at_s, _ in rates(outcomes[0], NUM_WINDOWS)]) / unit_s
    rate.fill_between(
        times, pace * known.job.samples_per_node_s, color="#ececec", lw=0, step="mid", label="limit"
    )
    moments = np.linspace(0.0, end_s, 4 * NUM_WINDOWS)
    for at, (name, of_policy) in enumerate(found.items()):
        each = np.array([[r for _, r in rates(o, NUM_WINDOWS)] for o in of_policy])
        rate.plot(times, each.mean(axis=0), color=policy_colour(at), label=_plain(name), lw=1.5)
        counted = np.array([_counted(outcome, moments) for outcome in of_policy])
        ends = counted.min(axis=0), counted.max(axis=0)
        total.plot(moments / unit_s, counted.mean(axis=0), color=policy_colour(at), lw=1.5)
        total.fill_between(moments / unit_s, *ends, color=policy_colour(at), alpha=0.15, lw=0)
    rate.set_ylim(bottom=0)
    rate.set_ylabel("samples/s")
    rate.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=8, frameon=False)
    total.set_ylim(bottom=0)
    total.set_ylabel("useful samples")
    total.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
    there = [(0.0, 0), *histories[0].num_there()]
    there.append((end_s, there[-1][1]))
    nodes.step(
        [at_s / unit_s for at_s, _ in there],
        [number for _, number in there],
        where="post", color="#444444", lw=1.2,
    )  # fmt: skip
    nodes.set_ylim(bottom=0)
    nodes.set_ylabel("nodes" if len(histories) == 1 else f"nodes,\nseed {outcomes[0].seed}")
    nodes.set_xlabel(unit)
    nodes.set_xlim(0.0, end_s / unit_s)
    return inline_png(figure, dpi=130)


def _counted(outcome: SimulationResult, moments: Array) -> Array:
    """Return the useful samples at each moment."""
    points: Array = np.array(outcome.points)
    counted: Array = np.interp(moments, points[:, 0], points[:, 1])
    return counted


def time_use_picture(rows: Sequence[Summary]) -> str:
    """Draw one bar per policy, divided by use of time; return a data URL."""
    figure, (axis,) = _figure(1.1 + 0.5 * len(rows), (1,))
    left = np.zeros(len(rows))
    places = list(range(len(rows)))
    for use in shown_uses(rows):
        parts = np.array([row.spent[use] for row in rows])
        axis.barh(places, parts, left=left, color=USE_COLOURS[use], label=str(use), height=0.7)
        for place, part in enumerate(parts.tolist()):
            if part >= MIN_LABELLED_SHARE:
                axis.text(
                    left[place] + part / 2.0, place, f"{part:.0%}",
                    ha="center", va="center", fontsize=8, color=_ink(USE_COLOURS[use]),
                )  # fmt: skip
        left += parts
    axis.set_yticks(places, [_plain(row.policy) for row in rows])
    axis.invert_yaxis()
    axis.set_xlim(0.0, 1.0)
    axis.xaxis.set_major_formatter(lambda part, _: f"{part:.0%}")
    figure.legend(loc="outside lower center", ncols=6, fontsize=9, frameon=False)
    return inline_png(figure, dpi=130)


def _plain(name: str) -> str:
    """Escape a name for matplotlib: no formula, no leading underscore."""
    return name.replace("$", r"\$").replace("\n", " ").lstrip("_") or "-"


def _ink(colour: str) -> str:
    """Return white or black, whichever has more contrast."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#ffffff" if 0.30 * red + 0.59 * green + 0.11 * blue < 130.0 else "#000000"


def _figure(height: float, ratios: Sequence[int]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout="constrained")
    axes = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes
