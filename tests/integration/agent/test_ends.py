"""How a real agent process starts and ends: on request, or because the host refuses something."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from pacekeeper.core.errors import ExitCode
from support.agents import PATIENCE_S, Node, PaperController, play, step, until
from support.ports import free_port


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_asked_end_sends_the_last_records_and_is_a_success(
    tmp_path: Path, number: signal.Signals
) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        controller.is_acknowledging = False
        writer = node.ring()
        process = await node.start(poll_interval_s=5.0)
        await until(lambda: controller.streams, "the stream")
        writer.write(step(5))
        process.send_signal(number)
        code, error = await node.ended()
        assert code == 0
        assert controller.steps == [5], "read and sent in the last moment"
        assert "did not acknowledge" not in error, "it ended when the controller had everything"
        assert "Traceback" not in error

    play(tmp_path, body)


def test_an_asked_end_does_not_wait_for_a_controller_that_is_away(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        await controller.stop()
        writer = node.ring()
        await node.start()
        writer.write(step(0))
        await until(writer.heartbeat_mono_s, "a look")
        code, error = await node.stop()
        assert code == 0
        assert "Traceback" not in error

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("status", "text", "exit_code"),
    [
        (
            grpc.StatusCode.FAILED_PRECONDITION,
            "agent 0.1.0 speaks protocol 1, controller 9.9 speaks 7",
            ExitCode.VERSION,
        ),
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            "node name: expected 1 to 253 printable characters",
            ExitCode.CONFIG,
        ),
    ],
)
def test_what_the_controller_refuses_for_good_is_final(
    tmp_path: Path, status: grpc.StatusCode, text: str, exit_code: ExitCode
) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        controller.refusal = (status, text)
        await node.start()
        code, error = await node.ended()
        assert code == exit_code
        assert text in error
        assert "Traceback" not in error

    play(tmp_path, body)


@contextlib.asynccontextmanager
async def taken_port() -> AsyncIterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_what_the_host_refuses_has_a_code_and_a_remedy(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        async with taken_port() as port:
            await node.start(metrics_listen=f"127.0.0.1:{port}")
            code, error = await node.ended()
        assert code == 4
        assert "choose another port with --metrics-listen" in error
        (tmp_path / "file").write_text("")
        for path in (tmp_path / "file", tmp_path / "file" / "rings"):
            await node.start(ring_dir=str(path))
            code, error = await node.ended()
            assert code == 4, error
            assert "--ring-dir" in error and "Traceback" not in error
        first = Node(tmp_path, controller.port)
        await first.start()
        try:
            await until(lambda: controller.streams, "the first agent")
            await node.start()
            code, error = await node.ended()
            assert code == 4
            assert "another agent reads it" in error
        finally:
            await first.kill()

    play(tmp_path, body)


def test_an_unknown_key_is_refused_with_its_name(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        await node.start(pol_interval_s=1.0)
        code, error = await node.ended()
        assert code == 3
        assert "pol_interval_s" in error and "poll_interval_s" in error

    play(tmp_path, body)


def test_prometheus_reads_the_agents_own_counts(tmp_path: Path) -> None:
    async def body(controller: PaperController, node: Node) -> None:
        port = free_port()
        writer = node.ring()
        for number in range(3):
            writer.write(step(number))
        await node.start(metrics_listen=f"127.0.0.1:{port}")
        await until(lambda: len(controller.steps) == 3, "the steps")

        def scrape() -> str:
            url = f"http://127.0.0.1:{port}/metrics"
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                text: str = answer.read().decode()
                return text

        text = ""
        async with asyncio.timeout(PATIENCE_S):
            while "pacekeeper_agent_connected 1.0" not in text:
                text = await asyncio.to_thread(scrape)
        assert "pacekeeper_agent_records_read_total 3.0" in text
        assert "pacekeeper_agent_rings 1.0" in text
        for name in ("records_lost", "records_corrupt", "batches_dropped"):
            assert f"pacekeeper_agent_{name}_total 0.0" in text
        assert "pacekeeper_agent_poll_seconds_count" in text

    play(tmp_path, body)


def test_the_agent_starts_without_the_trainers_libraries() -> None:
    program = (
        "import sys, pacekeeper.cli.services.agent, pacekeeper.agent.daemon\n"
        "print(sorted({'torch', 'numpy', 'scipy', 'pynvml'} & set(sys.modules)))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "[]"
