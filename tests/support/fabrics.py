"""Transfers of a job, made up: bytes differ by rank and step, some ranks' links are slow."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pacekeeper.core.telemetry.records import Record, StepRecord
from support.machine_driver import step

BYTES_PER_S, JITTER = 1e9, 0.03


class Fabric:
    """Seeded; the computing is that of `machine_driver.step`."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)

    def records(self, number: int, slow: Mapping[int, float], generation: int = 1) -> list[Record]:
        """All records of a step; `slow`: by how much transfers of a rank are slowed."""
        made: list[Record] = []
        for record in step(number, generation=generation):
            if isinstance(record, StepRecord):
                moved = int(self.draw.integers(2_000_000, 4_000_000))
                noise = float(np.exp(self.draw.normal(0.0, JITTER)))
                took_s = (0.0005 + moved / BYTES_PER_S) * slow.get(record.rank, 1.0) * noise
                record = replace(record, transfer_s=took_s, transfer_bytes=moved)
            made.append(record)
        return made
