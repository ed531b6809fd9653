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


def test_model_chunks_are_named_where_there_are_several() -> None:
    program = pipeline_program(
        Schedule.INTERLEAVED, num_stages=1, num_microbatches=1, num_model_chunks=2
    )
    assert format_program(program) == ("F0.0 F0.1 B0.1 B0.0",)
