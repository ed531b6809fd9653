"""Emulated links and their injected fault: declared, never hidden, as the emulated device is.

What is moved is really moved; then the rank waits until the modelled time of its bytes has passed,
and reports that time. A slow link between two ranks or nodes is the same fault on both.
"""

import math
import time
from dataclasses import dataclass

from pacekeeper.core.kernel_laws.noise import Noise
from pacekeeper.trainer.emulation.faults import wait_until

LINK_SHARE = 0.02  # of an even step's time: less than the real exchanges need


@dataclass(slots=True, kw_only=True)
class EmulatedLinks:
    """Times of transfers on an emulated fabric. `slowdown` is the fault: 1.0 = healthy.

    Attributes:
        noise: Of a transfer's time.
        bytes_per_s: Of this rank's link.
    """

    noise: Noise
    bytes_per_s: float = math.inf
    slowdown: float = 1.0
    _spent_s: float = 0.0
    _bytes: int = 0

    def begin(self) -> float:
        """Return the time of now."""
        return time.perf_counter()

    def end(self, began: float, num_bytes: int) -> None:
        """Wait until the modelled time of so many bytes has passed since `began`."""
        modelled_s = num_bytes / self.bytes_per_s * self.noise.next() * self.slowdown
        wait_until(began + modelled_s)
        self._spent_s += modelled_s
        self._bytes += num_bytes

    def take(self) -> tuple[float | None, int]:
        """Return (seconds, bytes) since the last call; (None, 0) if nothing was moved."""
        taken = (self._spent_s, self._bytes) if self._bytes else (None, 0)
        self._spent_s, self._bytes = 0.0, 0
        return taken
