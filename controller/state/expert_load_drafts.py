"""Expert loads of a job: incomplete steps and running means.

Values only: `controller/machine/expert_loads.py` makes new ones and never changes an array.
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
    """A layer in a step: rows of each expert [experts], and the number of ranks covered [experts].

    `reported`: for each rank, a bit for each expert whose rows it has reported, so that repeated
    reports have no effect.
    """

    generation: int
    reported: RankMap[int] = field(default_factory=RankMap)
    rows: npt.NDArray[np.float64]
    num_ranks: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadDrafts:
    """The expert loads of a job.

    `fresh`: layers of steps that may be complete; `folded`: those recently folded into the means;
    `means`: by layer the mean rows of each expert, and the number of steps.
    """

    by_layer: Mapping[StepLayer, LayerDraft] = field(default_factory=dict)
    fresh: frozenset[StepLayer] = frozenset()
    folded: frozenset[StepLayer] = frozenset()
    means: Mapping[int, tuple[npt.NDArray[np.float64], int]] = field(default_factory=dict)
    newest_step: int = -1
