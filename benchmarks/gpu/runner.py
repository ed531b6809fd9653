"""Runs each section in a process of its own, with a limit, so that a failure costs only itself.

`run_all` starts the processes and collects outcomes; `run_one` is what such a process does.
"""

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.gpu.sections import Section
from pacekeeper.core.errors import ConfigError

LEAST_S = 15.0  # left of the whole time: with less no section is started
_KILL_S = 10.0  # for which a killed process is waited for: a driver may hold it
_LOG_LINES = 25
_PATIENCE_ON_CPU = 4.0  # of a rehearsal: many processes may share few cores


class Status(StrEnum):
    """How a section ended."""

    RAN = "ran"
    NOT_RUN = "not run"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a section.

    Attributes:
        name: Of the section.
        status: How it ended.
        reason: Why it did not run, or how it failed; "" if it ran.
        took_s: Seconds of its process.
        figures: Of its dataclass, by name.
        log: Last lines of its output, if it failed.
    """

    name: str
    status: Status
    reason: str = ""
    took_s: float = 0.0
    figures: dict[str, Any] | None = None
    log: str = ""


def run_all(
    sections: Sequence[Section],
    *,
    device: str,
    scale: str,
    total_s: float,
    num_devices: int,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """Run sections one after the other, within a time for all of them.

    Args:
        sections: In this order.
        device: "cuda" or "cpu".
        scale: Name of the sizes: "real" or "tiny".
        total_s: For all; sections for which no time is left do not run.
        num_devices: GPUs of this machine.
        clock: Seconds that never go back.
    """
    end_s = clock() + total_s
    for section in sections:
        left_s = end_s - clock()
        if device == "cuda" and num_devices < section.least_devices:
            needed = {2: "two"}.get(section.least_devices, str(section.least_devices))
            reason = f"needs {needed} GPUs"
            yield Outcome(name=section.name, status=Status.NOT_RUN, reason=reason)
        elif left_s < LEAST_S:
            reason = f"the {total_s:.0f} s for all sections were over"
            yield Outcome(name=section.name, status=Status.NOT_RUN, reason=reason)
        else:
            limit_s = section.limit_s * (1.0 if device == "cuda" else _PATIENCE_ON_CPU)
            yield _in_process(section, device, scale, min(limit_s, left_s - _KILL_S / 2))


def _in_process(section: Section, device: str, scale: str, limit_s: float) -> Outcome:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu", "--function", section.function]
        command += ["--device", device, "--scale", scale]
        command += ["--result", str(result), "--limit-s", str(limit_s - 1.0)]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _kill_group(process)
        took_s = time.monotonic() - began_s
        if result.exists():
            given = json.loads(result.read_text())
            return Outcome(name=section.name, took_s=took_s, **given)
        text = log.read_bytes().decode(errors="replace")
        is_late = code is None or "Timeout (" in text  # as faulthandler says
        return Outcome(
            name=section.name,
            status=Status.FAILED,
            reason=f"took longer than {limit_s:.0f} s" if is_late else _how(code or 0),
            took_s=took_s,
            log="\n".join(text.splitlines()[-_LOG_LINES:]),
        )


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        process.wait(_KILL_S)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} does not end: the driver holds it", file=sys.stderr)


def _how(code: int) -> str:
    return f"its process ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def run_one(function: str, device: str, scale: str, result: Path, limit_s: float) -> None:
    """Run the function of a section here, write its outcome, and end this process.

    A hang ends after `limit_s` with the stacks of all threads.
    """
    faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        given = _call(function, device, scale)
    except Exception as error:
        traceback.print_exc()
        name, text = type(error).__name__, " ".join(str(error).split())[:400]
        if name == "NotRun":
            given = {"status": Status.NOT_RUN, "reason": text}
        else:
            lines = traceback.format_exc().splitlines()[-_LOG_LINES:]
            reason = text if name == "AssertionError" else f"{name}: {text}"
            given = {"status": Status.FAILED, "reason": reason, "log": "\n".join(lines)}
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(given))
    partial.rename(result)
    # Nothing after this may change the outcome: atexit of a broken device may hang or crash.
    sys.stdout.flush()
    os._exit(0)


def _call(function: str, device: str, scale: str) -> dict[str, Any]:
    import torch

    from benchmarks.gpu.common import REAL, TINY, NotRun

    module, _, name = function.partition(":")
    try:
        call = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, ConfigError) as error:  # another version of a library
        raise NotRun(str(error)) from error
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        torch.set_num_threads(1)
    figures = call(where, REAL if scale == "real" else TINY)
    return {"status": Status.RAN, "figures": asdict(figures)}
