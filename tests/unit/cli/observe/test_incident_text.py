"""People read whom an incident is about, however many they are and whoever told of them."""

import pytest

from pacekeeper.cli.observe.explain_text import explanation_lines
from pacekeeper.cli.observe.incident_text import (
    MAX_DEATH_LINES,
    death_lines,
    ranks_column,
    ranks_text,
)
from pacekeeper.protos import status_pb2


def deaths(*runs: tuple[int, int], **values: object) -> status_pb2.Deaths:
    told = {"reason": "its process ended by signal 9", "step": 4, "unix_s": 0.0, **values}
    ranks = [status_pb2.RankRun(first=first, last=last) for first, last in runs]
    return status_pb2.Deaths(ranks=ranks, **told)  # type: ignore[arg-type]


KILLED = status_pb2.Incident(
    kind="death",
    rank=77,
    node="n9",
    deaths=[deaths((77, 77)), deaths((0, 76), (78, 8191))],
    nodes=["n0", "n1", "n2"],
    num_nodes=1024,
)


@pytest.mark.parametrize(
    ("incident", "said", "narrow"),
    [
        (KILLED, "ranks 0-8191 on n0, n1 and 1,022 more nodes", "0-8191"),
        (status_pb2.Incident(kind="device", rank=3, node="n1"), "rank 3 on n1", "3"),
        (status_pb2.Incident(kind="device", rank=3), "rank 3 on ?", "3"),
        (status_pb2.Incident(kind="host"), "", ""),
        (
            status_pb2.Incident(rank=0, deaths=[deaths((0, 0), (2, 9))], nodes=["a"], num_nodes=1),
            "ranks 0 and 2-9 on a",
            "9 ranks",
        ),
    ],
)
def test_it_is_named_in_a_line_and_in_a_column(
    incident: status_pb2.Incident, said: str, narrow: str
) -> None:
    assert ranks_text(incident) == said
    assert ranks_column(incident) == narrow


def test_each_moment_says_who_why_and_whether_it_is_over() -> None:
    over = deaths((1, 2), closed_unix_s=9.0, closed_step=6)
    told = status_pb2.Incident(deaths=[deaths((7, 7)), over])
    first, second = death_lines(told)
    assert "7" in first and "signal 9" in first
    assert "1 and 2" in second and second.endswith("6")


def test_of_very_many_moments_the_first_are_said() -> None:
    many = status_pb2.Incident(deaths=[deaths((i, i)) for i in range(MAX_DEATH_LINES + 5)])
    *first, last = death_lines(many)
    assert len(first) == MAX_DEATH_LINES and "5" in last and "--json" in last


def test_explain_shows_the_stacks_of_a_rank_that_hangs_or_why_there_are_none() -> None:
    stacks = [
        status_pb2.StackDump(rank=3, source="py-spy", text="Thread 1\n  in [waits]"),
        status_pb2.StackDump(rank=4, text="its process is stopped"),
    ]
    hung = status_pb2.Explanation(incident=status_pb2.Incident(kind="hang", rank=3), stacks=stacks)
    lines = list(explanation_lines(hung))
    at = lines.index("[bold]Stacks of rank 3[/] by py-spy")
    assert lines[at + 1 : at + 3] == ["  Thread 1", r"    in \[waits]"]
    at = lines.index("[bold]Stacks of rank 4[/]: none")
    assert lines[at + 1] == "  its process is stopped"
