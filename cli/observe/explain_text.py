"""Text of `pacekeeper explain`: one incident as lines of rich markup, with sparklines."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape

from pacekeeper.cli.common.sparkline import sparkline
from pacekeeper.cli.observe.incident_text import death_lines, ranks_text
from pacekeeper.core.incidents.findings import describe_cause
from pacekeeper.core.text import format_s

BAR_WIDTH = 40  # with label and range a line has 80 columns
_WHEN = {"before": "before", "during": "while open", "after": "after"}


def explanation_lines(explanation: Any) -> Iterator[str]:
    """Yield the explanation as lines of rich markup."""
    incident = explanation.incident
    yield from _header_lines(incident)
    yield from _measurement_lines(explanation)
    if incident.deaths:
        yield ""
        yield "[bold]Dead ranks[/]"
        for line in death_lines(incident):
            yield f"  {escape(line)}"
    yield ""
    yield "[bold]Cause[/]"
    for part in cause_lines(incident):
        yield f"  {escape(part)}"
    for stack in explanation.stacks:
        yield ""
        yield f"[bold]Stacks of rank {stack.rank}[/]" + (
            f" by {escape(stack.source)}" if stack.source else ": none"
        )
        for line in stack.text.splitlines():
            yield f"  {escape(line)}"
    yield ""
    yield "[bold]Decisions[/]"
    if not explanation.plans:
        yield "  none stored" if incident.actions else "  none"
    for note in explanation.plans:
        yield from _decision_lines(note)
    yield ""
    yield "[bold]Effect[/]"
    yield from _effect_lines(explanation)


def cause_lines(incident: Any) -> list[str]:
    """Return the parts of the cause and the result of the probe, one per line."""
    text = describe_cause(incident.cause, incident.normal_signals, incident.missing_signals)
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if incident.probe:
        parts.append(incident.probe)
    return parts or ["not determined"]


def measured_text(explanation: Any) -> str:
    """Return the slowdown with its 95 % interval; empty if not measured."""
    if not explanation.HasField("measured"):
        return ""
    measured = explanation.measured
    text = f"median slowdown x{measured.slowdown:.2f} over {measured.num_values} values"
    if measured.HasField("low"):
        return f"{text} (95 %: x{measured.low:.2f} to x{measured.high:.2f})"
    return f"{text} (too few for an interval)"


def gain_text(explanation: Any) -> str:
    """Return the measured change of step time; empty if not measured."""
    if not explanation.HasField("gain_ratio"):
        return ""
    gain = explanation.gain_ratio
    word = "shorter" if gain >= 0.0 else "longer"
    return f"steps are {abs(gain):.1%} {word} with the last layout than with the first"


def _header_lines(incident: Any) -> Iterator[str]:
    opened = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident.opened_unix_s))
    ranks = ranks_text(incident)
    where = f", {escape(ranks)}" if ranks else ""
    yield (
        f"[bold]Incident {incident.incident_id}: {escape(incident.kind)}{where}[/] in job "
        f"{escape(incident.job)}, {escape(incident.tier)}"
    )
    since = f"onset at step {incident.onset_step}, detected at step {incident.found_step}"
    if incident.HasField("closed_unix_s"):
        lasted_s = incident.closed_unix_s - incident.opened_unix_s
        end = f"[green]closed at step {incident.closed_step}, after {format_s(lasted_s)}[/]"
    else:
        end = "[bold red]open[/]"
    yield f"  opened {opened}; {since}; {end}"


def _measurement_lines(explanation: Any) -> Iterator[str]:
    timeline = explanation.timeline
    yield ""
    yield "[bold]Measurement[/]"
    yield f"  {escape(explanation.incident.reason)}"
    if text := measured_text(explanation):
        yield f"  {text}"
    ratios = [
        o / e if e > 0.0 else math.nan
        for o, e in zip(timeline.observed_s, timeline.expected_s, strict=True)
    ]
    peers = list(timeline.peers_slowdown)
    known = [value for value in [*ratios, *peers] if math.isfinite(value)]
    same = (min(known), max(known)) if known else None  # one scale for the rank and its peers
    for name, values, between in (
        ("observed/expected", ratios, same),
        ("peers", peers, same),
        ("step time", list(timeline.step_s), None),
    ):
        if bars := sparkline(values, width=BAR_WIDTH, between=between):
            yield f"  {name:>17} {bars} {_range(values, is_time=name == 'step time')}"
    if timeline.step:
        last = timeline.step[-1] + timeline.num_steps[-1] - 1
        yield f"  {'':>17} step {timeline.step[0]} to {last}"


def _decision_lines(note: Any) -> Iterator[str]:
    plan = f", generation {note.generation}" if note.HasField("generation") else ""
    yield f"  step {note.step}: [bold]{escape(note.level)}[/]{plan}"
    yield f"    {escape(note.reason)}"
    if note.HasField("generation"):
        yield (
            f"    forecast: step time {format_s(note.current_step_s)} -> "
            f"{format_s(note.planned_step_s)}; applying it costs {format_s(note.cost_s)} and moves "
            f"{note.moved_bytes / 1e6:,.1f} MB"
        )
    for one in note.considered:
        if one.why_not:
            yield (
                f"    [dim]not chosen: {escape(one.level)} "
                f"({format_s(one.planned_step_s)} per step): "
                f"{escape(one.why_not)}[/]"
            )


def _effect_lines(explanation: Any) -> Iterator[str]:
    for phase in explanation.phases:
        slow = "" if math.isnan(phase.slowdown) else f", rank slowdown x{phase.slowdown:.2f}"
        yield (
            f"  {_WHEN.get(phase.when, phase.when)}, generation {phase.generation}: step time "
            f"{format_s(phase.step_s)}{slow} (median of {phase.num_steps} steps from step "
            f"{phase.first_step})"
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
        yield "  none stored"


def _range(values: Sequence[float], *, is_time: bool) -> str:
    known = [value for value in values if math.isfinite(value)]
    if is_time:
        return f"{format_s(min(known))} to {format_s(max(known))}"
    return f"x{min(known):.2f} to x{max(known):.2f}"
