"""The work of the one line in a micro-batch, counted in calls of our functions."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import pacekeeper

MOST_CALLS = 36  # of a micro-batch; each costs about 0.5 us after a long one, with cold caches


def calls(num_micro_batches: int, rings: Path) -> Counter[str]:
    """Return the calls of our functions in one step, by name."""
    model, ids = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), torch.zeros(2, 3).long()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = pacekeeper.attach(model, optimizer, job="calls", ring_dir=str(rings))
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("pacekeeper."):
            found[frame.f_code.co_qualname] += 1

    def step() -> None:
        for _ in range(num_micro_batches):
            loss: Tensor = model(ids).sum()
            loss.backward()
        optimizer.step()

    step()
    sys.setprofile(count)
    step()
    sys.setprofile(None)
    assert pace.ring.num_errors == 0
    pace.detach()
    return found


def test_a_micro_batch_is_timed_by_few_calls_and_written_with_others(tmp_path: Path) -> None:
    few, many = calls(4, tmp_path), calls(12, tmp_path)
    assert few["Hooks.on_microbatch_end"] == 4 and many["Hooks.on_microbatch_end"] == 12
    assert few["Reporter.write_done"] == many["Reporter.write_done"]
    assert (many.total() - few.total()) / 8 <= MOST_CALLS, (many - few).most_common()
