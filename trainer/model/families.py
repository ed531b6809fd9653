"""Families of transformers that need a rule of their own; all others need none.

The rules concern where things are and how they are passed. What a family computes is the library's.
"""

from dataclasses import dataclass
from enum import StrEnum


class Packing(StrEnum):
    """How a family keeps the documents of one row apart."""

    POSITIONS = "positions"  # position ids that start again at 0
    MASKS = "masks"  # a mask by kind of layer: its forward does not look at position ids
    NONE = "none"  # states, convolutions or attention without masks run across documents


@dataclass(frozen=True, slots=True)
class Family:
    """What is special about a family.

    Attributes:
        experts: the name, within a decoder layer, of the experts that are stacked in slots, where
            a layer has several; the others are dense and computed by the library.
        embedding: names of modules after the layers that work before them (EMBEDDING, not HEAD).
        scores: whether its routers return the scores of experts, not their logits.
        packing: how the documents of one row are kept apart.
    """

    experts: str | None = None
    embedding: tuple[str, ...] = ()
    scores: bool = False
    packing: Packing = Packing.POSITIONS


_NONE = Family()
_FAMILIES = {
    "afmoe": Family(scores=True, packing=Packing.MASKS),
    # Experts for text and for vision; a text job routes to the former only.
    "ernie4_5_vl_moe": Family(experts="mlp.text_moe.experts", packing=Packing.NONE),
    "gemma4": Family(embedding=("per_layer_projection_norm",)),
    "gemma4_text": Family(embedding=("per_layer_projection_norm",)),
    "glm4v_moe": Family(packing=Packing.NONE),
    "gpt_oss": Family(packing=Packing.MASKS),
    "inkling_text": Family(packing=Packing.NONE),
    "inkling2_text": Family(packing=Packing.NONE),
    "lfm2_moe": Family(packing=Packing.NONE),
    "minimax": Family(packing=Packing.NONE),
    "openai_privacy_filter": Family(packing=Packing.NONE),
}


def family_of(model_type: str) -> Family:
    """The rules of a family, by the configuration's `model_type`."""
    return _FAMILIES.get(model_type, _NONE)
