"""What a batch's tensors tell of its work: shapes always, lengths where they lie in host memory."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from pacekeeper.trainer.adapters.instrumentation.batch_features import features_of_batch

IDS = torch.zeros(3, 8, dtype=torch.long)
PACKED = torch.zeros(1, 8, dtype=torch.long)
RESETS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
MASK = torch.tensor([[1] * 8, [1] * 2 + [0] * 6, [1] * 4 + [0] * 4])


@pytest.mark.parametrize(
    ("batch", "skips_padding", "expected"),
    [
        ({}, False, (0, 0, 0)),
        ({"pixel_values": torch.zeros(2, 3, 4, 4)}, False, (0, 0, 0)),
        ({"input_ids": None}, False, (0, 0, 0)),
        ({"input_ids": IDS[0]}, False, (0, 0, 0)),
        ({"input_ids": IDS}, False, (24, 3 * 64, 3)),
        ({"inputs_embeds": torch.zeros(2, 5, 16)}, False, (10, 50, 2)),
        # An attention mask hides padding from the loss, not from the device,
        ({"input_ids": IDS, "attention_mask": MASK}, False, (24, 3 * 64, 3)),
        # but where attention is computed over real tokens only.
        ({"input_ids": IDS, "attention_mask": MASK}, True, (24, 64 + 4 + 16, 3)),
        ({"input_ids": IDS, "attention_mask": MASK.to("meta")}, True, (24, 0, 0)),
        ({"input_ids": IDS, "attention_mask": MASK[None]}, True, (24, 0, 0)),
        # Documents one after the other in a row.
        ({"input_ids": PACKED, "position_ids": RESETS}, False, (8, 9 + 25, 2)),
        ({"input_ids": PACKED, "position_ids": RESETS.to("meta")}, False, (8, 0, 0)),
        ({"input_ids": PACKED, "cu_seq_lens_q": torch.tensor([0, 3, 8])}, False, (8, 34, 2)),
        ({"input_ids": IDS, "decoder_input_ids": IDS[:, :2]}, False, (30, 3 * 64 + 3 * 4, 3)),
    ],
)
def test_work(
    batch: Mapping[str, Any], skips_padding: bool, expected: tuple[int, int, int]
) -> None:
    work = features_of_batch(batch, skips_padding=skips_padding)
    assert (work[0], work[1], work[5]) == expected
    assert (work[2], work[3], sum(work[4]), work[7]) == (0, 0, 0, 1.0)
