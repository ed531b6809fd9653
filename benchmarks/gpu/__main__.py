"""`python -m benchmarks.gpu`: all sections, the table, and one last line of JSON."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import page, summary
from benchmarks.gpu.runner import Outcome, Status, run_all, run_one
from benchmarks.gpu.sections import SECTIONS

TOTAL_S = 390.0
_DOCS = Path(__file__).resolve().parents[2] / "docs"


def machine(device: str) -> dict[str, Any]:
    """Return what is measured on."""
    import torch

    found: dict[str, Any] = {"kind": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "GPU": f"{torch.cuda.device_count()} x {properties.name}",
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "multiprocessors": properties.multi_processor_count,
            "compute capability": f"{properties.major}.{properties.minor}",
            "CUDA": torch.version.cuda,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    versions = {"torch": torch.__version__, "Python": platform.python_version()}
    try:
        versions["transformers"] = version("transformers")
    except PackageNotFoundError:
        versions["transformers"] = "none"
    return found | versions | {"cores": os.cpu_count() or 0}


def missing_device(device: str) -> str:
    """Return why the device cannot be used here; "" if it can."""
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} cannot import torch ({error}): name another with GPU_PYTHON"
    if device == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} sees no CUDA device"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="not used: all data is made here")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--scale", choices=["real", "tiny"], help="default: real on CUDA")
    parser.add_argument("--out", type=Path, help="folder of gpu.md and gpu.json; default: docs")
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="seconds for all sections")
    names = [section.name for section in SECTIONS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these sections")
    parser.add_argument("--function", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, default=60.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    scale = options.scale or ("real" if options.device == "cuda" else "tiny")
    if options.function:
        run_one(options.function, options.device, scale, options.result, options.limit_s)
    if options.device == "cpu" and options.out is None:
        parser.error("--device cpu is a rehearsal: give --out, the page is for GPUs")
    if reason := missing_device(options.device):
        print(f"not run: {reason}")
        print(json.dumps({"ran": False, "reason": reason}))
        return 0
    import torch

    outcomes: list[Outcome] = []
    chosen = [section for section in SECTIONS if section.name in options.only]
    for outcome in run_all(
        chosen,
        device=options.device,
        scale=scale,
        total_s=options.total_s,
        num_devices=torch.cuda.device_count(),
    ):
        print(summary([outcome]), flush=True)
        if outcome.log:
            print(outcome.log, flush=True)
        outcomes.append(outcome)
    run = {
        "ran": True,
        "machine": machine(options.device),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    _write(options.out or _DOCS, run)
    print(json.dumps(run))
    return 1 if _has_failed(outcomes) else 0


def _has_failed(outcomes: Iterable[Outcome]) -> bool:
    return any(outcome.status is Status.FAILED for outcome in outcomes)


def _write(folder: Path, run: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(run, indent=1) + "\n")
    (folder / "gpu.md").write_text(page(run))


if __name__ == "__main__":
    sys.exit(main())
