"""Ranks with another text to train on are named before the first step."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.distributed.collectives import LocalFabric
from pacekeeper.trainer.groups.group import PeerLost
from pacekeeper.trainer.toy.model import dataset


class Told(LocalFabric):
    """A group whose members say `crcs`; they leave at once afterwards."""

    def __init__(self, ranks: tuple[int, ...], crcs: Sequence[int]) -> None:
        super().__init__(ranks[0])
        self.ranks = ranks
        self._crcs: Sequence[int] | None = crcs

    def exchange(self, values: Sequence[float]) -> Tensor:
        if self._crcs is None:
            raise PeerLost("they are gone")
        told, self._crcs = self._crcs, None
        return torch.tensor([[float(crc)] for crc in told], dtype=torch.float64)


def test_one_text_for_all_is_what_a_job_begins_with() -> None:
    dataset.check(2**32 - 1, Told((0, 2, 5), [2**32 - 1] * 3))


def test_who_has_another_one_is_named_on_all_ranks() -> None:
    with pytest.raises(ConfigError, match=r"ranks 2 would train on another text than rank 0"):
        dataset.check(7, Told((0, 2, 5), [7, 8, 7]))
    many = Told(tuple(range(40)), [1] + [2] * 39)
    with pytest.raises(ConfigError, match=r"ranks 1-39 would train"):
        dataset.check(2, many)
