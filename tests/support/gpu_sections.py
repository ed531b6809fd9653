"""Sections for tests of the runner of benchmarks/gpu: one that works, and those that do not."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
from benchmarks.gpu.common import NotRun, Scale, figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    answer: int = figure("the answer")


def works(device: torch.device, scale: Scale) -> Figures:
    return Figures(answer=42)


def cannot_run(device: torch.device, scale: Scale) -> Figures:
    raise NotRun("the moon is not full")


def fails(device: torch.device, scale: Scale) -> Figures:
    raise ValueError("no such kernel")


def crashes(device: torch.device, scale: Scale) -> Figures:
    os.abort()


def hangs(device: torch.device, scale: Scale) -> Figures:
    """With a process of its own, whose number it prints."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    print(f"child {child.pid}", flush=True)
    while True:
        time.sleep(1.0)
