"""A real etcd of one member on loopback; who needs one is skipped where it is not installed."""

import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from types import TracebackType

import pytest

from support.ports import free_port

PATIENCE_S = 60.0


class Etcd:
    """Use as a context manager; skips the test where there is no etcd."""

    def __init__(self) -> None:
        program = shutil.which("etcd")
        if program is None:
            pytest.skip("needs etcd: apt-get install etcd-server")
        self._directory = tempfile.TemporaryDirectory(prefix="etcd-")
        self.address = f"127.0.0.1:{free_port()}"
        peers = f"http://127.0.0.1:{free_port()}"
        client = f"http://{self.address}"
        line = [program, "--data-dir", self._directory.name, "--logger", "zap"]
        line += ["--log-outputs", "/dev/null", "--unsafe-no-fsync"]
        line += ["--listen-client-urls", client, "--advertise-client-urls", client]
        line += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        line += ["--initial-cluster", f"default={peers}"]
        self.process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._await()

    @property
    def url(self) -> str:
        """Of a lease kept there."""
        return f"etcd://{self.address}/pacekeeper"

    def _await(self) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            assert self.process.poll() is None, "etcd ended"
            assert time.monotonic() < give_up_s, "etcd does not answer"
            try:
                with urllib.request.urlopen(f"http://{self.address}/health", timeout=1.0):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)

    def __enter__(self) -> "Etcd":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._directory.cleanup()
