"""All series that a controller and an agent have, with their labels: what rules may ask for."""

from collections.abc import Mapping

from pacekeeper.agent import metrics
from pacekeeper.agent.metrics import AgentMetrics
from pacekeeper.controller.observability import rank_metrics, state_metrics
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.core.prometheus_text import MetricFamily
from pacekeeper.protos import metrics_server


def labels_of_series(*, agents: bool = True) -> Mapping[str, set[str]]:
    """Labels by name; those of agents too, unless told otherwise."""
    told = {family.name: set(family.labels) for family in all_families(agents=agents)}
    registries = [ControllerMetrics().registry, *([AgentMetrics().registry] if agents else [])]
    for registry in registries:
        for collector, names in registry._collector_to_names.items():
            labels = set(getattr(collector, "_labelnames", ()))
            # A counter is registered under its bare name, too, and told under that of its total.
            told |= {name: labels for name in names if f"{name}_total" not in names}
    return told


def all_families(*, agents: bool = True) -> list[MetricFamily]:
    """Those that are written by ourselves, each once."""
    modules = (
        state_metrics,
        rank_metrics,
        metrics_server,
        *([metrics] if agents else []),
    )
    found = [f for module in modules for value in vars(module).values() for f in _families(value)]
    return list({family.name: family for family in found}.values())


def _families(value: object) -> list[MetricFamily]:
    if isinstance(value, tuple):
        return [family for inner in value for family in _families(inner)]
    return [value] if isinstance(value, MetricFamily) else []
