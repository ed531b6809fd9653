"""An explanation in words, for a terminal; a line of bars stands for the plot."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape

from pacekeeper.cli.common.sparkline import spark
from pacekeeper.cli.observe.incident_text import subject, who_died

BAR_WIDTH = 40  # with what stands beside it a line has 80 columns
_WHEN = {"before": "before it", "during": "while it was open", "after": "after its end"}


def explain(explanation: Any) -> Iterator[str]:
    """Lines of rich's markup."""
    incident = explanation.incident
    yield from _head(incident)
    yield from _measured(explanation)
    if incident.deaths:
        yield ""
        yield "[bold]Who died[/]"
        for line in who_died(incident):
            yield f"  {escape(line)}"
    yield ""
    yield "[bold]Why[/]"
    for part in why(incident):
        yield f"  {escape(part)}"
    yield ""
    yield "[bold]What was decided[/]"
    if not explanation.plans:
        yield "  nothing was kept of it" if incident.actions else "  nothing"
    for note in explanation.plans:
        yield from _plan(note)
    yield ""
    yield "[bold]What happened[/]"
    yield from _happened(explanation)


def why(incident: Any) -> list[str]:
    """The cause as it was found, and the probe; one part a line."""
    parts = [part.strip() for part in incident.cause.split(";") if part.strip()]
    if incident.probe:
        parts.append(incident.probe)
    return parts or ["nobody has looked for a cause"]


def measured_text(explanation: Any) -> str:
    """The slowdown with its interval; empty: nothing was kept."""
    if not explanation.HasField("measured"):
        return ""
    measured = explanation.measured
    text = f"x{measured.slowdown:.2f} in the median of {measured.num_values} values"
    if measured.HasField("low"):
        return f"{text} (95 %: x{measured.low:.2f} to x{measured.high:.2f})"
    return f"{text} (too few for an interval)"


def gain_text(explanation: Any) -> str:
    """What was gained by measurement; empty: not measured."""
    if not explanation.HasField("gain_ratio"):
        return ""
    gain = explanation.gain_ratio
    words = "less" if gain >= 0.0 else "more"
    return f"a step took {abs(gain):.1%} {words} under the last layout than under the first one"


def _head(incident: Any) -> Iterator[str]:
    opened = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident.opened_unix_s))
    whose = subject(incident)
    where = f", {escape(whose)}" if whose else ""
    yield (
        f"[bold]Incident {incident.incident_id}: {escape(incident.kind)}{where}[/] in job "
        f"{escape(incident.job)}, {escape(incident.tier)}"
    )
    since = f"since step {incident.onset_step}, found at step {incident.found_step}"
    if incident.HasField("closed_unix_s"):
        lasted_s = incident.closed_unix_s - incident.opened_unix_s
        end = f"[green]closed at step {incident.closed_step}, after {duration(lasted_s)}[/]"
    else:
        end = "[bold red]open[/]"
    yield f"  opened {opened}; {since}; {end}"


def _measured(explanation: Any) -> Iterator[str]:
    course = explanation.course
    yield ""
    yield "[bold]What was measured[/]"
    yield f"  {escape(explanation.incident.reason)}"
    if text := measured_text(explanation):
        yield f"  {text}"
    ratios = [
        o / e if e > 0.0 else math.nan
        for o, e in zip(course.observed_s, course.expected_s, strict=True)
    ]
    peers = list(course.peers_slowdown)
    known = [value for value in [*ratios, *peers] if math.isfinite(value)]
    same = (min(known), max(known)) if known else None  # one scale for the rank and its peers
    for name, values, between in (
        ("observed/expected", ratios, same),
        ("its peers", peers, same),
        ("step time", list(course.step_s), None),
    ):
        if bars := spark(values, width=BAR_WIDTH, between=between):
            yield f"  {name:>17} {bars} {_range(values, is_time=name == 'step time')}"
    if course.step:
        yield f"  {'':>17} step {course.step[0]} to {course.step[-1] + course.num_steps[-1] - 1}"


def _plan(note: Any) -> Iterator[str]:
    plan = f", generation {note.generation}" if note.HasField("generation") else ""
    yield f"  step {note.step}: [bold]{escape(note.rung)}[/]{plan}"
    yield f"    {escape(note.reason)}"
    if note.HasField("generation"):
        yield (
            f"    forecast: a step from {note.current_step_s * 1e3:.0f} to "
            f"{note.planned_step_s * 1e3:.0f} ms; costs {note.cost_s:.1f} s and "
            f"{note.moved_bytes / 1e6:,.1f} MB"
        )
    for one in note.considered:
        if one.why_not:
            yield (
                f"    [dim]not {escape(one.rung)} ({one.planned_step_s * 1e3:.0f} ms a step): "
                f"{escape(one.why_not)}[/]"
            )


def _happened(explanation: Any) -> Iterator[str]:
    for phase in explanation.phases:
        slow = "" if math.isnan(phase.slowdown) else f", the rank x{phase.slowdown:.2f}"
        yield (
            f"  {_WHEN.get(phase.when, phase.when)}, generation {phase.generation}: a step took "
            f"{phase.step_s * 1e3:.0f} ms{slow} (median of {phase.num_steps} from step "
            f"{phase.first_step} on)"
        )
    if text := gain_text(explanation):
        yield f"  {text}"
    if explanation.notes:
        for note in explanation.notes:
            at = time.strftime("%H:%M:%S", time.localtime(note.unix_s))
            yield f"  {at} step {note.step}: {escape(note.text)}"
    else:
        for action in explanation.incident.actions:
            yield f"  -> {escape(action)}"
    if not (explanation.phases or explanation.notes or explanation.incident.actions):
        yield "  nothing was kept of it"


def _range(values: Sequence[float], *, is_time: bool) -> str:
    known = [value for value in values if math.isfinite(value)]
    if is_time:
        return f"{min(known) * 1e3:.0f} to {max(known) * 1e3:.0f} ms"
    return f"x{min(known):.2f} to x{max(known):.2f}"


def duration(spent_s: float) -> str:
    """In the unit that suits it."""
    if spent_s < 120.0:
        return f"{spent_s:.1f} s"
    return f"{spent_s / 60.0:.0f} min" if spent_s < 7200.0 else f"{spent_s / 3600.0:.1f} h"
