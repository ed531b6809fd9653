"""Rows of several documents: the arguments that keep them apart, by family."""

from typing import Any

import torch

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.families import Packing, family_of
from pacekeeper.trainer.model.skeleton import Skeleton


def packing_of(skeleton: Skeleton) -> Packing:
    """How the model keeps documents apart; NONE for recurrent models."""
    if library.is_recurrent(skeleton.module):
        return Packing.NONE
    return family_of(skeleton.config.model_type).packing


def packed_arguments(
    skeleton: Skeleton,
    position_ids: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Arguments of the model's forward that keep the documents of each row apart.

    Args:
        skeleton: the model.
        position_ids: [B, S] int64, starting again at 0 with each document.
        dtype: data type of the hidden states.

    Raises:
        ConfigError: the model cannot keep documents apart.
    """
    packing = packing_of(skeleton)
    arguments: dict[str, Any] = {"position_ids": position_ids}
    if packing is Packing.NONE:
        raise ConfigError(
            f"{skeleton.config.model_type} cannot keep the documents of a row apart",
            remedy="train it without separation of documents, or with one document per row",
        )
    if packing is Packing.MASKS:
        like = torch.empty(*position_ids.shape, 0, dtype=dtype, device=position_ids.device)
        arguments["attention_mask"] = library.document_masks(skeleton.config, like, position_ids)
    return arguments
