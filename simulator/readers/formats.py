"""The names of the formats that recorded runs come in; a command line's help needs no more."""

from enum import StrEnum


class Format(StrEnum):
    """The formats that `pacekeeper replay` reads."""

    NATIVE = "native"
    BYTEDANCE = "bytedance"
    PERSEUS = "perseus"
    SMARTMOE = "smartmoe"
    KINETO = "kineto"
    MEGATRON_LOG = "megatron-log"
    MEGATRON_ROUTING = "megatron-routing"
    NCCL_INSPECTOR = "nccl-inspector"
    STEPS = "steps"
