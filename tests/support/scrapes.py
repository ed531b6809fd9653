"""What Prometheus would read of a page of metrics."""

from typing import Protocol

from prometheus_client.parser import text_string_to_metric_families


class Told(Protocol):
    """Who has metrics to tell."""

    def page(self) -> bytes: ...


def samples(told: Told) -> list[tuple[str, dict[str, str], float]]:
    """All series: (name, labels, value)."""
    families = text_string_to_metric_families(told.page().decode())
    return [(s.name, s.labels, s.value) for family in families for s in family.samples]


def value(told: Told, name: str, **labels: str) -> float | None:
    """The value of `pacekeeper_NAME` with exactly these labels; None where there is none."""
    found = [v for n, have, v in samples(told) if (n, have) == (f"pacekeeper_{name}", labels)]
    assert len(found) <= 1, found
    return found[0] if found else None
