"""What a user sees who gets something wrong: one clear line, an exit code, and no traceback."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
import torch

from pacekeeper.cli.common.lazy_group import command as main
from pacekeeper.core.errors import ExitCode
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import StepRecord
from pacekeeper.trainer.hooks.ring_writer import Ring, claim_directory
from support.commands import FRESH, pacekeeper
from support.ports import free_port

ANY_API = ("--listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0")


def assert_refused(done: subprocess.CompletedProcess[str], code: ExitCode, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last


def job_file(folder: Path, more: str = "") -> tuple[str, str]:
    """Options that name a file with what a job cannot do without."""
    path = folder / "job.toml"
    path.write_text(f"[engine]\nmodel = 'm'\ndata = ['a.bin']\n{more}")
    return "--config", str(path)


@pytest.mark.parametrize("part", ["agent", "controller", "launch"])
def test_an_unknown_key_names_file_and_key(part: str, tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text("[detector]\nwarmup=3\n")
    done = pacekeeper(part, "--config", str(config))
    assert_refused(done, ExitCode.CONFIG, "my.toml", "[detector] warmup")


@pytest.mark.parametrize("part", ["agent", "controller", "launch"])
def test_a_wrong_type_names_what_was_expected(part: str, tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text("[engine]\nsteps='many'\n")
    done = pacekeeper(part, "--config", str(config))
    assert_refused(done, ExitCode.CONFIG, "[engine] steps", "int", "many")


@pytest.mark.parametrize("key", ["listen", "api_listen", "metrics_listen"])
def test_an_address_in_a_file_that_is_none_names_file_and_table(key: str, tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text(f"[controller]\n{key} = '7443'\n")
    done = pacekeeper("controller", "--config", str(config))
    assert_refused(done, ExitCode.CONFIG, "my.toml", f"[controller] {key}", "7443")


@pytest.mark.parametrize("part", ["agent", "controller", "demo", "launch"])
def test_a_missing_file_is_named(part: str, tmp_path: Path) -> None:
    done = pacekeeper(part, "--config", str(tmp_path / "none.toml"))
    assert_refused(done, ExitCode.CONFIG, "none.toml")


def test_output_to_a_full_disk_is_an_error_of_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*FRESH, "doctor", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == ExitCode.HOST
    assert (
        done.stderr == "pacekeeper: cannot write all output: No space left on device; free space\n"
    )


def test_an_option_without_its_value_is_no_directory() -> None:
    """As `--config "$UNSET"` gives it."""
    assert_refused(pacekeeper("agent", "--config", ""), ExitCode.USAGE, "--config", "a path")


def test_a_byte_order_mark_is_no_syntax_error(tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_bytes(b"\xef\xbb\xbf[agent]\nnoed = 1\n")
    assert_refused(pacekeeper("agent", "--config", str(config)), ExitCode.CONFIG, "[agent] noed")


@pytest.mark.parametrize(
    "words", ["explain", "approve", "deny", "plan eplb job t.npz --generation"]
)
def test_a_number_that_no_store_gives_is_refused_before_it_is_sent(words: str) -> None:
    done = pacekeeper(*words.split(), str(2**64))
    assert_refused(done, ExitCode.USAGE, str(2**64), "not in the range")


@pytest.mark.parametrize("part", ["agent", "controller", "launch"])
def test_a_file_that_is_no_text_is_named(part: str, tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_bytes(b"\xff\xfe[engine]")
    done = pacekeeper(part, "--config", str(config))
    assert_refused(done, ExitCode.CONFIG, "my.toml")


def test_a_port_in_use_says_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        store = str(tmp_path / "store.sqlite")
        done = pacekeeper("controller", *ANY_API[2:], "--listen", address, "--store", store)
        assert_refused(done, ExitCode.HOST, address, "--listen")
        done = pacekeeper("controller", *ANY_API, "--store", store, "--metrics-listen", address)
        assert_refused(done, ExitCode.HOST, address, "--metrics-listen")
        done = pacekeeper("agent", "--ring-dir", str(tmp_path), "--metrics-listen", address)
        assert_refused(done, ExitCode.HOST, address, "--metrics-listen")
        given = job_file(tmp_path)
        done = pacekeeper("launch", *given, "--rendezvous", address, "--ring-dir", str(tmp_path))
        assert_refused(done, ExitCode.HOST, address, "--rendezvous")


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("controller", "--listen", "NOWHERE"), "--listen"),
        (("controller", "--listen", "127.0.0.1:0", "--metrics-listen", "NOWHERE"), "--metrics-"),
        (("agent", "--ring-dir", "DIR", "--metrics-listen", "NOWHERE"), "--metrics-listen"),
        (("launch", "--ring-dir", "DIR", "--rendezvous", "NOWHERE"), "--rendezvous"),
    ],
)
@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_gets_no_remedy_about_ports(
    arguments: tuple[str, ...], option: str, host: str, tmp_path: Path
) -> None:
    words = {"NOWHERE": f"{host}:29555", "DIR": str(tmp_path)}
    given = [words.get(word, word) for word in arguments]
    if given[0] == "controller":
        given += ["--store", str(tmp_path / "store.sqlite")]
    given += job_file(tmp_path) if given[0] == "launch" else ("--insecure",)
    done = pacekeeper(*given)
    assert_refused(done, ExitCode.HOST, host, option)


def test_a_rendezvous_that_nobody_knows_is_said_on_the_other_nodes_too(tmp_path: Path) -> None:
    done = pacekeeper(
        *("launch", *job_file(tmp_path), "--num-nodes", "2", "--node-rank", "1"),
        *("--insecure-rendezvous", "--ring-dir", str(tmp_path)),
        *("--rendezvous", "no-such-host.invalid:29555"),
    )
    assert_refused(done, ExitCode.UNREACHABLE, "no-such-host.invalid")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_device_that_is_not_there_is_said_before_anything_starts(tmp_path: Path) -> None:
    rings = tmp_path / "rings"
    done = pacekeeper("launch", *job_file(tmp_path), "--ring-dir", str(rings), "--device", "cuda")
    assert_refused(done, ExitCode.HOST, "CUDA", "--device")
    assert not rings.exists()


def test_more_ranks_than_this_machine_holds_are_refused_before_any_starts(tmp_path: Path) -> None:
    given, rings = job_file(tmp_path), tmp_path / "rings"
    done = pacekeeper("launch", *given, "--ring-dir", str(rings), "--ranks-per-node", "16000")
    assert_refused(done, ExitCode.HOST, "16000", "--ranks-per-node")
    assert not rings.exists()


def test_a_ring_directory_that_can_not_be_written_ends_the_agent_with_a_remedy(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    done = pacekeeper("agent", "--ring-dir", str(tmp_path / "file" / "x"), "--metrics-listen", "")
    assert_refused(done, ExitCode.HOST, str(tmp_path / "file" / "x"))


def test_a_run_directory_that_can_not_be_made_ends_the_demo_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = pacekeeper("demo", "--run-dir", str(tmp_path / "file"))
    assert_refused(done, ExitCode.HOST, str(tmp_path / "file"), "--run-dir")


def test_a_missing_torch_is_said_with_a_remedy(tmp_path: Path) -> None:
    without = (
        "import sys; sys.modules['torch'] = None; from pacekeeper.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", without, "launch", *job_file(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert_refused(done, ExitCode.HOST, "torch", "pacekeeper[trainer]")


def test_ranks_write_their_rings_where_the_file_sends_the_agent(tmp_path: Path) -> None:
    with closing_claim(tmp_path, job="mine"):
        given = job_file(tmp_path, f"job = 'mine'\n[agent]\nring_dir = '{tmp_path}'\n")
        done = pacekeeper("launch", *given, "--rendezvous", f"127.0.0.1:{free_port()}")
        assert_refused(done, ExitCode.HOST, str(tmp_path), "'mine'")


@contextmanager
def closing_claim(directory: Path, *, job: str) -> Iterator[None]:
    """As if another launch of `job` ran there."""
    claim = claim_directory(directory, job)
    try:
        yield
    finally:
        os.close(claim)


def test_a_job_has_a_run_directory_of_its_own_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")  # so that it says where it would have written
    done = pacekeeper(
        *("launch", *job_file(tmp_path), "--job", "mine", "--ranks-per-node", "1"),
        *("--ring-dir", str(tmp_path / "rings"), "--rendezvous", f"127.0.0.1:{free_port()}"),
        cwd=tmp_path,
    )
    assert done.returncode == ExitCode.HOST
    assert "runs/mine/steps-0.jsonl" in done.stderr


def test_a_store_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    store = tmp_path / "notes.txt"
    store.write_text("my notes, not a database at all, and longer than a page header" * 50)
    before = store.read_bytes()
    done = pacekeeper("controller", *ANY_API, "--store", str(store))
    assert_refused(done, ExitCode.HOST, "notes.txt", "a writable file of ours")
    assert store.read_bytes() == before


@pytest.mark.parametrize("command", ["status", "incidents"])
def test_no_controller_is_said_with_its_address(command: str) -> None:
    done = pacekeeper(command, "--controller", "127.0.0.1:1")
    assert_refused(done, ExitCode.UNREACHABLE, "127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--rank", "9"), "--rank"),
        (("demo", "--slowdown", "0.5"), "--slowdown"),
        (("demo", "--steps", "10"), "--steps"),
        (("demo", "--fault", "stop"), "--fault"),
        (("launch", "--node-rank", "3", "--num-nodes", "2"), "node-rank"),
        (("launch", "--steps", "0"), "steps"),
        (("launch", "--ranks-per-node", "20000"), "16384"),
        (("launch", "--num-nodes", "100000000"), "16384"),
        (("launch", "--ranks-per-node", "0"), "rank"),
        (("launch", "--rendezvous", "127.0.0.1:0"), "HOST:PORT"),
        (("launch", "--join", "node0:29400,node1"), "node1"),
        (("agent", "--controller", "nowhere"), "HOST:PORT"),
        (("agent", "--metrics-listen", "all"), "metrics_listen"),
        (("status", "--controller", ""), "HOST:PORT"),
        (("incidents", "--controller", "here:port"), "HOST:PORT"),
        (("controller", "--listen", "7443"), "listen"),
        (("controller", "--metrics-listen", "a"), "metrics_listen"),
        (("demo", "--slowdown", "nan"), "--slowdown"),
    ],
)
def test_an_impossible_option_names_what_was_expected(
    arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    is_new_job = arguments[0] == "launch" and "--join" not in arguments
    given = job_file(tmp_path) if is_new_job else ()
    assert_refused(pacekeeper(*arguments, *given), ExitCode.CONFIG, words)


def test_an_unknown_command_is_a_usage_error_of_a_fresh_process() -> None:
    done = subprocess.run([*FRESH, "dance"], capture_output=True, text=True)
    assert done.returncode == ExitCode.USAGE and "dance" in done.stderr


def every_command() -> list[tuple[str, ...]]:
    """The words of each command and of each command below it, from the table itself."""
    found: list[tuple[str, ...]] = []
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        found.append((name,))
        if isinstance(command, click.Group):
            found += [(name, below) for below in command.list_commands(context)]
    return found


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from pacekeeper.cli.common.lazy_group import command\n"
        "heavy = {'torch', 'scipy', 'grpc', 'matplotlib', 'numpy'}\n"
        f"for words in {every_command()}:\n"
        "    command([*words, '--help'], standalone_mode=False)\n"
        "    if heavy & set(sys.modules): sys.exit(f'{words} loads {heavy & set(sys.modules)}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") == len(every_command())


@pytest.mark.parametrize("part", ["agent.daemon", "controller.app.controller"])
def test_the_services_load_neither_torch_nor_scipy(part: str) -> None:
    code = f"import sys, pacekeeper.{part}; print(sorted({{'torch', 'scipy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_doctor_answers_programs_too() -> None:
    done = pacekeeper("doctor", "--json")
    checks = {check["name"]: check["health"] for check in json.loads(done.stdout)}
    assert checks["python"] == "ok"
    assert all(health in ("ok", "limited", "broken") for health in checks.values())


def test_doctor_says_when_a_part_can_not_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = pacekeeper("doctor", "--ring-dir", str(tmp_path / "file" / "x"))
    assert done.returncode == ExitCode.HOST
    assert "broken" in done.stdout


def test_a_path_that_the_system_refuses_to_look_at_does_not_end_doctor() -> None:
    done = pacekeeper("doctor", "--ring-dir", f"/tmp/{'x' * 300}")
    assert done.returncode == ExitCode.HOST
    assert "broken" in done.stdout and "Traceback" not in done.stderr


def test_doctor_shows_brackets_in_a_path_as_they_are() -> None:
    done = pacekeeper("doctor", "--ring-dir", "[/x]/[bold]")
    assert done.returncode == ExitCode.OK, done.stderr
    assert "[/x]/[bold]" in done.stdout


def test_doctor_counts_whole_rings(tmp_path: Path) -> None:
    a_ring(tmp_path)
    done = pacekeeper("doctor", "--json", "--ring-dir", str(tmp_path))
    rings = next(check for check in json.loads(done.stdout) if check["name"] == "rings")
    assert rings["health"] == "ok"
    assert [int(word) for word in rings["found"].split() if word.isdigit()] == [1, 3]


@pytest.mark.parametrize(
    ("offset", "code", "words"),
    [
        pytest.param(
            8,
            ExitCode.VERSION,
            str((shm_ring.VERSION ^ 1) + 256),
            id="version",
        ),
        pytest.param(0, ExitCode.HOST, "magic", id="no ring"),
        pytest.param(
            shm_ring.slot_offset(1) + 40,
            ExitCode.HOST,
            "damaged",
            id="record",
        ),
    ],
)
def test_a_ring_that_can_not_be_believed_is_an_error_with_its_code(
    tmp_path: Path, offset: int, code: ExitCode, words: str
) -> None:
    path = a_ring(tmp_path)
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF if offset > 8 else 0x01
    data[offset + 1] ^= 0x01
    path.write_bytes(data)
    done = pacekeeper("doctor", "--json", "--ring-dir", str(tmp_path))
    assert done.returncode == code
    rings = next(check for check in json.loads(done.stdout) if check["name"] == "rings")
    assert rings["health"] == "broken"
    assert words in rings["found"] and str(path) in rings["found"]


def test_a_pipe_in_a_ring_s_place_does_not_hold_doctor_up(tmp_path: Path) -> None:
    os.mkfifo(a_ring(tmp_path).with_name("rank-00001.ring"))
    done = pacekeeper("doctor", "--json", "--ring-dir", str(tmp_path))
    assert done.returncode == ExitCode.HOST
    assert "rank-00001.ring" in done.stdout


def a_ring(directory: Path) -> Path:
    """A ring with three records."""
    attachment = Attachment(job="j", rank=0, world_size=1, pid=1)
    made = Ring.create(directory, attachment)
    for step in range(3):
        made.write(StepRecord(rank=0, step=step, generation=1, duration_s=0.1, tokens=1))
    assert made.path is not None
    return made.path
