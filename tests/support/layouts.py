"""Hypothesis strategies for valid layouts of every shape the design knows."""

from hypothesis import strategies as st

from pacekeeper.core.layout import Host, Layout, ShardRun, Stage


def normalised(values: list[float]) -> list[float]:
    total = sum(values)
    return [v / total for v in values] if total else [1.0 / len(values)] * len(values)


@st.composite
def layouts(draw: st.DrawFn, *, generation: int = 1, single_stage: bool = False) -> Layout:
    """One or two stages, tensor groups with unequal runs, dense and MoE layers, uneven shares."""
    num_shards = draw(st.integers(1, 4))
    num_stages = 1 if single_stage else draw(st.integers(1, 2))
    num_groups = draw(st.integers(1, 3))
    stages, experts, next_rank, next_layer = [], [], 0, 0
    for _ in range(num_stages):
        groups = []
        for _ in range(num_groups):
            cuts = sorted(draw(st.sets(st.integers(1, max(1, num_shards - 1)), max_size=1)))
            ends = [c for c in cuts if c < num_shards] + [num_shards]
            runs, first = [], 0
            for end in ends:
                runs.append(ShardRun(next_rank, first, end))
                next_rank, first = next_rank + 1, end
            groups.append(tuple(runs))
        end_layer = next_layer + draw(st.integers(1, 2))
        stage = Stage(first_layer=next_layer, end_layer=end_layer, groups=tuple(groups))
        stages.append(stage)
        for _ in range(end_layer - next_layer):
            num_experts = draw(st.integers(0, 3))
            layer = []
            for _ in range(num_experts):
                on = sorted(draw(st.sets(st.sampled_from(stage.ranks), min_size=1)))
                shares = normalised(
                    draw(st.lists(st.floats(0, 1), min_size=len(on), max_size=len(on)))
                )
                layer.append(tuple(Host(r, s) for r, s in zip(on, shares, strict=True)))
            experts.append(tuple(layer))
        next_layer = end_layer
    first_ranks = [group[0].rank for group in stages[0].groups]
    shares = normalised(draw(st.lists(st.floats(0, 1), min_size=num_groups, max_size=num_groups)))
    return Layout(
        generation=generation,
        num_virtual_shards=num_shards,
        stages=tuple(stages),
        experts=tuple(experts),
        batch_shares=tuple(zip(first_ranks, shares, strict=True)),
    )
