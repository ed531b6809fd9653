"""The price of a layout, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.core.layout import Host, even_layout
from pacekeeper.predictor.cost_model import CostModel
from pacekeeper.predictor.forecast import Workload, forecast

LAYOUT = even_layout(ranks=[0, 1], num_layers=2, num_experts=2, replicas=2)
MODEL = CostModel(
    coefficients=np.array([1.0, 0.01, 0.0, 0.001, 0.1]), covariance=np.zeros((5, 5)), sigma=0.02
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
    assert price.fluid_step_s == pytest.approx(8.3)


def test_everybody_waits_for_the_slow_rank_in_every_layer() -> None:
    price = forecast(LAYOUT, model=MODEL, workload=WORK, speeds={1: 0.5}, overhead_s=0.25)
    assert price.dense_s == pytest.approx({0: 6.3, 1: 12.6})
    assert price.layer_s == pytest.approx((2.0, 2.0))
    assert price.step_s == pytest.approx(12.6 + 4.0 + 0.25)
    assert price.fluid_step_s == pytest.approx(1.3 + 14.0 / 1.5 + 0.25)


def test_shares_move_work_and_rows_are_whole() -> None:
    hosts = (Host(0, 0.75), Host(1, 0.25))
    layout = replace(LAYOUT, experts=((hosts, hosts),) * 2, batch_shares=((0, 0.66), (1, 0.34)))
    price = forecast(layout, model=MODEL, workload=WORK, speeds={1: 0.5})
    assert price.dense_s == pytest.approx({0: 1.0 + 7.0 + 0.3, 1: 2 * (1.0 + 3.0 + 0.3)})
    assert price.layer_s == pytest.approx((1.5, 1.5))


def test_a_replica_without_share_is_not_active() -> None:
    alone = (Host(0, 1.0), Host(1, 0.0))
    layout = replace(LAYOUT, experts=((alone, alone),) * 2)
    price = forecast(layout, model=MODEL, workload=WORK, speeds={})
    assert price.dense_s == pytest.approx({0: 6.3, 1: 6.0})


def test_without_a_model_a_slower_rank_still_costs_more_and_relief_less() -> None:
    even = forecast(LAYOUT, model=None, workload=WORK, speeds={})
    slow = forecast(LAYOUT, model=None, workload=WORK, speeds={1: 0.5})
    hosts = (Host(0, 2 / 3), Host(1, 1 / 3))
    relief = replace(LAYOUT, experts=((hosts, hosts),) * 2, batch_shares=((0, 0.7), (1, 0.3)))
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
