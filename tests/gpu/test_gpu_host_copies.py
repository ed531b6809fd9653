"""Copies from a real CUDA device: pinned, beside the work of the device, and of the right moment.

Skips itself where there is no device.
"""

import torch

from pacekeeper.trainer.checkpoint.staging import host_copies
from support.gpu import needs_cuda

pytestmark = needs_cuda
NUM_VALUES = 1 << 24


def test_they_hold_what_was_there_when_they_began_though_the_device_goes_on() -> None:
    device = torch.device("cuda")
    copies = host_copies(device)
    assert copies.is_beside
    state = torch.zeros(4, NUM_VALUES, device=device)
    matrix = torch.randn(4096, 4096, device=device)
    for value in (1.0, 2.0, 3.0):
        state.fill_(value)  # the update that the copies have to wait for
        (whole, some), arrival = copies.make(
            lambda to_host: (to_host(state), to_host(state, [3, 1]))
        )
        for _ in range(20):  # forward and backward, which only read
            torch.mm(matrix, matrix)
        waited_s, took_s = copies.settle()
        state.fill_(-value)  # the next update
        torch.cuda.synchronize()
        assert whole.is_pinned() and some.is_pinned()
        assert arrival.wait() == took_s > 0.0 and waited_s >= 0.0
        assert whole.shape == (4, NUM_VALUES) and some.shape == (2, NUM_VALUES)
        assert bool((whole == value).all()) and bool((some == value).all())
