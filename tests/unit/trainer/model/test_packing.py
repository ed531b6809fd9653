"""Documents in one row do not see each other, in the families that can keep them apart."""

import pytest
import torch

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.model.families import Packing
from pacekeeper.trainer.model.packing import packed_arguments, packing_of
from pacekeeper.trainer.model.skeleton import build_skeleton
from support.tiny_models import in_float64, tiny_config, whole_store

LENGTHS = ((7, 13), (11, 4, 5))
FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "olmoe", "minimax_m2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_of_a_row_are_computed_as_if_alone(family: str) -> None:
    skeleton = whole_store(family, torch.float64).skeleton
    module = skeleton.module
    ids = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    with torch.no_grad(), in_float64(module):
        packed = module(
            input_ids=ids, use_cache=False, **packed_arguments(skeleton, positions, torch.float64)
        ).logits
        joined = module(input_ids=ids, use_cache=False).logits
        for row, lengths in enumerate(LENGTHS):
            first = 0
            for length in lengths:
                place = slice(first, first + length)
                alone = module(input_ids=ids[row : row + 1, place], use_cache=False).logits[0]
                assert torch.allclose(packed[row, place], alone, rtol=0, atol=1e-12)
                first += length
    assert not torch.allclose(packed, joined, rtol=0, atol=1e-3)


def test_a_model_with_a_state_along_the_row_is_refused() -> None:
    skeleton = build_skeleton(tiny_config("qwen3_next"))
    assert packing_of(skeleton) is Packing.NONE
    with pytest.raises(ConfigError):
        packed_arguments(skeleton, torch.arange(4)[None])
