"""Standstills and stacks on the wire: whole, bounded, printable, and nothing impossible."""

import math

import pytest

from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.core.telemetry.sign_of_life import MAX_STACK_BYTES, Phase, RankPhase, RankStack
from pacekeeper.protos import telemetry_pb2
from pacekeeper.protos.convert.reports import report_from_message, report_to_message

SEEN = RankPhase(
    rank=3,
    phase=Phase.LOADING,
    held_s=2.5,
    usual_s=0.0,
    process_state="D",
    kernel_wait="folio_wait_bit_common",
    cpu_ratio=0.0,
)
MOVED = RankPhase(rank=1, phase=Phase.COMPUTING, held_s=0.0, is_standing=False)
STACK = RankStack(rank=3, source="py-spy", text="Thread 1:\n    wait (user.py:3)")


def message(**part: object) -> telemetry_pb2.NodeReport:
    job = JobReport(job="j", **part)  # type: ignore[arg-type]
    return report_to_message(NodeReport(sequence=1, sent_mono_s=1.0, jobs=(job,)))


def test_what_is_sent_arrives() -> None:
    (job,) = report_from_message(message(phases=(SEEN, MOVED), stacks=(STACK,))).jobs
    assert (job.phases, job.stacks) == ((SEEN, MOVED), (STACK,))


def test_a_phase_of_a_newer_agent_is_left_out() -> None:
    sent = message(phases=(SEEN, MOVED))
    sent.jobs[0].phases[0].phase = "dreaming"
    assert report_from_message(sent).jobs[0].phases == (MOVED,)


@pytest.mark.parametrize("name", ["held_s", "usual_s", "cpu_ratio"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, 1e9])
def test_impossible_times_are_refused(name: str, value: float) -> None:
    sent = message(phases=(SEEN,))
    setattr(sent.jobs[0].phases[0], name, value)
    with pytest.raises(ValueError, match=f"impossible {name}"):
        report_from_message(sent)


def test_a_dump_is_cut_and_moves_no_cursor() -> None:
    sent = message(stacks=(STACK,))
    sent.jobs[0].stacks[0].text = "  \x1b[2Jred\n" + "x" * 2 * MAX_STACK_BYTES
    (stack,) = report_from_message(sent).jobs[0].stacks
    assert stack.text.startswith("  [2Jred\nx")
    assert len(stack.text) < MAX_STACK_BYTES
