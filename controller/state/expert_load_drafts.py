"""What is known of experts' loads so far: parts of steps that wait for the rest, and means. Values.

Nobody changes an array of these in place: `expert_loads` makes new ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.state.persistent_map import RankMap

StepLayer = tuple[int, int]
"""A step and a layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerDraft:
    """A layer in a step: rows of each expert [experts], and how many ranks told them [experts].

    `told`: by the rank that spoke, a bit for each expert it has told: nothing counts twice."""

    generation: int
    told: RankMap[int] = field(default_factory=RankMap)
    rows: npt.NDArray[np.float64]
    num_ranks: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadDrafts:
    """Of a job. `fresh`: places that may have become whole; `folded`: those that were, of late.
    `means`: by layer the mean rows of each expert, and over how many steps."""

    by_layer: Mapping[StepLayer, LayerDraft] = field(default_factory=dict)
    fresh: frozenset[StepLayer] = frozenset()
    folded: frozenset[StepLayer] = frozenset()
    means: Mapping[int, tuple[npt.NDArray[np.float64], int]] = field(default_factory=dict)
    newest_step: int = -1
