"""The benchmark of adapters ends with 1 where the one line misses its bar for any micro-batch."""

import json
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import adapter_cost, attach_gaps


@pytest.mark.parametrize(("long_us", "code"), [(49.0, 0), (157.0, 1)])
def test_a_miss_at_long_micro_batches_is_no_success(
    long_us: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def cost(size: attach_gaps.Size, rounds: int) -> dict[str, Any]:
        us = {"small": 29.0, "large": long_us}[size.name]
        keys = ("per_micro_batch_us", "per_step_us", "with_part_of_step_us", "bare_hooks_us")
        gaps = dict.fromkeys(attach_gaps.GAPS, us / len(attach_gaps.GAPS))
        return {"micro_batch_ms": 1.0, "by_gap_us": gaps, **dict.fromkeys(keys, us)}

    monkeypatch.setattr(attach_gaps, "cost", cost)
    monkeypatch.setattr("logging.disable", lambda _: None)
    monkeypatch.setattr("sys.argv", ["adapter_cost", "--only", adapter_cost.ONE_LINE])
    assert adapter_cost.main() == code
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["is_met"] == (code == 0)
