"""Opens recorded runs whatever their format: by what is inside the files, not by their names."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pacekeeper.core.errors import DataError
from pacekeeper.core.telemetry.trace_jsonl import FORMAT as NATIVE_FORMAT
from pacekeeper.predictor.recorded.trace import Trace
from pacekeeper.simulator.io.tables import names_in
from pacekeeper.simulator.io.text import head_of, lines_of
from pacekeeper.simulator.readers.bytedance import NEEDED as BYTEDANCE_COLUMNS
from pacekeeper.simulator.readers.bytedance import read_bytedance
from pacekeeper.simulator.readers.formats import Format
from pacekeeper.simulator.readers.kineto import read_kineto
from pacekeeper.simulator.readers.megatron import (
    ROUTING_WORDS,
    read_megatron_log,
    read_megatron_routing,
)
from pacekeeper.simulator.readers.native import read_native
from pacekeeper.simulator.readers.nccl_inspector import read_nccl_inspector
from pacekeeper.simulator.readers.perseus import is_perseus, perseus_traces
from pacekeeper.simulator.readers.smartmoe import ALL_EXPERTS, read_smartmoe
from pacekeeper.simulator.readers.step_times import ZIP_MAGIC, is_steps, read_runs

HEAD_BYTES = 1 << 16
MANY_LINES = 100_000  # looked at for a log's first iteration: launchers talk a lot
MAX_FILES = 20_000
KINETO_WORDS = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"')
ITERATION_WORDS = "elapsed time per iteration"


_Runs = tuple[Trace, ...]
_OF_ALL_FILES: dict[Format, Callable[[Sequence[Path]], _Runs]] = {
    Format.NATIVE: lambda paths: (read_native(paths),),
    Format.KINETO: read_kineto,
    Format.NCCL_INSPECTOR: lambda paths: (read_nccl_inspector(paths),),
    Format.MEGATRON_ROUTING: lambda paths: (read_megatron_routing(paths),),
}
_OF_EACH_FILE: dict[Format, Callable[[Path], _Runs]] = {
    Format.BYTEDANCE: lambda path: (read_bytedance(path),),
    Format.PERSEUS: perseus_traces,
    Format.SMARTMOE: lambda path: (read_smartmoe(path),),
    Format.MEGATRON_LOG: read_megatron_log,
    Format.STEPS: read_runs,
}


def open_runs(path: Path, form: Format | None = None) -> _Runs:
    """The runs in a file, or in a directory: one per node or rank of a run, or one per run.

    Files of a directory that are no trace are left out and said. Raises DataError where there is
    none, or where its format is not known.
    """
    paths = _files(path)
    notes: list[str] = []
    if form is None or len(paths) > 1:
        form, paths, notes = _sorted_out(path, paths, form)
    if form in _OF_ALL_FILES:
        runs = _OF_ALL_FILES[form](paths)
    else:
        runs, damaged = _each(_OF_EACH_FILE[form], paths)
        notes = [*notes, *damaged]
    return tuple(replace(run, notes=(*notes, *run.notes)) for run in runs)


def one_of(runs: _Runs, path: Path, number: int | None) -> Trace:
    """The run of this number, or the only one. Raises DataError where that is not there."""
    if number is None and len(runs) == 1:
        return runs[0]
    if number is None or not 0 <= number < len(runs):
        raise DataError(
            f"{path} holds {len(runs)} runs, 0 to {len(runs) - 1}", remedy="name one with --run"
        )
    return runs[number]


def detect(path: Path) -> Format:
    """The format of a file, by its first bytes. Raises DataError where none fits."""
    head = head_of(path, HEAD_BYTES)
    line, start = head.partition(b"\n")[0], head.lstrip()[:1]
    if head[:2] == ZIP_MAGIC:
        return Format.STEPS
    if NATIVE_FORMAT.encode() in line:
        return Format.NATIVE
    if b'"coll_perf"' in head:
        return Format.NCCL_INSPECTOR
    if line.startswith(b"{") and all(word in head for word in ROUTING_WORDS):
        return Format.MEGATRON_ROUTING
    if ITERATION_WORDS.encode() in head:
        return Format.MEGATRON_LOG
    if (form := _by_columns(names_in(path, head))) is not None:
        return form
    if start in b"{[" and start and any(word in head for word in (*KINETO_WORDS, b'"ph"')):
        return Format.KINETO
    if len(head) == HEAD_BYTES and start.isascii() and _is_long_log(path):
        return Format.MEGATRON_LOG
    raise DataError(
        f"{path}: no format that can be read",
        remedy=f"name one with --format: {', '.join(Format)}",
    )


def _by_columns(names: list[str]) -> Format | None:
    if set(BYTEDANCE_COLUMNS) <= set(names):
        return Format.BYTEDANCE
    if ALL_EXPERTS in names:
        return Format.SMARTMOE
    if is_perseus(names):
        return Format.PERSEUS
    return Format.STEPS if is_steps(names) else None


def _is_long_log(path: Path) -> bool:
    lines = lines_of(path, [])
    return any(ITERATION_WORDS in line for _, line in zip(range(MANY_LINES), lines, strict=False))


def _files(path: Path) -> list[Path]:
    try:
        if not path.exists():
            raise DataError(f"{path}: no such file or directory")
        if path.is_file():
            return [path]
        if not path.is_dir():  # a pipe is read once, a device without end
            raise DataError(
                f"{path}: neither a file nor a directory", remedy="write it to a file first"
            )
        found = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    if not found:
        raise DataError(f"{path}: a directory without files", remedy="name one with a run's files")
    if len(found) > MAX_FILES:
        raise DataError(f"{path}: {len(found)} files", remedy=f"at most {MAX_FILES} are read")
    return found


def _sorted_out(
    path: Path, paths: list[Path], wanted: Format | None
) -> tuple[Format, list[Path], list[str]]:
    """The format of the files, those that have it, and what is said of the others. Where one is
    wanted and no file looks like it, all count as such.

    Raises DataError where no file has a format, or where there are several and none is wanted.
    """
    if len(paths) == 1:
        return detect(paths[0]), paths, []
    by_format: dict[Format, list[Path]] = {}
    others = []
    for one in paths:
        try:
            by_format.setdefault(detect(one), []).append(one)
        except DataError:
            others.append(one.name)
    if wanted is not None:
        if wanted not in by_format:
            return wanted, paths, []
        passed = [one.name for form, own in by_format.items() if form is not wanted for one in own]
        others, by_format = sorted([*others, *passed]), {wanted: by_format[wanted]}
    if not by_format:
        raise DataError(
            f"{path}: none of {len(paths)} files has a format that can be read",
            remedy=f"name one with --format: {', '.join(Format)}",
        )
    if len(by_format) > 1:
        told = ", ".join(f"{form} ({len(own)})" for form, own in by_format.items())
        raise DataError(
            f"{path}: files of several formats: {told}", remedy="name a file, or use --format"
        )
    ((form, own),) = by_format.items()
    few = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
    return (
        form,
        own,
        [f"{len(others)} files left out, no trace of this kind: {few}"] if others else [],
    )


def _each(read: Callable[[Path], _Runs], paths: Sequence[Path]) -> tuple[_Runs, list[str]]:
    """The runs of files that hold whole runs; where there are several, damaged ones are said."""
    runs: list[Trace] = []
    damaged = []
    for path in paths:
        try:
            runs += read(path)
        except DataError as error:
            if len(paths) == 1:
                raise
            damaged.append(f"left out: {error}")
    if not runs:
        raise DataError("; ".join(damaged)[:1000])
    return tuple(runs), damaged
