"""What a device is made of, by NVML: its MIG instances and its NVLinks, counted by asking."""

from dataclasses import replace
from functools import partial
from typing import Any

from pacekeeper.agent.nvml.device import Device, Instance, ask, text
from pacekeeper.core.telemetry.samples import DeviceSample

MAX_LINKS = 36  # of a device, by NVML's header


def instances_of(pynvml: Any, device: Device, mode: Any) -> tuple[Instance, ...]:
    """The MIG instances of a device whose MIG `mode` is (current, pending); without MIG none."""
    if mode is None or not mode[0]:
        return ()
    most = ask(pynvml, device, "instances", lambda n, h: n.nvmlDeviceGetMaxMigDeviceCount(h))
    found = []
    for slot in range(most or 0):
        handle = ask(pynvml, device, "instance", partial(_instance, slot=slot))
        if handle is None:
            continue  # no instance has this number
        part = Device(index=device.index, handle=handle)
        uuid = ask(pynvml, part, "uuid", lambda n, h: n.nvmlDeviceGetUUID(h))
        name = ask(pynvml, part, "name", lambda n, h: n.nvmlDeviceGetName(h))
        if uuid is not None:
            found.append(Instance(handle=handle, uuid=text(uuid), name=text(name)))
    return tuple(found)


def samples_of(pynvml: Any, device: Device, whole: DeviceSample) -> tuple[DeviceSample, ...]:
    """The device itself or, in MIG mode, each of its instances.

    An instance has memory of its own; the rest is read of the device it is a part of. NVML tells
    neither utilisation nor processes of instances, and those of the whole are not its.
    """
    if not device.instances:
        return (whole,)
    found = []
    for instance in device.instances:
        part = Device(index=device.index, handle=instance.handle, refused=device.refused)
        memory = ask(pynvml, part, "instance memory", lambda n, h: n.nvmlDeviceGetMemoryInfo(h))
        sample = replace(
            whole,
            device_uuid=instance.uuid,
            name=instance.name,
            parent_uuid=whole.device_uuid,
            utilisation_ratio=None,
            processes=None,
            memory_used_bytes=None if memory is None else int(memory.used),
        )
        found.append(sample)
    return tuple(found)


def count_links(pynvml: Any, device: Device) -> int:
    """How many NVLinks the device has: asked one by one, for no device has the header's maximum."""
    for link in range(MAX_LINKS):
        if ask(pynvml, device, f"link {link}", partial(_link_state, link=link)) is None:
            return link
    return MAX_LINKS


def _instance(pynvml: Any, handle: Any, slot: int) -> Any:
    return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)


def _link_state(pynvml: Any, handle: Any, link: int) -> Any:
    return pynvml.nvmlDeviceGetNvLinkState(handle, link)
