"""How `pacekeeper plan` shows a plan for experts: a table, a JSON document, a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pacekeeper.controller.expert_cluster import Cluster
from pacekeeper.controller.expert_plan import ExpertPlan
from pacekeeper.core.errors import HostError


def as_document(plan: ExpertPlan) -> dict[str, Any]:
    """Plain values of all that is planned and proven."""
    proof = plan.proof
    return {
        "hosts": [
            [[{"device": host.rank, "share": host.share} for host in on] for on in layer]
            for layer in plan.hosts
        ],
        "layers": [
            {
                "value": layer.value,
                "hosts_bound": layer.hosts_bound,
                "slots_bound": layer.slots_bound,
                "fluid": layer.fluid,
                "gap": layer.gap,
                "witness": list(layer.witness),
            }
            for layer in proof.layers
        ],
        "survival": {
            "by_lost_nodes": list(proof.survival.by_losses),
            "standard_error": list(proof.survival.standard_error),
            "bound": list(proof.survival_bound),
        },
        "loss_probability": proof.loss_probability,
        "num_replicas": proof.num_replicas,
        "num_copied": proof.num_copied,
        "reason": proof.reason,
    }


def show(plan: ExpertPlan, cluster: Cluster) -> None:
    """For people, on standard output."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    proof = plan.proof
    worst = max(proof.layers, key=lambda layer: layer.gap)
    over = worst.value / worst.fluid if worst.fluid > 0.0 else 1.0
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(proof.reason)}[/]")
    console.print(
        f"fullest device of the worst layer: {over:.4f} of the fluid limit;"
        f" at most {proof.gap:.2%} above what any placement in these slots can reach"
    )
    if over > 1.01:
        shown = ", ".join(map(str, worst.witness[:16])) + (" .." if len(worst.witness) > 16 else "")
        console.print(f"why not less: only devices {shown} hold what they compute")
    console.print(f"replicas: {proof.num_replicas}, of them to copy: {proof.num_copied}")
    console.print(f"an expert loses all its nodes: probability {proof.loss_probability:.3g}")
    table = Table(title="part of all losses that is survived")
    table.add_column("lost nodes", justify="right")
    table.add_column("survived", justify="right")
    table.add_column("no placement beats", justify="right")
    for lost, (part, bound) in enumerate(
        zip(proof.survival.by_losses, proof.survival_bound, strict=True)
    ):
        if lost:
            table.add_row(str(lost), f"{part:.4f}", f"{bound:.4f}")
    console.print(table)
    console.print(f"{cluster.num_ranks} devices; shares and hosts: --json")


def loads_of_devices(
    plan: ExpertPlan, rows: Sequence[Sequence[float]], cluster: Cluster
) -> list[float]:
    """Rows / speed of each device over all layers, in parts of the fluid limit."""
    at = [0.0] * cluster.num_ranks
    for layer, hosts in zip(rows, plan.hosts, strict=True):
        for load, on in zip(layer, hosts, strict=True):
            for host in on:
                at[host.rank] += load * host.share
    fluid = sum(map(sum, rows)) / sum(cluster.speeds)
    return [r / s / fluid if fluid else 0.0 for r, s in zip(at, cluster.speeds, strict=True)]


def draw(plan: ExpertPlan, rows: Sequence[Sequence[float]], cluster: Cluster, path: Path) -> None:
    """Load of every device against the bound, and the survival curve.

    Raises HostError where the file can not be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    proof = plan.proof
    figure = Figure(figsize=(11.0, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.bar(range(cluster.num_ranks), loads_of_devices(plan, rows, cluster), color="#4477aa")
    fluid = sum(layer.fluid for layer in proof.layers)
    bound = sum(layer.slots_bound for layer in proof.layers) / fluid if fluid else 1.0
    left.axhline(bound, color="#222222", linestyle="--", label="no placement is lower")
    left.set(xlabel="device", ylabel="load / speed, of the fluid limit", ylim=(0.0, None))
    left.legend(loc="lower right")
    lost = range(len(proof.survival.by_losses))
    right.plot(lost, proof.survival.by_losses, marker="o", color="#4477aa", label="this plan")
    right.plot(
        lost, proof.survival_bound, color="#222222", linestyle="--", label="no plan is higher"
    )
    right.set(xlabel="lost nodes", ylabel="part of the losses survived", ylim=(-0.03, 1.03))
    right.legend(loc="lower left")
    try:
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise HostError(f"can not write {path}: {error.strerror or error}") from None
