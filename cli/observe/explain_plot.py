"""Plot of an incident: observed against expected compute time, and the job's step time."""

from pathlib import Path
from typing import Any

from pacekeeper.core.errors import HostError, PacekeeperError


def write_plot(path: Path, explanation: Any) -> None:
    """Write the plot as PNG.

    Raises:
        HostError: the file cannot be written.
        PacekeeperError: the controller stored no step around the incident.
    """
    if not explanation.timeline.step:
        raise PacekeeperError(
            f"no steps are stored around incident {explanation.incident.incident_id}"
        )
    figure = _draw_figure(explanation)
    try:
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise HostError(f"plot {path}: {error.strerror}", remedy="choose another file") from None


def _draw_figure(explanation: Any) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    incident, timeline = explanation.incident, explanation.timeline
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = list(timeline.step)
    above.plot(steps, [1e3 * v for v in timeline.observed_s], color="#c0392b", label="observed")
    above.plot(steps, [1e3 * v for v in timeline.expected_s], color="#2471a3", label="expected")
    above.set_ylabel("compute, ms" if incident.HasField("rank") else "median compute, ms")
    below.plot(steps, [1e3 * v for v in timeline.step_s], color="#444444", label="step")
    below.set_ylabel("step, ms")
    below.set_xlabel("step")
    for axis in (above, below):
        axis.set_ylim(bottom=0.0)
        axis.margins(x=0.0)
        axis.axvspan(
            incident.onset_step,
            incident.closed_step if incident.HasField("closed_step") else steps[-1],
            color="#c0392b",
            alpha=0.08,
            lw=0,
        )
        axis.axvline(incident.found_step, color="#c0392b", ls=":", lw=1, label="found")
        for at in _layout_changes(timeline):
            axis.axvline(at, color="#1e8449", ls="--", lw=1)
        axis.spines[["top", "right"]].set_visible(False)
    above.legend(loc="upper left", frameon=False, ncols=3)
    rank = f" of rank {incident.rank}" if incident.HasField("rank") else ""
    where = f" on {incident.node}" if incident.node else ""
    figure.suptitle(
        f"Incident {incident.incident_id}: {incident.kind}{rank}{where} in {incident.job}"
        " (dashed: layout changes)",
        fontsize=11,
    )
    return figure


def _layout_changes(timeline: Any) -> list[int]:
    """Return the steps at which the layout generation changed."""
    pairs = zip(timeline.generation, timeline.generation[1:], timeline.step[1:], strict=False)
    return [step for before, now, step in pairs if now != before]
