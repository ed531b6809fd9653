"""Noise of device times: heavy tails, slow drift, rare hiccups; drawn from a given generator.

Times of one device depend on each other, so that no count of independent residuals describes them.
The parameters are measured ones, with their source; what was not measured says so.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

Draw = Callable[[], float]
"""The next number of a seeded source of randomness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseLaw:
    """Factors of the times of successive micro-batches on one device.

    Attributes:
        spread: Standard deviation of the logarithm that is new in each micro-batch.
        tail: Degrees of freedom of its Student t distribution, from 3 on; fewer have longer tails.
        drift: Standard deviation of the part that changes slowly.
        drift_length: Micro-batches after which that part is forgotten by 1/e.
        hiccup_rate: Hiccups that begin, per micro-batch.
        hiccup_least: Relative delay of the smallest hiccup.
        hiccup_power: Of the Pareto distribution of delays: P(delay > x) = (least / x)^power.
        hiccup_length: Mean number of micro-batches of a hiccup.
    """

    spread: float
    tail: int
    drift: float
    drift_length: float
    hiccup_rate: float
    hiccup_least: float
    hiccup_power: float
    hiccup_length: float


# Spread, tail, drift and their correlation: forward passes of 16 ranks of a production job
# (ByteDance StragglerAnalysis, trace AR, Apache-2.0, https://github.com/ByteDance-Seed/
# StragglerAnalysis): scale of a rank's log times 0.017, kurtosis 4.4, correlation 0.39 after 1 and
# 0.13 after 100 micro-batches, 1 in 10,000 above its median by 10 % or more. How long hiccups are
# beyond that is assumed: of 3,436 steps of MLPerf 5.1 (405B, Apache-2.0) 0.26 % took 10 % longer,
# the longest 16 %; of a pretraining run's steps (modded-nanogpt, MIT) some took twice as long.
DEVICE_NOISE = NoiseLaw(
    spread=0.0137,
    tail=6,
    drift=0.0098,
    drift_length=80.0,
    hiccup_rate=5e-5,
    hiccup_least=0.1,
    hiccup_power=1.5,
    hiccup_length=2.0,
)
NO_NOISE = NoiseLaw(
    spread=0.0,
    tail=6,
    drift=0.0,
    drift_length=1.0,
    hiccup_rate=0.0,
    hiccup_least=0.1,
    hiccup_power=1.5,
    hiccup_length=1.0,
)


class Noise:
    """The factors of one device, in order.

    Args:
        law: What they are drawn from.
        normal: Draws from a normal distribution with standard deviation 1.
        uniform: Draws evenly from [0, 1).
    """

    def __init__(self, law: NoiseLaw, *, normal: Draw, uniform: Draw) -> None:
        self._law, self._normal, self._uniform = law, normal, uniform
        self._drift = law.drift * normal()
        self._delay = 0.0  # of the hiccup that goes on

    def next(self) -> float:
        """Return the factor of the next micro-batch; its median is 1."""
        law, normal, uniform = self._law, self._normal, self._uniform
        kept = math.exp(-1.0 / law.drift_length)
        self._drift *= kept
        self._drift += law.drift * math.sqrt(1.0 - kept * kept) * normal()
        # Student t, scaled to a standard deviation of 1.
        squares = sum(normal() ** 2 for _ in range(law.tail))
        new = normal() * math.sqrt((law.tail - 2) / squares)
        if self._delay and uniform() < 1.0 / law.hiccup_length:
            self._delay = 0.0
        if not self._delay and uniform() < law.hiccup_rate:
            self._delay = law.hiccup_least * (1.0 - uniform()) ** (-1.0 / law.hiccup_power)
        return math.exp(self._drift + law.spread * new) * (1.0 + self._delay)
