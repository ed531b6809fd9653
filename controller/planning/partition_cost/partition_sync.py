"""How long the exchange of gradients of one cell takes at the end of a step. Pure."""

from pacekeeper.controller.planning.partition.model import Cell
from pacekeeper.controller.planning.partition.problem import Problem
from pacekeeper.controller.planning.partition_cost.memory import end_bytes, shares_of


def cell_sync_s(cell: Cell, num_pipelines: int, problem: Problem, *, is_inside: bool) -> float:
    """A ring over the pipelines for what they all hold: the slowest rank's share of gradients."""
    if num_pipelines == 1:
        return 0.0
    model, links = problem.model, problem.links
    layers = model.layers[cell.first_layer : cell.end_layer]
    attention_bytes = sum(layer.attention_bytes for layer in layers)
    mlp_bytes = sum(layer.mlp_bytes for layer in layers)
    mlp_bytes += end_bytes(model, cell.first_layer, cell.end_layer)
    whole_bytes = sum(layer.replicated_bytes for layer in layers)
    heads, columns = shares_of(cell.attention), shares_of(cell.mlp)
    latency_s = links.inside_latency_s if is_inside else links.between_latency_s
    slowest_s = 0.0
    for rank in cell.ranks:
        count = heads.get(rank, 0.0) * attention_bytes + columns.get(rank, 0.0) * mlp_bytes
        link = problem.device_of[rank].link_speed
        bandwidth = links.inside_bytes_per_s if is_inside else links.between_bytes_per_s * link
        slowest_s = max(slowest_s, (count + whole_bytes) / bandwidth)
    ring = 2.0 * (num_pipelines - 1) / num_pipelines
    return ring * model.gradient_share * slowest_s + 2.0 * (num_pipelines - 1) * latency_s
