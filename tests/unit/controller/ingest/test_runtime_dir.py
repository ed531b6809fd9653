"""Where a controller and its front meet: nothing of it outlives the next controller."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pacekeeper.controller.ingest import runtime_dir as folders
from pacekeeper.controller.ingest.runtime_dir import SOCKET, own_folder, stays
from pacekeeper.core.errors import HostError


def test_without_a_place_for_their_socket_the_controller_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(HostError, match="for a socket") as caught, own_folder():
        pass
    assert "TMPDIR" in str(caught.value.remedy)


def killed_in(folder: Path) -> None:
    """A process that made a folder there, with the socket, and was killed."""
    code = (
        "import os, socket\n"
        "from pacekeeper.controller.ingest.runtime_dir import SOCKET, own_folder\n"
        "with own_folder() as folder:\n"
        "    socket.socket(socket.AF_UNIX).bind(str(folder / SOCKET))\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(folder)})
    assert done.returncode == -signal.SIGKILL


def test_what_a_killed_controller_left_goes_with_the_next_one_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory() as short:  # a socket's name has 108 bytes
        monkeypatch.setattr(tempfile, "tempdir", short)
        killed_in(Path(short))
        (left,) = Path(short).iterdir()
        other = Path(short) / "pacekeeper-other"
        other.mkdir()
        with own_folder() as living, socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(living / SOCKET))
            with own_folder() as second:
                assert set(Path(short).iterdir()) == {other, living, second}
        assert list(Path(short).iterdir()) == [other]
        assert not left.exists()


def test_who_listens_there_without_holding_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller from before folders were held lost its socket to the next one, and its calls."""
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        older = Path(short) / "pacekeeper-older"
        older.mkdir()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(older / SOCKET))
            listener.listen()
            with own_folder():
                assert (older / SOCKET).is_socket()
        with own_folder():
            assert not older.exists(), "nobody answers there any more"


def test_a_socket_that_is_taken_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LOOK_S", 0.001)

    async def scene(made: Path) -> None:
        async with asyncio.timeout(60.0):
            staying = asyncio.create_task(stays(made))
            await asyncio.sleep(0.01)
            assert not staying.done()
            made.unlink()
            with pytest.raises(HostError, match="is gone, by which calls come"):
                await staying

    with own_folder() as folder, socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / SOCKET))
        asyncio.run(scene(folder / SOCKET))
