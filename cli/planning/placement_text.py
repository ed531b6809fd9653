"""Output of `pacekeeper plan placement`: table, JSON document, EPLB's tables and plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pacekeeper.controller.planning.eplb import Tables, tables_of
from pacekeeper.controller.planning.experts.certificate import survival_by
from pacekeeper.controller.planning.experts.planner import ExpertPlan
from pacekeeper.controller.planning.experts.problem import Cluster
from pacekeeper.core.errors import HostError

COLORS = {"devices": "#ccbb44", "nodes": "#4477aa", "racks": "#aa3377"}


def survival_by_loss(plan: ExpertPlan, cluster: Cluster) -> dict[str, tuple[float, ...]]:
    """Return the survival by number of lost devices, nodes and racks."""
    most = len(plan.proof.survival) - 1
    return {
        "devices": survival_by(plan.replicas, range(cluster.num_ranks), max_losses=most),
        "nodes": plan.proof.survival,
        "racks": survival_by(plan.replicas, cluster.racks, max_losses=most),
    }


def _distinct(plan: ExpertPlan, cluster: Cluster) -> dict[str, tuple[float, ...]]:
    """Return the survival of nodes, and of devices and racks if these differ from nodes."""
    num_nodes = len(set(cluster.nodes))
    is_other = {
        "devices": cluster.num_ranks > num_nodes,
        "nodes": True,
        "racks": len(set(cluster.racks)) < num_nodes,
    }
    return {name: of for name, of in survival_by_loss(plan, cluster).items() if is_other[name]}


def as_document(plan: ExpertPlan, cluster: Cluster) -> dict[str, Any]:
    """Return the plan and its proof as JSON values."""
    proof = plan.proof
    return {
        "replicas": [
            [[{"device": replica.rank, "share": replica.share} for replica in on] for on in layer]
            for layer in plan.replicas
        ],
        "layers": [
            {
                "value": layer.value,
                "replicas_bound": layer.replicas_bound,
                "slots_bound": layer.slots_bound,
                "fluid": layer.fluid,
                "gap": layer.gap,
                "bottleneck": list(layer.bottleneck),
            }
            for layer in proof.layers
        ],
        "survival": {
            f"by_lost_{name}": list(of) for name, of in survival_by_loss(plan, cluster).items()
        }
        | {"bound_by_lost_nodes": list(proof.survival_bound)},
        "loss_probability": proof.loss_probability,
        "num_replicas": proof.num_replicas,
        "num_copied": proof.num_copied,
        "reason": proof.reason,
    }


def as_tables(plan: ExpertPlan, rows: Sequence[Sequence[float]], cluster: Cluster) -> Tables:
    """Return the plan as EPLB's tables; the token shares of replicas are lost."""
    import numpy as np

    replicas = [[[each.rank for each in on] for on in layer] for layer in plan.replicas]
    return tables_of(replicas, cluster.num_ranks, cluster.slots[0], loads=np.array(rows))


def print_placement(plan: ExpertPlan, cluster: Cluster) -> None:
    """Print the plan and its proof as lines and a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    proof = plan.proof
    worst = max(proof.layers, key=lambda layer: layer.gap)
    over = worst.value / worst.fluid if worst.fluid > 0.0 else 1.0
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(proof.reason)}[/]")
    console.print(
        f"busiest device of the worst layer: {over:.4f} x the fluid limit, "
        f"at most {proof.gap:.2%} above the lower bound for these slots"
    )
    if over > 1.01:
        shown = ", ".join(map(str, worst.bottleneck[:16])) + (
            " .." if len(worst.bottleneck) > 16 else ""
        )
        console.print(f"bottleneck: devices {shown} alone hold the experts that they compute")
    console.print(f"replicas: {proof.num_replicas}, of which {proof.num_copied} must be copied")
    console.print(f"probability that an expert loses all its nodes: {proof.loss_probability:.3g}")
    found = _distinct(plan, cluster)
    table = Table(title="share of failures survived")
    for name in ("failed at once", *found, "upper bound (nodes)"):
        table.add_column(name, justify="right")
    for lost in range(1, max(len(of) for of in found.values())):
        parts = (*found.values(), proof.survival_bound)
        table.add_row(str(lost), *(f"{p[lost]:.4f}" if lost < len(p) else "" for p in parts))
    console.print(table)
    console.print(f"{cluster.num_ranks} devices; replicas and shares with --json")


def device_loads(
    plan: ExpertPlan, rows: Sequence[Sequence[float]], cluster: Cluster
) -> tuple[list[float], list[float]]:
    """Return rows / speed of each device relative to the fluid limit.

    Returns:
        The sum over all layers, and the maximum of a layer, one value per device each.
    """
    whole, most = [0.0] * cluster.num_ranks, [0.0] * cluster.num_ranks
    for layer, replicas, proof in zip(rows, plan.replicas, plan.proof.layers, strict=True):
        at = [0.0] * cluster.num_ranks
        for load, on in zip(layer, replicas, strict=True):
            for replica in on:
                at[replica.rank] += load * replica.share / cluster.speeds[replica.rank]
        whole = [before + here for before, here in zip(whole, at, strict=True)]
        if proof.fluid > 0.0:
            most = [max(m, here / proof.fluid) for m, here in zip(most, at, strict=True)]
    fluid = sum(proof.fluid for proof in plan.proof.layers)
    return [r / fluid if fluid else 0.0 for r in whole], most


def write_plot(
    plan: ExpertPlan, rows: Sequence[Sequence[float]], cluster: Cluster, path: Path
) -> None:
    """Plot the load of every device against the bound, and the survival curves.

    Raises:
        HostError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    proof = plan.proof
    figure = Figure(figsize=(11.0, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    whole, most = device_loads(plan, rows, cluster)
    devices = range(cluster.num_ranks)
    left.bar(devices, whole, color="#4477aa", label="all layers")
    if len(rows) > 1:
        left.plot(devices, most, "D", color="#aa3377", markersize=4, label="busiest layer")
    fluid = sum(layer.fluid for layer in proof.layers)
    bound = sum(layer.slots_bound for layer in proof.layers) / fluid if fluid else 1.0
    left.axhline(bound, color="#222222", linestyle="--", label="lower bound")
    top = 1.3 * max(bound, *most)  # room for the legend
    left.set(
        xlabel="device", ylabel="load / speed, relative to the fluid limit", ylim=(0.0, top or None)
    )
    left.legend(loc="upper right", ncols=3, fontsize="small")
    for name, of in _distinct(plan, cluster).items():
        lost = range(len(of))
        right.plot(lost, of, marker="o", color=COLORS[name], label=f"of {name}")
    right.plot(
        range(len(proof.survival_bound)), proof.survival_bound, color="#222222", linestyle="--",
        label="upper bound (nodes)",
    )  # fmt: skip
    right.set(xlabel="failed at once", ylabel="share of failures survived", ylim=(-0.03, 1.03))
    right.legend(loc="upper right", fontsize="small")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    try:
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise HostError(f"cannot write {path}: {error.strerror or error}") from None
