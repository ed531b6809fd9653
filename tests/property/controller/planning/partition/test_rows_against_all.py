"""Rows of pipelines that share experts, against every division into whole rows, with launches.

The price of a division is written here once more, from the rules that the engine runs by.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.planning.partition.incremental import with_other_rows
from pacekeeper.controller.planning.partition_cost.step_time import price
from support.examples import examples
from support.partitions import even_partition, model_of, problem_of

LAYERS = 2  # of a stage
EXPERT_S = 0.5  # of a row and layer; its attention takes 1 s
WHOLE_ROWS = 1.06  # a plan over the best of all divisions: rows are whole

Division = tuple[tuple[int, ...], ...]  # [stages][pipelines]


def one_f_one_b_s(forward_s: Sequence[Sequence[float]]) -> float:
    """A step of chunks [stages][micro-batches], a backward pass twice as long as its forward."""
    num_stages, count = len(forward_s), len(forward_s[0])
    ended_s: dict[tuple[str, int, int], float] = {}
    programs = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, count)
        program = [("F", number) for number in range(ahead)]
        for number in range(count):
            program += [("F", number + ahead)] * (number + ahead < count) + [("B", number)]
        programs.append(program)
    while any(programs):
        for stage, program in enumerate(programs):
            own_s = max((s for (_, at, _), s in ended_s.items() if at == stage), default=0.0)
            while program:
                kind, number = program[0]
                before = (kind, stage + (-1 if kind == "F" else 1), number)
                if 0 <= before[1] < num_stages and before not in ended_s:
                    break
                chunk_s = forward_s[stage][number] * (1.0 if kind == "F" else 2.0)
                own_s = max(own_s, ended_s.get(before, 0.0)) + chunk_s
                ended_s[kind, stage, number] = own_s
                program.pop(0)
    return max(ended_s.values())


def sizes_of(rows: Sequence[int], count: int, *, is_dealt: bool) -> list[list[int]]:
    """[pipelines][micro-batches]: dealt place by place, or as even as can be, the smaller first."""
    if not is_dealt:
        return [[(number + at) // count for at in range(count)] for number in rows]
    firsts = [sum(rows[:at]) for at in range(len(rows))]
    places = [range(first, first + number) for first, number in zip(firsts, rows, strict=True)]
    return [[sum(place % count == at for place in own) for at in range(count)] for own in places]


def step_s(
    division: Division, speeds: Sequence[Sequence[float]], launch_s: float, at_once: int, count: int
) -> float:
    """Seconds of a step; `count` micro-batches, or as many as `at_once` rows in each allow."""
    if at_once:
        count = -(-max(map(max, division)) // at_once)
    chunks = []
    for rows, own in zip(division, speeds, strict=True):
        sizes = sizes_of(rows, count, is_dealt=at_once > 0)
        chunks.append(
            [
                LAYERS
                * (
                    max((n + launch_s) / speed for n, speed in zip(batch, own, strict=True))
                    + EXPERT_S * sum(batch) / sum(own)
                )
                for batch in zip(*sizes, strict=True)
            ]
        )
    return one_f_one_b_s(chunks)


def divisions(total: int, number: int, least: int) -> Iterator[tuple[int, ...]]:
    """Every way to give `number` pipelines whole rows, at least so many each."""
    for rows in product(range(least, total + 1), repeat=number - 1):
        if total - sum(rows) >= least:
            yield (*rows, total - sum(rows))


@pytest.mark.parametrize(
    ("pipelines", "stages", "rows", "count", "at_once"),
    [(2, 1, 24, 4, 6), (2, 1, 24, 4, 0), (3, 1, 8, 2, 4), (2, 2, 16, 4, 4), (2, 2, 16, 4, 0)],
)
def test_no_other_division_into_whole_rows_is_much_faster(
    pipelines: int, stages: int, rows: int, count: int, at_once: int
) -> None:
    drawn: Counter[bool] = Counter()
    one_speed = st.sampled_from([1.0, 1.0, 0.8, 0.625, 0.5, 0.3])

    @settings(deadline=None, max_examples=examples(12))
    @given(
        speeds=st.lists(one_speed, min_size=pipelines * stages, max_size=pipelines * stages),
        launch_s=st.sampled_from([0.5, 1.0, 4.0]),
    )
    def is_near(speeds: list[float], launch_s: float) -> None:
        model = replace(model_of(LAYERS * stages, expert_s=EXPERT_S), launch_s=launch_s)
        home = even_partition(
            model, data=pipelines, stages=stages, tensor=1, rows=rows, micro_batches=count,
            shares_experts=True,
        )  # fmt: skip
        problem = problem_of(model, home, slow=dict(enumerate(speeds)))
        problem = replace(problem, rows_per_microbatch=at_once)
        found = with_other_rows(home, problem)
        of_stages = [speeds[at * pipelines : (at + 1) * pipelines] for at in range(stages)]

        def taken_s(division: Division) -> float:
            return step_s(division, of_stages, launch_s, at_once, count)

        chosen = tuple(
            tuple(sum(one.batches_at(stage)) for one in found.pipelines) for stage in range(stages)
        )
        assert price(found, problem).step_s == pytest.approx(taken_s(chosen), rel=1e-6)
        every = [*divisions(pipelines * rows, pipelines, 1 if at_once else count)]
        best_s = min(taken_s((division,) * stages) for division in every)
        if at_once and stages == 2:
            best_s = min(best_s, min(map(taken_s, product(every, repeat=2))))
        assert taken_s(chosen) <= WHOLE_ROWS * best_s
        drawn[len({*chosen[0]}) > 1] += 1

    is_near()
    assert drawn[True]
