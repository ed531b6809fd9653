"""Opens a recorded run whatever its format: by what is inside the files, not by their names."""

import gzip
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

from pacekeeper.core.errors import DataError
from pacekeeper.core.trace_file import FORMAT as NATIVE_FORMAT
from pacekeeper.predictor.trace import Trace
from pacekeeper.simulator.parquet_file import column_names
from pacekeeper.simulator.read_bytedance import read_bytedance
from pacekeeper.simulator.read_kineto import read_kineto
from pacekeeper.simulator.read_megatron_log import read_megatron_log
from pacekeeper.simulator.read_native import read_native
from pacekeeper.simulator.read_nccl_inspector import read_nccl_inspector
from pacekeeper.simulator.read_smartmoe import ALL_EXPERTS, read_smartmoe
from pacekeeper.simulator.read_steps import read_archive, read_steps

HEAD_BYTES = 1 << 16
ZIP_MAGIC = b"PK"  # of .npz


class Format(StrEnum):
    """The formats that `pacekeeper replay` reads."""

    NATIVE = "native"
    BYTEDANCE = "bytedance"
    SMARTMOE = "smartmoe"
    KINETO = "kineto"
    MEGATRON_LOG = "megatron-log"
    NCCL_INSPECTOR = "nccl-inspector"
    STEPS = "steps"


def _single(read: Callable[[Path], Trace]) -> Callable[[Sequence[Path]], Trace]:
    def read_one(paths: Sequence[Path]) -> Trace:
        if len(paths) != 1:
            raise DataError(
                f"{len(paths)} files of a format that holds a run in one",
                remedy="name one of them",
            )
        return read(paths[0])

    return read_one


READERS: dict[Format, Callable[[Sequence[Path]], Trace]] = {
    Format.NATIVE: read_native,
    Format.BYTEDANCE: _single(read_bytedance),
    Format.SMARTMOE: _single(read_smartmoe),
    Format.KINETO: read_kineto,
    Format.MEGATRON_LOG: _single(read_megatron_log),
    Format.NCCL_INSPECTOR: read_nccl_inspector,
    Format.STEPS: _single(read_steps),
}


def open_trace(path: Path, form: Format | None = None, run: int | None = None) -> Trace:
    """The run in a file, or in all files of a directory (one per node or rank).

    `run` picks one of an archive of step times. Raises DataError where there is none, or where its
    format is not known.
    """
    paths = _files(path)
    if form is None:
        form = detect(paths[0])
    if form is Format.STEPS and _head(paths[0])[:2] == ZIP_MAGIC:
        return _one_of(paths[0], run)
    return READERS[form](paths)


def _one_of(path: Path, run: int | None) -> Trace:
    runs = read_archive(path)
    if run is None or not 0 <= run < len(runs):
        raise DataError(
            f"{path} holds {len(runs)} runs, 0 to {len(runs) - 1}", remedy="name one with --run"
        )
    return runs[run]


def detect(path: Path) -> Format:
    """The format of a file, by its first bytes. Raises DataError where none fits."""
    head = _head(path)
    if head[:4] == b"PAR1":
        return _parquet_format(path)
    if NATIVE_FORMAT.encode() in head.partition(b"\n")[0]:
        return Format.NATIVE
    if b'"coll_perf"' in head:
        return Format.NCCL_INSPECTOR
    if b"elapsed time per iteration" in head:
        return Format.MEGATRON_LOG
    if head[:2] == ZIP_MAGIC or (b"step" in head.partition(b"\n")[0] and b"{" not in head):
        return Format.STEPS
    if head.lstrip()[:1] == b"{" and b'"step"' in head.partition(b"\n")[0]:
        return Format.STEPS
    if head.lstrip()[:1] == b"{":
        return Format.KINETO  # its lists of events may begin far behind
    raise DataError(
        f"{path}: no format that can be read", remedy=f"name one with --format: {', '.join(Format)}"
    )


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"{path}: no such file or directory")
    if not path.is_dir():
        return [path]
    found = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
    if not found:
        raise DataError(f"{path}: an empty directory")
    return found


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if head[:2] == b"\x1f\x8b":
            with gzip.open(path) as packed:
                head = packed.read(HEAD_BYTES)
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: {error}") from None
    return head


def _parquet_format(path: Path) -> Format:
    return Format.SMARTMOE if ALL_EXPERTS in column_names(path) else Format.BYTEDANCE
