"""What programs get: every field the documentation names, and never a number that is none."""

import json

import pytest

from pacekeeper.cli.analysis.replay import verdicts_document
from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.recorded.anomalies import Anomaly, AnomalyKind, TraceReport, WhatIf
from pacekeeper.predictor.recorded.trace import Trace
from support.tree import ROOT

TRACE = Trace(name="t", source="native", workers=())
TROUBLE = Anomaly(
    kind=AnomalyKind.COMPUTE, rank=3, stage=1, slowdown=1.5, low=1.4, high=float("inf"),
    first_step=7, tier=Tier.CONFIRMED, reason="because", cause="heat",
)  # fmt: skip
COSTS = WhatIf(
    slowdown=1.5, by_dp={0: 1.25}, by_stage={0: 1.5, 1: 1.0}, by_op={"forward-compute": 1.25},
    by_rank={3: float("nan")}, worst_workers_share=0.5, last_stage_share=float("nan"),
)  # fmt: skip


def test_every_field_is_there_and_what_is_not_finite_is_null() -> None:
    answer = verdicts_document(
        [(TRACE, TraceReport(anomalies=(TROUBLE,), what_if=COSTS, notes=("n",)))]
    )
    (finding,) = json.loads(json.dumps(answer, allow_nan=False))["findings"]
    assert finding == {
        "rank": 3, "stage": 1, "kind": "compute", "slowdown": 1.5, "slowdown_low": 1.4,
        "slowdown_high": None, "first_step": 7, "last_step": None, "tier": "confirmed",
        "reason": "because", "cause": "heat",
    }  # fmt: skip
    assert answer["S"] == 1.5
    assert answer["what_if"]["share_by_stage"] == {0: 1.0, 1: 0.0}
    assert answer["what_if"]["share_by_kind"] == pytest.approx({"forward-compute": 0.5})
    assert answer["what_if"]["by_rank"] == answer["what_if"]["share_by_rank"] == {3: None}
    assert answer["what_if"]["last_stage_share"] is None
    page = (ROOT / "docs" / "traces.md").read_text()
    for name in (*answer, *finding, *answer["what_if"]):
        assert f"`{name}`" in page, name


def test_where_nothing_is_lost_nobody_has_a_share() -> None:
    even = WhatIf(slowdown=1.0, by_rank={0: 1.0})
    answer = verdicts_document([(TRACE, TraceReport(anomalies=(), what_if=even))])
    assert answer["what_if"]["share_by_rank"] == {}


def test_findings_of_several_runs_name_theirs() -> None:
    verdicts = [(TRACE, TraceReport(anomalies=(TROUBLE,) * n, what_if=None)) for n in (0, 2)]
    answer = verdicts_document(verdicts)
    assert [finding["run"] for finding in answer["findings"]] == ["t", "t"]
    assert [run["num_findings"] for run in answer["runs"]] == [0, 2]
