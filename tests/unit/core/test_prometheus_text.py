"""The text is what Prometheus' own parser reads back, whatever names and values are."""

from math import inf, isnan, nan

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pacekeeper.core import prometheus_text
from pacekeeper.core.prometheus_text import MetricFamily, MetricsPage


def read(page: MetricsPage) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(page.text())
    return [(s.name, s.labels, s.value) for family in families for s in family.samples]


@pytest.mark.parametrize("text", ["plain", 'a"b', "back\\slash", "two\nlines", "", "\\n"])
def test_any_label_comes_back_as_it_was(text: str) -> None:
    page = MetricsPage()
    page.add(MetricFamily("one", "Help.", "a", "b"), 2.5, text, "x")
    assert read(page) == [("one", {"a": text, "b": "x"}, 2.5)]


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-300, 1.7976931348623157e308, 0.1, inf, -inf])
def test_any_value_comes_back_as_it_was(value: float) -> None:
    page = MetricsPage()
    page.add(MetricFamily("one", "Help."), value)
    assert read(page) == [("one", {}, value)]


def test_what_is_no_number_is_said_to_be_none() -> None:
    page = MetricsPage()
    page.add(MetricFamily("one", "Help."), nan)
    assert isnan(read(page)[0][2])


def test_truths_are_numbers() -> None:
    page = MetricsPage()
    page.add(MetricFamily("one", "Help."), True)
    assert read(page) == [("one", {}, 1.0)]


def test_a_family_stands_in_one_piece_in_whatever_order_it_is_told() -> None:
    first, second = (
        MetricFamily("first", "One."),
        MetricFamily("second_total", "Two.", "a", kind="counter"),
    )
    page = MetricsPage()
    page.add(second, 1, "x")
    page.add(first, 2)
    page.add(second, 3, "y")
    assert page.text() == (
        "# HELP second_total Two.\n# TYPE second_total counter\n"
        'second_total{a="x"} 1.0\nsecond_total{a="y"} 3.0\n'
        "# HELP first One.\n# TYPE first gauge\nfirst 2.0\n"
    )


def test_what_is_kept_of_changing_labels_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_text, "MAX_PREFIXES", 3)
    family = MetricFamily("one", "Help.", "a")
    for number in range(10):
        assert family.line(1, str(number)) == f'one{{a="{number}"}} 1.0\n'
    assert len(family._prefixes) <= 3
