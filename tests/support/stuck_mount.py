"""A real mount whose server stops to answer: a FUSE file system of one file, without libfuse.

The server is a thread of this process: it answers INIT, LOOKUP, GETATTR and OPEN, and never a READ.
"""

import contextlib
import ctypes
import os
import struct
import threading
from pathlib import Path

_DEVICE = "/dev/fuse"
_MNT_FORCE, _MNT_DETACH = 1, 2  # the first ends all requests of a file system that is in use
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _INIT, _OPENDIR = 1, 2, 3, 14, 15, 26, 27
_BATCH_FORGET, _INTERRUPT = 42, 36
_NO_ANSWER = (_FORGET, _BATCH_FORGET, _INTERRUPT, _READ)
_IN = struct.Struct("<IIQQIIII")  # length, opcode, unique, node, uid, gid, pid, padding
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_libc = ctypes.CDLL(None, use_errno=True)


def can_mount() -> bool:
    """Whether this process may mount a FUSE file system."""
    return os.geteuid() == 0 and os.path.exists(_DEVICE) and os.access(_DEVICE, os.W_OK)


class StuckMount:
    """Use as a context manager; `file` is the one whose reads block until `release`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / "item"
        self._device = -1

    def __enter__(self) -> "StuckMount":
        self.directory.mkdir()
        self._device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other"
        mounted = _libc.mount(b"stuck", os.fsencode(self.directory), b"fuse", 0, options.encode())
        if mounted:
            raise OSError(ctypes.get_errno(), "cannot mount a FUSE file system")
        self._server = threading.Thread(target=self._serve, daemon=True, name="stuck-mount")
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """End the mount: blocked reads fail."""
        if self._device >= 0:
            for flags in (_MNT_FORCE, _MNT_DETACH):
                _libc.umount2(os.fsencode(self.directory), flags)
            self._server.join()
            os.close(self._device)
            self._device = -1

    def _serve(self) -> None:
        device = self._device
        while True:
            try:
                request = os.read(device, 1 << 17)
            except OSError:
                return
            _, code, unique, node, *_rest = _IN.unpack_from(request)
            if code in _NO_ANSWER:
                continue
            error, body = self._answer(code, node, request[_IN.size :])
            with contextlib.suppress(OSError):
                os.write(device, _OUT.pack(_OUT.size + len(body), error, unique) + body)

    def _answer(self, code: int, node: int, given: bytes) -> tuple[int, bytes]:
        if code == _INIT:
            _, minor = struct.unpack_from("<II", given)
            return 0, struct.pack(
                "<IIIIHHIIHHI28x", 7, min(minor, 31), 4096, 0, 0, 0, 4096, 1, 0, 0, 0
            )
        if code == _LOOKUP:
            if given.rstrip(b"\0") != b"item":
                return -2, b""
            return 0, struct.pack("<QQQQII", 2, 1, 60, 60, 0, 0) + self._attributes(2)
        if code == _GETATTR:
            return 0, struct.pack("<QII", 60, 0, 0) + self._attributes(node)
        if code in (_OPEN, _OPENDIR):
            return 0, struct.pack("<QII", 1, 0, 0)
        return -38, b""

    def _attributes(self, node: int) -> bytes:
        mode = 0o40755 if node == 1 else 0o100644
        return _ATTR.pack(node, 4096, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
