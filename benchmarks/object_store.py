"""An object store for benchmarks and tests: moto's server of S3, in a process of its own."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

START_S = 60.0
BUCKET = "pacekeeper"
_WORDS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@contextlib.contextmanager
def object_store() -> Iterator[str]:
    """The URL of a fresh bucket, which fsspec reaches while this lasts, in children too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    before = dict(os.environ)
    os.environ.update(_WORDS | {"AWS_ENDPOINT_URL": address})
    try:
        _await(server, f"{address}/moto-api/")
        request = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=START_S).close()
        yield f"s3://{BUCKET}"
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.terminate()
        server.wait()


def _await(server: "subprocess.Popen[bytes]", url: str) -> None:
    end_s = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=START_S).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > end_s:
                raise
            time.sleep(0.05)
