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
        tensor_groups: whether ranks of a tensor group can have slices of its tokens; not where the
            model's own forward takes more than hidden states into its layers, by token.
        stages: whether its layers pass on hidden states and nothing else, so that pipeline stages
            can divide them.
    """

    experts: str | None = None
    embedding: tuple[str, ...] = ()
    scores: bool = False
    packing: Packing = Packing.POSITIONS
    tensor_groups: bool = True
    stages: bool = True


_NONE = Family()
_NO_STAGES = Family(stages=False)  # layers pass on chosen keys, or streams made before the first
_GEMMA4 = Family(embedding=("per_layer_projection_norm",), tensor_groups=False, stages=False)
_FAMILIES = {
    "afmoe": Family(scores=True, packing=Packing.MASKS),
    "deepseek_v4": Family(tensor_groups=False, stages=False),
    # Experts for text and for vision; a text job routes to the former only.
    "ernie4_5_vl_moe": Family(experts="mlp.text_moe.experts", packing=Packing.NONE),
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "glm4v_moe": Family(packing=Packing.NONE),
    "glm5_next": _NO_STAGES,
    "glm_moe_dsa": _NO_STAGES,
    "gpt_oss": Family(packing=Packing.MASKS),
    "hy_v4": _NO_STAGES,
    "inkling_text": Family(packing=Packing.NONE),
    "inkling2_text": Family(packing=Packing.NONE, stages=False),
    "lfm2_moe": Family(packing=Packing.NONE),
    "minimax": Family(packing=Packing.NONE),
    "mistral_large4": _NO_STAGES,
    "openai_privacy_filter": Family(packing=Packing.NONE),
    "qwen4_exp_text": _NO_STAGES,
    "zaya": Family(tensor_groups=False, stages=False),
}


def family_of(model_type: str) -> Family:
    """The rules of a family, by the configuration's `model_type`."""
    return _FAMILIES.get(model_type, _NONE)
