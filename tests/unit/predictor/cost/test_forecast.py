"""The price of a layout, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica, ShardRun
from pacekeeper.predictor.cost.features import FEATURES
from pacekeeper.predictor.cost.forecast import Workload, forecast, row_s
from pacekeeper.predictor.cost.model import CostModel
from support.layouts import pipelines_of, with_shares

LAYOUT = even_layout(ranks=[0, 1], num_layers=2, num_experts=2, replicas=2)
COSTS = {"one": 1.0, "tokens": 0.01, "expert_rows": 0.001, "num_active_experts": 0.1}
MODEL = CostModel(
    coefficients=np.array([COSTS.get(name, 0.0) for name in FEATURES]),
    covariance=np.zeros((len(FEATURES), len(FEATURES))),
    sigma=0.02,
)
WORK = Workload(
    num_rows=10, tokens=1000.0, sum_len_squared=0.0, loads=((1000.0, 1000.0), (2000.0, 0.0))
)


def test_an_even_layout_of_equals() -> None:
    price = forecast(LAYOUT, model=MODEL, workload=WORK, speeds={})
    # 1 fixed + 500 tokens + experts with work: two of the first layer, one of the second.
    assert price.dense_s == pytest.approx({0: 6.3, 1: 6.3})
    assert price.layer_s == pytest.approx((1.0, 1.0))
    assert price.step_s == pytest.approx(8.3)
    assert price.fixed_s == pytest.approx(1.0)
    assert price.expert_s == pytest.approx({0: 2.3, 1: 2.3})


def bent(**costs: float) -> CostModel:
    """The model with other prices."""
    return replace(MODEL, coefficients=np.array([(COSTS | costs).get(f, 0.0) for f in FEATURES]))


def test_rows_beyond_a_knot_cost_more() -> None:
    model = bent(rows_over_256=0.01)
    price = forecast(LAYOUT, model=model, workload=WORK, speeds={})
    # 500 rows at each host of two experts, 1,000 at those of the hot one.
    assert price.layer_s == pytest.approx((1.0 + 2 * 2.44, 1.0 + 7.44))
    twice = forecast(LAYOUT, model=model, workload=replace(WORK, num_microbatches=2), speeds={})
    assert twice.layer_s == pytest.approx((1.0, 1.0 + 4.88))  # 250 and 500 rows at a time


def test_a_row_that_moves_is_worth_what_it_costs_where_it_lies() -> None:
    model = bent(expert_rows=0.0, rows_over_256=0.01)
    assert row_s(model, WORK, LAYOUT) == pytest.approx(0.01)
    quiet = replace(WORK, loads=((100.0, 100.0), (200.0, 0.0)))
    assert row_s(model, quiet, LAYOUT) == 0.0
    assert row_s(MODEL, WORK, LAYOUT) == pytest.approx(0.001)
    assert row_s(MODEL, replace(WORK, loads=()), LAYOUT) == 0.001


def test_documents_and_dense_work_follow_the_shares_of_batch_and_tensor() -> None:
    work = replace(WORK, num_documents=100.0)
    price = forecast(LAYOUT, model=bent(num_documents=0.02), workload=work, speeds={})
    assert price.dense_s == pytest.approx({0: 7.3, 1: 7.3})


def test_ranks_of_a_tensor_group_share_its_dense_work_by_their_shards() -> None:
    groups = ((ShardRun(0, 0, 3), ShardRun(1, 3, 4)),)
    pipelines = pipelines_of([(0, 2, groups)], [1.0])
    layout = replace(LAYOUT, num_attention_shards=4, num_mlp_shards=4, pipelines=pipelines)
    price = forecast(layout, model=MODEL, workload=WORK, speeds={})
    assert price.dense_s == pytest.approx({0: 1.0 + 7.5 + 0.3, 1: 1.0 + 2.5 + 0.3})


def test_everybody_waits_for_the_slow_rank_in_every_layer() -> None:
    price = forecast(LAYOUT, model=MODEL, workload=WORK, speeds={1: 0.5})
    assert price.dense_s == pytest.approx({0: 6.3, 1: 12.6})
    assert price.layer_s == pytest.approx((2.0, 2.0))
    assert price.step_s == pytest.approx(12.6 + 4.0)


def test_shares_move_work_and_rows_are_whole() -> None:
    hosts = (ExpertReplica(0, 0.75), ExpertReplica(1, 0.25))
    layout = with_shares(replace(LAYOUT, experts=((hosts, hosts),) * 2), 0.66, 0.34)
    price = forecast(layout, model=MODEL, workload=WORK, speeds={1: 0.5})
    assert price.dense_s == pytest.approx({0: 1.0 + 7.0 + 0.3, 1: 2 * (1.0 + 3.0 + 0.3)})
    assert price.layer_s == pytest.approx((1.5, 1.5))


def test_a_replica_without_share_is_not_active() -> None:
    alone = (ExpertReplica(0, 1.0), ExpertReplica(1, 0.0))
    layout = replace(LAYOUT, experts=((alone, alone),) * 2)
    price = forecast(layout, model=MODEL, workload=WORK, speeds={})
    assert price.dense_s == pytest.approx({0: 6.3, 1: 6.0})


def test_without_a_model_a_slower_rank_still_costs_more_and_relief_less() -> None:
    even = forecast(LAYOUT, model=None, workload=WORK, speeds={})
    slow = forecast(LAYOUT, model=None, workload=WORK, speeds={1: 0.5})
    hosts = (ExpertReplica(0, 2 / 3), ExpertReplica(1, 1 / 3))
    relief = with_shares(replace(LAYOUT, experts=((hosts, hosts),) * 2), 0.7, 0.3)
    relieved = forecast(relief, model=None, workload=WORK, speeds={1: 0.5})
    assert even.step_s < relieved.step_s < slow.step_s
    assert even.step_s == pytest.approx(1.0, rel=0.1)  # in units of an even step


def test_dense_layers_have_no_experts_to_wait_for() -> None:
    layout = even_layout(ranks=[0, 1], num_layers=1, num_experts=0, replicas=1)
    work = replace(WORK, loads=((),))
    assert forecast(layout, model=MODEL, workload=work, speeds={}).layer_s == (0.0,)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="2 experts, got 1 loads"):
        forecast(LAYOUT, model=None, workload=replace(WORK, loads=((1.0,),)), speeds={})
    with pytest.raises(ValueError, match="above 0"):
        forecast(LAYOUT, model=None, workload=WORK, speeds={0: 0.0})
