"""The benchmark of adapters ends with 1 unless the one line keeps its bar for each micro-batch."""

import json
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import adapter_cost, attach_gaps
from benchmarks.attach_gaps import GAPS, Gaps


@pytest.mark.parametrize(
    ("long_us", "bar", "code"),
    [
        ((45.0, 49.0), "kept", 0),
        ((45.0, 51.0), "not shown: it lies within the noise", 1),
        ((51.0, 160.0), "MISSED", 1),
    ],
)
def test_only_a_bar_that_each_size_keeps_is_a_success(
    long_us: tuple[float, float],
    bar: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def cost(size: attach_gaps.Size, rounds: int) -> dict[str, Any]:
        low_us, high_us = long_us if size.name == "large" else (28.0, 30.0)
        keys = ("per_micro_batch_us", "per_step_us", "with_part_of_step_us", "bare_hooks_us")
        costs = {**dict.fromkeys(keys, low_us), "interval_us": (low_us, high_us)}
        return {"micro_batch_ms": 1.0, "by_gap_us": dict.fromkeys(GAPS, 1.0), **costs}

    monkeypatch.setattr(attach_gaps, "cost", cost)
    monkeypatch.setattr("logging.disable", lambda _: None)
    monkeypatch.setattr("sys.argv", ["adapter_cost", "--only", adapter_cost.ONE_LINE])
    assert adapter_cost.main() == code
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["is_met"] == (code == 0)
    assert said["one_line"]["large"]["bar"] == bar
    assert said["one_line"]["small"]["bar"] == "kept"


def test_the_interval_of_a_cost_holds_what_rounds_differ_in() -> None:
    alone = [_run_of(1e-6, 0.0) for _ in range(20)]
    watched = [_run_of(3e-6, 40e-6) for _ in range(10)] + [_run_of(5e-6, 40e-6) for _ in range(10)]
    same = attach_gaps.interval_us(watched[:10], alone[:10])
    assert same == pytest.approx((5 * 2.0 + 10.0, 5 * 2.0 + 10.0))
    low_us, high_us = attach_gaps.interval_us(watched, alone)
    assert low_us == pytest.approx(5 * 2.0 + 10.0)
    assert high_us == pytest.approx(5 * 4.0 + 10.0)


def _run_of(gap_s: float, step_s: float) -> Gaps:
    """A run in which each gap and each step took as long."""
    return Gaps({name: [gap_s] * 3 for name in GAPS}, [step_s] * 3, [1.0])
