"""Writes records and samples to trace files for `pacekeeper replay`. A shell.

One file per incarnation of a job; each contains the samples of the node's devices and kernel too.
Errors never reach the agent: a full disk or the size limit ends a file with one warning.
"""

import contextlib
import logging
import math
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from pacekeeper.agent.rings.ring_batch import RingBatch
from pacekeeper.core.errors import HostError
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.core.telemetry.trace_jsonl import (
    SUFFIX,
    TraceHeader,
    attached_line,
    header_line,
    record_line,
)

_log = logging.getLogger(__name__)


class TraceRecorder:
    """Trace files below `directory`, each of at most `max_bytes`."""

    def __init__(self, directory: Path, *, node: str, max_bytes: int) -> None:
        self._directory = directory
        self._node = node
        self._max_bytes = max_bytes
        self._files: dict[tuple[str, int], TextIO] = {}
        self._sizes: dict[tuple[str, int], int] = {}
        self._sampled_s: dict[str | None, float] = {}  # newest, by device; None: the host

    @classmethod
    def begin(cls, directory: Path, *, node: str, max_bytes: int) -> "TraceRecorder":
        """Create the directory. Raises HostError if it is not writable."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(
                dir=directory
            ):  # agents of several nodes may share the directory
                pass
        except OSError as error:
            raise HostError(
                f"record directory {directory}: {error.strerror}",
                remedy="name a writable one with --record",
            ) from None
        return cls(directory, node=node, max_bytes=max_bytes)

    def write(
        self,
        readings: Sequence[RingBatch],
        devices: Sequence[DeviceSample] = (),
        host: HostSample | None = None,
    ) -> None:
        """Append new records and samples to the files of the jobs.

        Args:
            readings: The batches of one poll. Files of jobs without one are closed.
            devices: Newest samples; those written before are skipped.
            host: Likewise.
        """
        sampled = self._new_samples([*devices, *([] if host is None else [host])])
        for over in self._files.keys() - {(reading.job, reading.run_id) for reading in readings}:
            self._close(over)  # reopened for appending if more records arrive
        for reading in readings:
            key = (reading.job, reading.run_id)
            lines = [attached_line(attachment) for attachment in reading.attached]
            lines += [record_line(record) for record in reading.records]
            if lines or key in self._files:
                lines += sampled
            if lines:
                self._write(key, lines)

    def close(self) -> None:
        """Close all files."""
        for key in list(self._files):
            self._close(key)

    def _new_samples(self, samples: Sequence[DeviceSample | HostSample]) -> list[str]:
        lines = []
        for sample in samples:
            uuid = sample.device_uuid if isinstance(sample, DeviceSample) else None
            if sample.sampled_s > self._sampled_s.get(uuid, -math.inf):
                self._sampled_s[uuid] = sample.sampled_s
                lines.append(record_line(sample))
        return lines

    def _write(self, key: tuple[str, int], lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        if self._sizes.get(key, 0) > self._max_bytes:
            return  # logged when the limit was reached
        try:
            file = self._files.get(key) or self._open(key)
            if (
                self._sizes[key] <= self._max_bytes
            ):  # an earlier run of the agent may have reached it
                file.write(text)
                file.flush()
        except OSError as error:
            _log.warning(
                "recording to %s stopped, job=%s: %s", self._directory, key[0], error.strerror
            )
            self._sizes[key] = self._max_bytes + 1
            self._close(key)
            return
        self._sizes[key] += len(text)
        if self._sizes[key] > self._max_bytes:
            size = self._sizes[key]
            _log.warning(
                "recording to %s stopped, job=%s is full: %d bytes reach record_max_bytes",
                self._directory,
                key[0],
                size,
            )
            self._close(key)

    def _open(self, key: tuple[str, int]) -> TextIO:
        """Open the file; one of an earlier run of the agent is continued."""
        job, run_id = key
        name = f"{job}-{run_id}-{re.sub(r'[^A-Za-z0-9_.-]', '_', self._node)}{SUFFIX}"
        path = self._directory / name
        file = path.open("a", encoding="utf-8")
        self._files[key] = file
        self._sizes[key] = os.fstat(file.fileno()).st_size
        if not self._sizes[key]:
            file.write(header_line(TraceHeader(job=job, run_id=run_id, node=self._node)) + "\n")
        return file

    def _close(self, key: tuple[str, int]) -> None:
        if key in self._files:
            with contextlib.suppress(OSError):  # closing writes the buffered rest again
                self._files.pop(key).close()
