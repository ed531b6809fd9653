"""What was kept of incidents and jobs as messages of the status service. Functions of values."""

from pacekeeper.controller.api.messages import incident_view
from pacekeeper.controller.observability.explain import Explanation, Measured
from pacekeeper.controller.observability.timeline import PaceRow, PlanNote
from pacekeeper.controller.state_machine.state import State
from pacekeeper.protos import status_pb2


def explanation_view(state: State, explanation: Explanation) -> status_pb2.Explanation:
    """An incident with all that was kept of it."""
    rows = explanation.rows
    return status_pb2.Explanation(
        incident=incident_view(state, explanation.incident),
        measured=_measured_view(explanation.measured),
        phases=[
            status_pb2.Phase(
                when=phase.when,
                generation=phase.generation,
                first_step=phase.first_step,
                num_steps=phase.num_steps,
                step_s=phase.step_s,
                slowdown=phase.slowdown,
            )
            for phase in explanation.phases
        ],
        gain_ratio=explanation.gain_ratio,
        plans=[_plan_view(note) for note in explanation.plans],
        notes=[
            status_pb2.Note(step=note.step, unix_s=note.unix_s, text=note.text)
            for note in explanation.notes
        ],
        course=status_pb2.Course(
            step=[row.step for row in rows],
            unix_s=[row.unix_s for row in rows],
            num_steps=[row.num_steps for row in rows],
            generation=[row.generation for row in rows],
            step_s=[row.step_s for row in rows],
            observed_s=[row.observed_s for row in rows],
            expected_s=[row.expected_s for row in rows],
            peers_slowdown=[row.peers_slowdown for row in rows],
        ),
    )


def pace_view(rows: list[PaceRow]) -> status_pb2.Pace:
    """How fast a job went, as columns."""
    return status_pb2.Pace(
        step=[row.step for row in rows],
        unix_s=[row.unix_s for row in rows],
        num_steps=[row.num_steps for row in rows],
        generation=[row.generation for row in rows],
        step_s=[row.step_s for row in rows],
        tokens_per_s=[row.tokens_per_s for row in rows],
        slowest=[row.slowest for row in rows],
    )


def _measured_view(measured: Measured | None) -> status_pb2.Measured | None:
    if measured is None:
        return None
    return status_pb2.Measured(
        slowdown=measured.slowdown,
        low=measured.low,
        high=measured.high,
        num_values=measured.num_values,
    )


def _plan_view(note: PlanNote) -> status_pb2.PlanNote:
    return status_pb2.PlanNote(
        step=note.step,
        unix_s=note.unix_s,
        rung=note.rung,
        reason=note.reason,
        generation=note.generation,
        current_step_s=note.current_step_s,
        planned_step_s=note.planned_step_s,
        fluid_step_s=note.fluid_step_s,
        cost_s=note.cost_s,
        moved_bytes=note.moved_bytes,
        considered=[
            status_pb2.ConsideredPlan(
                rung=one.rung,
                planned_step_s=one.planned_step_s,
                cost_s=one.cost_s,
                moved_bytes=one.moved_bytes,
                why_not=one.why_not,
            )
            for one in note.considered
        ],
    )
