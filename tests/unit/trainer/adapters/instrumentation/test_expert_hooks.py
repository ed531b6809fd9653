"""Hooks on foreign MoE layers: in a compiled graph they are empty, in an eager one they tell."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord
from pacekeeper.trainer.adapters.instrumentation.expert_hooks import watch_experts
from pacekeeper.trainer.adapters.reporter import Reporter, attach
from support.foreign_models import TinyRouter
from support.rings import records_in

TOKENS, CHOICES, EXPERTS = 6, 2, 4


class Experts(torch.nn.Module):
    """All experts of a layer; their input is [rows, hidden], in the order of experts."""

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return rows * 2


class Layer(torch.nn.Module):
    """Routes and computes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.router = TinyRouter(8, EXPERTS, CHOICES)
        self.experts = Experts()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        _, chosen = self.router(hidden)
        counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add_(
            0, chosen.flatten(), torch.ones_like(chosen.flatten())
        )
        rows = hidden.repeat_interleave(CHOICES, dim=0)
        out: torch.Tensor = self.experts(rows, counts)
        return out


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_compiled_layer_stays_one_graph(tmp_path: Path, is_compiled: bool) -> None:
    torch._dynamo.reset()
    graphs: Any = CompileCounter()
    pace = attach(job="j", device=torch.device("cpu"), ring_dir=str(tmp_path))
    reporter, layer = Reporter(pace), Layer()
    handles = watch_experts(reporter, layer, is_sorted=True)
    if is_compiled:
        layer.compile(backend=graphs, fullgraph=True)
    reporter.begin_step(0)
    reporter.enter_pass(0)
    layer(torch.randn(TOKENS, 8))
    reporter.complete_pass()
    reporter.end_step()
    reporter.detach()
    for handle in handles:
        handle.remove()
    assert pace.ring.num_errors == 0
    assert pace.ring.path is not None
    records = records_in(pace.ring.path)
    (told,) = [r for r in records if isinstance(r, MicroBatchRecord)]
    loads = [sum(r.counts) for r in records if isinstance(r, ExpertLoadRecord)]
    if is_compiled:
        assert graphs.frame_count == 1
        assert (told.expert_rows, loads) == (0, [])
    else:
        assert (told.expert_rows, loads) == (TOKENS * CHOICES, [TOKENS * CHOICES])
