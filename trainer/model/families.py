"""Families of transformers that need a rule of their own; all others need none.

The rules concern which tensors belong to which block. What a family computes is the library's.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """What is special about a family.

    Attributes:
        experts: the name, within a decoder layer, of the experts that are stacked in slots, where
            a layer has several; the others are dense and computed by the library.
        embedding: names of modules after the layers that work before them (EMBEDDING, not HEAD).
    """

    experts: str | None = None
    embedding: tuple[str, ...] = ()


_NONE = Family()
_FAMILIES = {
    # Experts for text and for vision; a text job routes to the former only.
    "ernie4_5_vl_moe": Family(experts="mlp.text_moe.experts"),
    "gemma4": Family(embedding=("per_layer_projection_norm",)),
    "gemma4_text": Family(embedding=("per_layer_projection_norm",)),
}


def family_of(model_type: str) -> Family:
    """The rules of a family, by the configuration's `model_type`."""
    return _FAMILIES.get(model_type, _NONE)
