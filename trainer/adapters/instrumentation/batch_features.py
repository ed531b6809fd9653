"""Features of a batch of token sequences, from shapes and host tensors only.

Padding is computed like other tokens and is counted. Document boundaries on a device are not read,
since that would wait for the device; the squared lengths are then unknown.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pacekeeper.core.telemetry.expert_row_features import NO_ROWS_OVER
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures

NO_FEATURES: MicrobatchFeatures = (0, 0, 0, 0, NO_ROWS_OVER, 0, 0, 1.0)
SEQUENCES = ("input_ids", "decoder_input_ids")  # [sequences, tokens]
EMBEDDED = ("inputs_embeds", "decoder_inputs_embeds")  # [sequences, tokens, hidden]
BEGINS = ("cu_seq_lens_q", "cu_seqlens", "position_ids")  # where documents begin


def features_of_batch(
    batch: Mapping[str, Any], *, skips_padding: bool = False
) -> MicrobatchFeatures:
    """Return tokens, sum of squared lengths and documents of `batch`, as far as they are known.

    Args:
        batch: Tensors by name, such as `input_ids` [sequences, tokens].
        skips_padding: Whether attention covers real tokens only (flash attention with a mask);
            lengths are then read from a mask in host memory.
    """
    shapes = [
        tuple(batch[name].shape[:2])
        for name in (*SEQUENCES, *EMBEDDED)
        if isinstance(batch.get(name), Tensor) and batch[name].dim() >= 2
    ]
    if not shapes:
        return NO_FEATURES
    tokens = sum(rows * length for rows, length in shapes)
    lengths = _document_lengths(batch, skips_padding)
    if lengths is None:
        return (tokens, 0, 0, 0, NO_ROWS_OVER, 0, 0, 1.0)
    if not lengths:
        squared = sum(rows * length * length for rows, length in shapes)
        return (tokens, squared, 0, 0, NO_ROWS_OVER, shapes[0][0], 0, 1.0)
    squared = sum(length * length for length in lengths)
    return (tokens, squared, 0, 0, NO_ROWS_OVER, len(lengths), 0, 1.0)


def _document_lengths(batch: Mapping[str, Any], skips_padding: bool) -> Sequence[int] | None:
    """Return document lengths of a packed or unpadded batch; empty if each row is one document,
    None if unknown.
    """
    names = [name for name in BEGINS if isinstance(batch.get(name), Tensor)]
    if names:
        told: Tensor = batch[names[0]]
        if told.device.type != "cpu":
            return None
        if names[0] != "position_ids":
            return _between(told.flatten())
        begins = (told.flatten() == 0).nonzero().flatten()
        return _between(torch.cat([begins, torch.tensor([told.numel()])]))
    mask = batch.get("attention_mask")
    if not skips_padding or not isinstance(mask, Tensor):
        return ()
    if mask.device.type != "cpu" or mask.dim() != 2:
        return None
    lengths: list[int] = mask.sum(dim=1).tolist()
    return lengths


def _between(bounds: Tensor) -> list[int]:
    lengths: list[int] = bounds.diff().tolist()
    return lengths
