"""The Prometheus text format (0.0.4), with the text before each value cached.

The series of a fleet differ between scrapes in their values only: names and labels are escaped and
joined once.
"""

from math import isfinite

MAX_PREFIXES = 1 << 16  # of one family: beyond, labels change too often to be worth keeping
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class MetricFamily:
    """One metric: all series of one name. `labels`: their names, in the order of values."""

    def __init__(self, name: str, text: str, *labels: str, kind: str = "gauge") -> None:
        assert (kind == "counter") == name.endswith("_total"), name
        self.name, self.labels = name, labels
        self.head = f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
        self._prefixes: dict[tuple[str, ...], str] = {}

    def prefix(self, values: tuple[str, ...]) -> str:
        """Name and labels as they stand before a value."""
        prefix = self._prefixes.get(values)
        if prefix is None:
            prefix = self._joined(values)
            if len(self._prefixes) >= MAX_PREFIXES:
                self._prefixes.clear()
            self._prefixes[values] = prefix
        return prefix

    def line(self, value: float, *values: str) -> str:
        """One series with its value; `values` of its labels."""
        return f"{self.prefix(values)}{_number(value)}\n"

    def line_once(self, value: float, *values: str) -> str:
        """As `line`, without caching, for callers that keep the line."""
        return f"{self._joined(values)}{_number(value)}\n"

    def _joined(self, values: tuple[str, ...]) -> str:
        assert len(values) == len(self.labels), (self.name, values)
        if not values:
            return f"{self.name} "
        pairs = zip(self.labels, values, strict=True)
        inside = ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in pairs)
        return f"{self.name}{{{inside}}} "


class MetricsPage:
    """The response to one scrape; all lines of a family are together, as the format requires."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def add(self, family: MetricFamily, value: float, *values: str) -> None:
        """Add one series."""
        self.add_line(family, family.line(value, *values))

    def add_line(self, family: MetricFamily, line: str) -> None:
        """Add a finished line."""
        self.lines_of(family).append(line)

    def lines_of(self, family: MetricFamily) -> list[str]:
        """The lines of this family so far; a family without series has its head only."""
        return self._lines.setdefault(family.name, [family.head])

    def text(self) -> str:
        """The whole page."""
        return "".join(line for lines in self._lines.values() for line in lines)


def _number(value: float) -> str:
    if isfinite(value):
        return repr(float(value))
    return "NaN" if value != value else ("+Inf" if value > 0 else "-Inf")
