"""Step programs that a reader can print."""

import pytest

from pacekeeper.core.layout.pipeline_schedule import Schedule, format_program, pipeline_program


@pytest.mark.parametrize(
    ("schedule", "lines"),
    [
        (
            Schedule.ONE_F_ONE_B,
            (
                "F0 [>F0] F1 [>F1 <B0] B0 [<B1] B1",
                "[<F0] F0 B0 [>B0 <F1] F1 B1 [>B1]",
            ),
        ),
        (
            Schedule.ZERO_BUBBLE,
            (
                "F0 [>F0] F1 [>F1 <B0] B0 W0 [<B1] B1 W1",
                "[<F0] F0 B0 [>B0 <F1] F1 B1 [>B1] W0 W1",
            ),
        ),
    ],
)
def test_each_stage_is_a_line_of_chunks_and_messages(
    schedule: Schedule, lines: tuple[str, ...]
) -> None:
    program = pipeline_program(schedule, num_stages=2, num_microbatches=2)
    assert format_program(program) == lines
