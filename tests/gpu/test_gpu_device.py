"""On a real CUDA device: times of its events, and NVML's own account of it.

Skips itself where there is no device; nothing here changes a setting of the device.
"""

import time

import torch

from pacekeeper.agent.nvml.client import Nvml, open_nvml
from pacekeeper.trainer.groups.devices import device_uuid, new_event
from pacekeeper.trainer.hooks.compute_timers import DeviceEventClock
from support.gpu import needs_cuda

pytestmark = needs_cuda


def test_times_of_all_micro_batches_are_known_when_the_device_has_passed_them() -> None:
    clock, matrix = DeviceEventClock(new_event), torch.randn(4096, 4096, device="cuda")
    found = []
    for _ in range(5):
        clock.begin()
        torch.mm(matrix, matrix)
        clock.pause()
        torch.mm(matrix, matrix)  # not counted
        clock.resume()
        if (known := clock.end()) is not None:
            found += [known._replace(more=()), *known.more]
    torch.cuda.synchronize()
    found += clock.known()
    assert len(found) == 5 and clock.num_lost == 0
    assert all(one.compute_s > 0.0 for one in found)


def test_nvml_lists_the_device_that_torch_computes_on() -> None:
    torch.ones(1, device="cuda").sum().item()
    nvml = open_nvml()
    assert isinstance(nvml, Nvml)
    samples = nvml.sample(time.monotonic())
    nvml.close()
    own = [one for one in samples if device_uuid(torch.device("cuda", 0)) == one.device_uuid]
    assert own and own[0].sm_clock_mhz and own[0].clock_event_reasons is not None
