"""The detector adds up micro-batches, the forecast multiplies: both must mean the same step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.layout.apportion import apportion
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica, Layout
from pacekeeper.core.telemetry.expert_row_features import KNOTS
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.predictor.cost.features import BENDS, FEATURES, StepSample, sample_of
from pacekeeper.predictor.cost.forecast import Workload, forecast, least_step_s
from pacekeeper.predictor.cost.model import CostModel
from support.layouts import with_shares

ROW_TOKENS, SQUARES_PER_TOKEN, DOCUMENTS_PER_ROW = 100, 60, 3
Case = tuple[Layout, Workload, CostModel]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A layout of uneven shares, whole rows of work on it, and any model."""
    num_ranks, num_layers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, 5))
    layout = even_layout(
        ranks=range(num_ranks),
        num_layers=num_layers,
        num_experts=num_experts,
        replicas=draw(st.integers(1, min(2, num_ranks))),
    )
    experts = tuple(
        tuple(_uneven(draw, tuple(host.rank for host in hosts)) for hosts in layer)
        for layer in layout.experts
    )
    shares = [share for _, share in _shares(draw, layout.ranks)]
    layout = with_shares(replace(layout, experts=experts), *shares)
    num_rows = draw(st.integers(1, 40))
    loads = st.lists(st.integers(0, 5000).map(float), min_size=num_experts, max_size=num_experts)
    work = Workload(
        num_rows=num_rows,
        tokens=float(ROW_TOKENS * num_rows),
        sum_len_squared=float(ROW_TOKENS * SQUARES_PER_TOKEN * num_rows),
        loads=tuple(tuple(draw(loads)) for _ in range(num_layers)),
        num_microbatches=draw(st.integers(1, 8)),
        num_documents=float(DOCUMENTS_PER_ROW * num_rows),
        head_tokens=float(ROW_TOKENS * num_rows),
    )
    units = [draw(st.floats(0.0, 1.0)) for _ in FEATURES]
    model = CostModel(
        coefficients=np.array(units)
        * [1.0, 1e-3, 1e-5, 1e-3, 0.1, 0.1, 1e-3, *[1e-3] * len(BENDS)],
        covariance=np.zeros((len(FEATURES), len(FEATURES))),
        sigma=0.02,
    )
    return layout, work, model


def _shares(draw: st.DrawFn, ranks: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    weights = {rank: draw(st.floats(0.1, 1.0)) for rank in ranks}
    return tuple((rank, weight / sum(weights.values())) for rank, weight in weights.items())


def _uneven(draw: st.DrawFn, ranks: tuple[int, ...]) -> tuple[ExpertReplica, ...]:
    return tuple(ExpertReplica(rank, share) for rank, share in _shares(draw, ranks))


def reported(layout: Layout, work: Workload) -> StepSample:
    """The sample of a step in which every rank did exactly that work, micro-batch by micro-batch.

    Expert rows are reported in millionths: a record has room for whole rows only.
    """
    count, records = work.num_microbatches, []
    for rank in layout.ranks:
        rows = layout.rows_of(work.num_rows).get(rank, 0)
        routed, active, over = 0.0, 0, np.zeros(len(KNOTS))
        for experts, loads in zip(layout.experts, work.loads, strict=True):
            mine = [load * h.share for on, load in zip(experts, loads, strict=True) for h in on
                    if h.rank == rank]  # fmt: skip
            routed += sum(mine)
            active += sum(load > 0.0 for load in mine)
            parts = np.array(mine)[:, None] / count
            over += np.maximum(parts - np.array(KNOTS), 0.0).sum(axis=0)
        by_part = [1.0 / count] * count
        for micro_batch, (own_rows, own_routed) in enumerate(
            zip(apportion(rows, by_part), apportion(round(routed * 1e6), by_part), strict=True)
        ):
            records.append(
                MicroBatchRecord(
                    rank=rank,
                    step=0,
                    micro_batch=micro_batch,
                    generation=1,
                    compute_s=1.0,
                    tokens=own_rows * ROW_TOKENS,
                    sum_len_squared=own_rows * ROW_TOKENS * SQUARES_PER_TOKEN,
                    expert_rows=own_routed,
                    num_active_experts=active,
                    num_documents=own_rows * DOCUMENTS_PER_ROW,
                    head_tokens=own_rows * ROW_TOKENS,
                    **dict(zip(BENDS, np.rint(over * 1e6).astype(int).tolist(), strict=True)),
                )
            )
    return sample_of(records)


@given(cases())
def test_the_forecast_is_what_the_model_expects_of_a_sample_with_that_work(case: Case) -> None:
    layout, work, model = case
    sample = reported(layout, work)
    assert sample.num_microbatches == work.num_microbatches
    dense, experts = sample.features.copy(), sample.features.copy()
    of_rows = [FEATURES.index(name) for name in ("expert_rows", *BENDS)]
    dense[:, of_rows] = 0.0
    experts[:, [i for i in range(len(FEATURES)) if i not in of_rows]] = 0.0
    experts *= 1e-6
    price = forecast(layout, model=model, workload=work, speeds={})
    expected = dense @ model.coefficients
    assert [price.dense_s[rank] for rank in layout.ranks] == pytest.approx(expected.tolist())
    # A layer waits for its slowest rank, so all layers together take the slowest rank at least.
    at_rank = experts @ model.coefficients
    assert sum(price.layer_s) >= at_rank.max() - 1e-6
    if len(work.loads) == 1:
        assert sum(price.layer_s) == pytest.approx(at_rank.max(), abs=1e-6)
    if len(layout.ranks) == 1:  # nobody to wait for
        assert price.step_s == pytest.approx(float((expected + at_rank)[0]), abs=1e-6)


@given(cases())
def test_without_a_model_the_number_changes_no_price(case: Case) -> None:
    layout, work, _ = case
    once = forecast(layout, model=None, workload=replace(work, num_microbatches=1), speeds={})
    often = forecast(layout, model=None, workload=work, speeds={})
    assert often.step_s == pytest.approx(once.step_s)


@given(cases(), st.lists(st.floats(0.05, 1.0), min_size=6, max_size=6), st.booleans())
def test_no_layout_is_cheaper_than_the_least_step_of_its_ranks(
    case: Case, speeds: list[float], has_model: bool
) -> None:
    layout, work, model = case
    of_rank = dict(enumerate(speeds[: job_size(layout)]))
    counts = range(max(1, work.num_microbatches - 1), work.num_microbatches + 3)
    used = model if has_model else None
    least_s = least_step_s(model=used, workload=work, speeds=of_rank, counts=counts)
    standing_by = tuple(set(of_rank) - set(layout.ranks))
    layout = replace(layout, standing_by=standing_by)
    for count in counts:
        of_count = replace(work, num_microbatches=count)
        price = forecast(layout, model=used, workload=of_count, speeds=of_rank)
        assert least_s <= price.step_s * (1.0 + 1e-9)


def job_size(layout: Layout) -> int:
    """All ranks of the job: those of the layout, and two that stand by if there are less than 4."""
    return len(layout.ranks) + 2 * (len(layout.ranks) < 4)


def test_the_least_step_is_that_of_ranks_that_share_all_work_by_their_speeds() -> None:
    units = dict.fromkeys(FEATURES, 0.0) | {"one": 1.0, "tokens": 0.01, "expert_rows": 0.001}
    units |= {"num_active_experts": 0.1, "rows_over_256": 0.01}
    model = CostModel(
        coefficients=np.array([units[name] for name in FEATURES]),
        covariance=np.zeros((len(FEATURES), len(FEATURES))),
        sigma=0.02,
    )
    work = Workload(num_rows=10, tokens=1000.0, sum_len_squared=0.0, loads=((1000.0, 0.0),))
    # One micro-batch, one active expert, 500 rows of it at each rank.
    once_s = 1.0 + (0.1 + 10.0 + 1.0 + 2 * 2.44) / 1.5
    twice_s = 2.0 + (0.2 + 10.0 + 1.0) / 1.5  # no more than 256 rows at a time
    for counts, least_s in (((1,), once_s), ((1, 2, 3, 4), twice_s), ((2,), twice_s)):
        found = least_step_s(model=model, workload=work, speeds={0: 1.0, 1: 0.5}, counts=counts)
        assert found == pytest.approx(least_s)


def test_a_step_without_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="num_microbatches"):
        Workload(num_rows=1, tokens=1.0, sum_len_squared=1.0, loads=(), num_microbatches=0)
