"""Jinja2 filters of the web page: numbers, times, durations, ranks."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from pacekeeper.core.incidents.rank_failures import describe_failure
from pacekeeper.core.incidents.rank_ranges import (
    RankRanges,
    count_ranks,
    format_ranges,
    merge_ranges,
)
from pacekeeper.core.text import format_s

_KIND_WORDS = {
    "cordon_node": "node {} is cordoned",
    "cordon_rank": "rank {} is cordoned",
    "pause": "{} is paused",
    "dry_run": "dry run: plans are made and shown, none is offered",
}


def slow(value: float | None) -> str:
    """A slowdown factor."""
    return "" if value is None or not math.isfinite(value) else f"\u00d7{value:.2f}"


def duration(value_s: float | None) -> str:
    """A duration; nothing for one that is not known."""
    return "" if value_s is None or not math.isfinite(value_s) else format_s(value_s)


def percent(ratio: float | None) -> str:
    """A ratio in percent."""
    return "" if ratio is None or not math.isfinite(ratio) else f"{ratio:.1%}"


def clock(unix_s: float | None) -> Markup | str:
    """A time, which the browser converts to the reader's time zone."""
    return "" if unix_s is None else _moment(unix_s, "%Y-%m-%d %H:%M:%S", "moment")


def time_of_day(unix_s: float) -> Markup | str:
    """A time without its date."""
    return _moment(unix_s, "%H:%M:%S", "moment of-day")


def _moment(unix_s: float, form: str, kind: str) -> Markup | str:
    try:
        at = time.gmtime(unix_s)
    except (ValueError, OverflowError, OSError):
        return ""
    made = '<time class="{}" datetime="{}">{} UTC</time>'
    return Markup(made).format(
        kind, time.strftime("%Y-%m-%dT%H:%M:%SZ", at), time.strftime(form, at)
    )


def size(count_bytes: float) -> str:
    """A number of bytes in MB or GB."""
    return f"{count_bytes / 1e9:,.1f} GB" if count_bytes >= 1e9 else f"{count_bytes / 1e6:,.1f} MB"


def count(value: float) -> str:
    """A number with thousands separators."""
    return f"{value:,.0f}"


def words(name: str) -> str:
    """An identifier with spaces instead of underscores."""
    return name.replace("_", " ")


def parts(text: str) -> list[str]:
    """The parts of a text between semicolons."""
    return [part.strip() for part in text.split(";") if part.strip()]


def order(given: Mapping[str, Any]) -> str:
    """An operator order."""
    return _KIND_WORDS.get(given["kind"], "{}").format(given["subject"])


def ranks(incident: Mapping[str, Any], most_runs: int | None = None) -> str:
    """The ranks of an incident; empty: it is about no single rank."""
    runs = merge_ranges(run for one in incident["deaths"] for run in _runs(one))
    if most_runs is not None and len(runs) > most_runs:
        return f"{count_ranks(runs):,} ranks"
    if runs:
        return format_ranges(runs)
    return "" if incident["rank"] is None else str(incident["rank"])


def dead(deaths: Mapping[str, Any]) -> str:
    """The ranks that died together, and the reason."""
    return describe_failure(_runs(deaths), deaths["reason"])


def _runs(deaths: Mapping[str, Any]) -> RankRanges:
    return tuple((run["first"], run["last"]) for run in deaths["ranks"])


FILTERS: dict[str, Callable[..., Any]] = {
    "slow": slow,
    "duration": duration,
    "percent": percent,
    "clock": clock,
    "time_of_day": time_of_day,
    "size": size,
    "count": count,
    "words": words,
    "parts": parts,
    "order": order,
    "ranks": ranks,
    "dead": dead,
}
