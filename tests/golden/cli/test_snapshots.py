"""What people read in a terminal: one snapshot file per command, its help and its main outputs.

`pytest tests/golden --update-golden` writes them anew; the diff is the review.
"""

import json
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from pacekeeper.cli.common.lazy_group import command as main
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.incidents import node_health
from pacekeeper.core.layout.even_layout import even_layout
from support.scenarios import SMALL_SCENARIO
from support.scripted_status import NOW_S, Answers, answering
from support.symptoms import DEVICE
from support.terminal import COLUMNS, Terminal
from support.trace_files import write_run
from support.trainees import TINY, Lone
from support.tree import ROOT

FOLDER = Path(__file__).parent
COMMANDS = tuple(main.list_commands(click.Context(main)))
ADDRESS = "127.0.0.1:7443"  # of the scripted controller, in a snapshot


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """80 columns, in a folder of its own, at one moment of the year 2026, in UTC."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TZ", "UTC")
    for name in ("PACEKEEPER_CONFIG", "PACEKEEPER_TOKEN", "PACEKEEPER_RACK"):
        monkeypatch.delenv(name, raising=False)
    time.tzset()
    # Not `time.time` itself: gRPC reads its deadlines from it.
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        for each in (command, *getattr(command, "commands", {}).values()):
            each._help_option = None  # a test that ran it outside the group has left `--help` there
    clock = SimpleNamespace(time=lambda: NOW_S)
    for module in ("observe.fleet", "services.healthcheck", "admin.tokens"):
        monkeypatch.setattr(f"pacekeeper.cli.{module}.time", clock)
    yield Terminal()
    monkeypatch.undo()
    time.tzset()


def test_pacekeeper(terminal: Terminal, request: pytest.FixtureRequest) -> None:
    terminal.run_help()
    terminal.run("dance", code=2)
    terminal.mask(r"failed to connect .*refused", "DETAILS OF GRPC")
    terminal.run("status", "--controller", "127.0.0.1:1", code=6)
    compare("pacekeeper", terminal, request)


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, terminal: Terminal, request: pytest.FixtureRequest) -> None:
    terminal.run_help(command)
    if command in OUTPUTS:
        OUTPUTS[command](terminal)
    compare(command, terminal, request)


def compare(name: str, terminal: Terminal, request: pytest.FixtureRequest) -> None:
    path = FOLDER / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(terminal.text)
    assert terminal.text == path.read_text()


def test_no_snapshot_is_of_a_command_that_is_gone() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == {*COMMANDS, "pacekeeper"}


def asks(terminal: Terminal, *lines: tuple[str, ...], is_empty: bool = False) -> None:
    """Lines to the scripted controller; a last word "!2" is the exit code."""
    with answering(Answers(is_empty=is_empty)) as address:
        terminal.mask(re.escape(address), ADDRESS)
        for line in lines:
            *words, last = line
            code = int(last[1:]) if last.startswith("!") else 0
            given = words if code else line
            terminal.run(*given, "--controller", address, code=code)


def status(terminal: Terminal) -> None:
    asks(terminal, ("status",), ("status", "--job", "ablation"), ("status", "--job", "x", "!2"))
    asks(terminal, ("status",), is_empty=True)


def incidents(terminal: Terminal) -> None:
    asks(
        terminal,
        ("incidents",),
        ("incidents", "--open", "--job", "ablation"),
        ("incidents", "--watch", "--open"),
        ("incidents", "--watch", "--last", "1", "!2"),
    )
    asks(terminal, ("incidents",), ("incidents", "--open"), is_empty=True)


def explain(terminal: Terminal) -> None:
    asks(terminal, *(("explain", number) for number in "123"), ("explain", "9", "!2"))
    asks(terminal, ("explain", "2", "--plot", "none.png", "!1"))


def fleet(terminal: Terminal) -> None:
    asks(
        terminal,
        ("fleet",),
        ("fleet", "--all"),
        ("fleet", "gpu-0"),
        ("fleet", "gpu-2"),
        ("fleet", "elsewhere", "!2"),
    )


def proposals(terminal: Terminal) -> None:
    asks(terminal, ("approve", "1", "--by", "ada"), ("approve", "2", "--by", "ada", "!2"))


def denials(terminal: Terminal) -> None:
    asks(terminal, ("deny", "1", "--by", "ada", "--reason", "a release is on"))


def cordon(terminal: Terminal) -> None:
    asks(
        terminal,
        ("cordon", "gpu-9", "--by", "ada", "--reason", "fan"),
        ("cordon", "pretrain/3", "--by", "ada"),
        ("cordon", "unknown", "--by", "ada", "!2"),
        ("cordon", "gpu-9", "--by", "viewer", "!11"),
    )


def uncordon(terminal: Terminal) -> None:
    asks(terminal, ("uncordon", "gpu-9", "--by", "ada"), ("uncordon", "pretrain/3", "--by", "ada"))


def pause(terminal: Terminal) -> None:
    asks(terminal, ("pause", "pretrain", "--by", "ada", "--reason", "a release is on"))


def resume(terminal: Terminal) -> None:
    asks(terminal, ("resume", "pretrain", "--by", "ada"))


def dry_run(terminal: Terminal) -> None:
    asks(terminal, ("dry-run", "on", "--by", "ada"), ("dry-run", "off", "--by", "ada"))


def top(terminal: Terminal) -> None:
    """The screen, an incident over it, and the question before each act."""
    pytest.importorskip("textual", reason="needs pacekeeper[top]")
    import asyncio

    from textual.widgets import DataTable

    from pacekeeper.cli.top.app import TopApp
    from pacekeeper.cli.top.source import ControllerSource

    terminal.run("top", code=4)

    async def play(address: str) -> None:
        source = ControllerSource(ClientConfig(controller=address))
        app = TopApp(source, job="pretrain", period_s=3600.0)
        async with app.run_test(size=(COLUMNS, 24)) as pilot:

            async def press(*keys: str) -> None:
                await pilot.press(*keys)
                for _ in range(3):  # an act starts a poll, which starts a redraw
                    await pilot.pause()
                    await app.workers.wait_for_complete()
                tables = app.screen.query(DataTable)
                while any(not is_drawn(one) for one in tables):
                    await pilot.pause()
                await pilot.pause()

            await press()
            terminal.show("== the screen", drawn(app))
            await press("s")
            terminal.show("== s", status_line(app))
            for key in "cpyad":
                await press(key)
                terminal.show(f"== {key}", question(app))
                await press("y")
                terminal.show(f"== {key}, then y", status_line(app))
            await press("i", "enter")
            terminal.show("== i, then Enter", drawn(app))
        source.close()

    def is_drawn(table: Any) -> bool:
        """Whether it has rows, and its columns their widths, which they get when it is idle."""
        is_waiting = table._require_update_dimensions or table._updated_cells
        return bool(table.row_count) and not is_waiting

    def drawn(app: Any) -> str:
        strips = app.screen._compositor.render_strips()
        return "\n".join("".join(part.text for part in strip).rstrip() for strip in strips)

    def status_line(app: Any) -> str:
        return str(app.query_one("#message").render())

    def question(app: Any) -> str:
        return str(app.screen.query_one("#question").render())

    terminal.mask(r"\S+@\S+", "USER@HOST")
    with answering(Answers()) as address:
        terminal.mask(re.escape(address), ADDRESS)
        asyncio.run(play(address))


def agent(terminal: Terminal) -> None:
    terminal.run("agent", "--config", "none.toml", code=3)


def launch(terminal: Terminal) -> None:
    terminal.run("launch", "--join", "127.0.0.1:1", "--steps", "5", code=2)


def healthcheck(terminal: Terminal) -> None:
    for line in ((), ("--ring-dir", "missing")):
        terminal.run("healthcheck", *(line or ("--ring-dir", ".")), code=2)
    for is_lost, code in ((False, 0), (True, 12)):
        devices = (replace(DEVICE, is_lost=is_lost),)
        verdict = node_health.assess_node(None, devices, nvml="ok", node="n0", now_unix_s=NOW_S)
        Path(node_health.FILE_NAME).write_bytes(node_health.encode_node_health(verdict))
        terminal.run("healthcheck", "--ring-dir", ".", code=code)
    terminal.run("healthcheck", "--ring-dir", ".", "--node-condition", code=12)


def tokens(terminal: Terminal) -> None:
    terminal.mask(r"^[0-9a-f]{8}\b", "TOKENID")
    terminal.mask(r"^pk1\.\S+", "TOKEN")
    terminal.run("tokens", "ls", "--file", "tokens", code=3)
    # Tokens of one moment are listed by their ids, which are random.
    ids = iter(("b0000000", "a0000000"))
    known = SimpleNamespace(token_hex=lambda _: next(ids), token_urlsafe=secrets.token_urlsafe)
    with mock.patch("pacekeeper.cli.admin.tokens.secrets", known):
        terminal.run("tokens", "add", "--file", "tokens", "viewer", "grafana")
        terminal.run("tokens", "add", "--file", "tokens", "--days", "1", "operator", "ada")
    terminal.run("tokens", "ls", "--file", "tokens")
    terminal.run("tokens", "revoke", "--file", "tokens", "00000000", code=3)
    found = json.loads(
        CliRunner().invoke(main, ["tokens", "ls", "--file", "tokens", "--json"]).output
    )
    terminal.mask(r"revoke --file tokens \w+", "revoke --file tokens TOKENID")
    terminal.run("tokens", "revoke", "--file", "tokens", found[0]["token_id"])


def certs(terminal: Terminal) -> None:
    from pacekeeper.cli.admin import ca

    moment, present = datetime.fromtimestamp(NOW_S, UTC), ca.utc_now
    ca.utc_now = lambda: moment
    try:
        terminal.run("certs", "init")
        terminal.run("certs", "init", code=4)
        terminal.run("certs", "issue", "node", "gpu-7")
        terminal.run("certs", "issue", "--host", "ctl.example", "controller", "c0")
        terminal.run("certs", "issue", "controller", "c1", code=3)
        terminal.run("certs", "issue", "node", "a b", code=3)
        terminal.run("certs", "issue", "--days", "800", "--dir", "none", "node", "a", code=3)
        terminal.run("certs", "renew", "--within", "3", "pki/node-gpu-7.crt")
        terminal.run("certs", "renew", "--days", "30", "pki/node-gpu-7.crt")
        terminal.run("certs", "renew", "pki/ca.key", code=3)
        Path("none.crt").write_text("no certificate")
        moment = datetime.fromtimestamp(NOW_S + 10 * 86_400.0, UTC)
        files = ("pki/ca.crt", "pki/node-gpu-7.crt", "pki/controller-c0.crt")
        terminal.run("certs", "show", *files, "none.crt", code=3)
        terminal.run("certs", "show", "missing.crt", code=4)
    finally:
        ca.utc_now = present


def data(terminal: Terminal) -> None:
    """Two inputs in bytes, a file that is there, files that are no token files, and a check."""
    terminal.mask(r"in [\d.]+ m?s \(.* MB/s\)", "in N s (N MB/s)")
    Path("a.txt").write_text("first\n\nsecond\n")
    Path("b.jsonl").write_text('{"text": "third"}\n')
    Path("c.jsonl").write_text('{"title": "fourth"}\n')
    bytewise = ("data", "tokenize", "--tokenizer", "bytes", "--out", "train.bin")
    terminal.run(*bytewise, "--separator", "", "a.txt", "b.jsonl")
    terminal.run(*bytewise, "a.txt", code=3)
    terminal.run(*bytewise, "--overwrite", "c.jsonl", code=9)
    terminal.run(*bytewise, "--overwrite", ".", code=3)
    terminal.run(*bytewise, "none.txt", code=2)
    terminal.run("data", "tokenize", "--tokenizer", "none", "--out", "x.bin", "a.txt", code=3)
    terminal.run("data", "check", "train.bin")
    Path("train.bin").write_bytes(Path("train.bin").read_bytes()[:-1] + b"\x7f")
    terminal.run("data", "check", "train.bin", code=9)
    terminal.run("data", "check", "a.txt", code=3)
    terminal.run("data", "check", "none.bin", "--dtype", "uint16", code=4)


def store(terminal: Terminal) -> None:
    Store.open(Path("store.sqlite")).close()
    terminal.mask(r"schema \d+", "schema N")
    terminal.mask(r"[\d.]+ MB", "N MB")
    terminal.run("store", "backup", "store.sqlite", "copy.sqlite")
    terminal.run("store", "backup", "store.sqlite", "copy.sqlite", code=4)
    with sqlite3.connect("other.sqlite") as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    terminal.run("store", "backup", "other.sqlite", "new.sqlite", code=4)
    terminal.run("store", "backup", "none.sqlite", "new.sqlite", code=4)
    terminal.run("store", "check", "copy.sqlite")
    terminal.run("store", "check", "other.sqlite", code=4)
    with sqlite3.connect("newer.sqlite") as connection:
        sqlite3.connect("store.sqlite").backup(connection)
        connection.execute("PRAGMA user_version = 999")
    connection.close()
    terminal.run("store", "check", "newer.sqlite", code=5)
    terminal.run("store", "migrate", "store.sqlite", "sqlite:///moved.sqlite")


def checkpoint(terminal: Terminal) -> None:
    """Two complete ones and one that was never finished; a partial one; a window."""
    terminal.mask(r"costs: .*", "costs: N")
    terminal.mask(r"loses [\d,]+ tokens", "loses N tokens")
    whole = Lone(Path("whole"), width=64)
    whole.grow(2)
    (whole.root / whole.names()[-1].replace("step00000002", "step00000003")).mkdir()
    partial = Lone(Path("partial"), replace(TINY, experts_per_checkpoint=1), width=64)
    partial.grow(2)
    window = Lone(Path("window"), replace(TINY, checkpoint_window_steps=3), width=64)
    window.grow(7)
    terminal.run("checkpoint", "ls", "none", code=9)
    for folder in ("whole", "partial", "window"):
        terminal.run("checkpoint", "ls", folder)
        terminal.run("checkpoint", "show", folder)
    oldest = whole.root / whole.names()[0] / "rank-0.safetensors"
    oldest.write_bytes(oldest.read_bytes()[:-1] + b"\x7f")
    terminal.run("checkpoint", "verify", "whole", code=9)
    terminal.run("checkpoint", "gc", "whole", code=9)
    terminal.run("checkpoint", "gc", "--dry-run", "--keep", "1", str(whole.root))
    terminal.run("checkpoint", "gc", "--keep", "1", str(whole.root))
    terminal.run("checkpoint", "gc", "--keep", "1", str(whole.root))


def plan(terminal: Terminal) -> None:
    loads = [[40.0, 30.0, 10.0, 8.0, 6.0, 3.0, 2.0, 1.0], [float(i) for i in range(1, 9)]]
    Path("loads.json").write_text(json.dumps(loads))
    Path("ragged.json").write_text("[[1, 2], [3]]")
    placed = ("plan", "placement", "--loads", "loads.json", "--nodes", "4", "--slots", "5")
    terminal.run_without(*placed)
    terminal.run_without(*placed, "--devices", "2", "--racks", "2", "--min-nodes", "2")
    terminal.run(*placed, "--speeds", "9=0.5", code=3)
    terminal.run(*placed, "--speeds", "1=fast", code=3)
    terminal.run(*placed, "--speeds", "1=0.5,1=0.5", code=3)
    terminal.run(*placed, "--max-copies", "3", code=3)
    terminal.run(*placed, "--rack-failure", "0.1", code=3)
    terminal.run(*placed, "--devices", "1000000", code=3)
    terminal.run(*placed, "--loads", "ragged.json", code=9)
    terminal.run(*placed, "--loads", "none.json", code=9)
    Path("notes.txt").write_text("nothing of a run\n")
    terminal.run(*placed, "--loads", "notes.txt", code=9)
    terminal.run(*placed, "--current", "loads.json", code=9)
    terminal.run(*placed, "--drift", "nan", code=2)
    terminal.run(*placed, "--plot", "no/where.png", code=4)
    Path("partition.toml").write_text((ROOT / "examples" / "partition.toml").read_text())
    terminal.run_without("plan", "partition", "partition.toml", "--speeds", "5=0.5", "--program")
    terminal.run_without("plan", "partition", "partition.toml", "--speeds", "5=0,6=0.01")
    terminal.run("plan", "partition", "partition.toml", "--speeds", "5=fast", code=3)


def simulate(terminal: Terminal) -> None:
    Path("small.toml").write_text(SMALL_SCENARIO)
    terminal.run("simulate", "small.toml")
    terminal.run("simulate", "small.toml", "--report", ".", code=4)
    terminal.run("simulate", "small.toml", "--report", "no/r.html", code=4)


def replay(terminal: Terminal) -> None:
    write_run(Path("slow.jsonl"), late=5)
    write_run(Path("well.jsonl"))
    terminal.run_without("replay", "slow.jsonl")
    terminal.run("replay", "well.jsonl")
    rows = [f"{run},{step},0.5" for run in "ab" for step in range(80)]
    Path("several.csv").write_text("\n".join(["run,step,duration_s", *rows]))
    terminal.run("replay", "several.csv")
    terminal.run("replay", "well.jsonl", "--report", "no/r.html", code=4)


def doctor(terminal: Terminal) -> None:
    """A check of each kind with a fixed finding, and two refusals."""
    from pacekeeper.cli.doctor import checks

    terminal.run("doctor", "--as", "agent", code=2)
    terminal.run("doctor", "--config", "none.toml", code=3)
    console = Console(width=COLUMNS, file=StringIO())
    found = [
        checks.Check(name="python", health=checks.Health.OK, found="3.11.2"),
        checks.Check(name="x", health=checks.Health.LIMITED, found="FOUND", remedy="REMEDY"),
        checks.Check(name="y", health=checks.Health.BROKEN, found="FOUND", remedy="REMEDY"),
    ]
    console.print(checks.check_table(found))
    terminal.show("== a table of checks", printed(console))


def demo(terminal: Terminal) -> None:
    """The first frame, a frame after the fault, the lines without a terminal, and the figures."""
    from pacekeeper.cli.demo.live_view import LiveView
    from pacekeeper.cli.demo.metrics import (
        DetectionFigures,
        Outcome,
        Phases,
        RecoveryFigures,
        SpeedFigures,
        Throughput,
        TrainingFigures,
    )
    from pacekeeper.cli.demo.recorder import DemoEvent, StepView
    from pacekeeper.cli.demo.report import print_outcome

    terminal.run("demo", "--rank", "9", code=3)
    terminal.run("demo", "--slowdown", "nan", code=3)
    terminal.run("demo", "--steps", "10", code=3)
    terminal.run("demo", "--seed", "-1", code=3)
    terminal.run("demo", "--fault", "stop", code=3)
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    terminal.run("demo", "--run-dir", "mine", code=3)
    layout = even_layout(ranks=range(4), num_layers=2, num_experts=8, replicas=2)
    events = [
        DemoEvent(seen_s=1.0, step=60, kind="fault", text="FAULT"),
        DemoEvent(seen_s=2.0, step=63, kind="finding", text="FINDING"),
    ]
    step = StepView(
        step=63,
        generation=1,
        seen_s=2.0,
        tokens_per_s=12_345.0,
        loss=3.21,
        ranks=(0, 1, 2, 3),
        observed_s=(0.1, 0.16, 0.1, 0.1),
        expected_s=(0.1, 0.1, 0.1, float("nan")),
        slowdown=(1.0, 1.6, 1.0, float("nan")),
        watch="degraded",
    )
    recorder: Any = SimpleNamespace(steps=[], events=[], layouts={1: (layout, "")})
    for title, steps, told in (("start", [], []), ("fault", [step] * 40, events)):
        console = Console(width=COLUMNS, file=StringIO())
        recorder.steps, recorder.events = steps, told
        view = LiveView(console=console, recorder=recorder, title="TITLE", total_steps=200)
        console.print(view._screen())
        terminal.show(f"== the screen, {title}", printed(console))
    console = Console(width=COLUMNS, file=StringIO())
    LiveView(console=console, recorder=recorder, title="TITLE", total_steps=200).update()
    terminal.show("== without a terminal", printed(console))
    outcome = Outcome(
        detection=DetectionFigures(
            injected_rank=2, injected_slowdown=1.6, found_rank=2, found_slowdown=1.58,
            last_slowdown=1.59, delay_iterations=2, false_findings=0,
        ),
        speed=SpeedFigures(
            tokens_per_s=Throughput(
                healthy=1000.0, degraded=667.0, mitigated=909.0, recovered=1000.0, after_kill=769.0
            ),
            fluid_limit_tokens_per_s=906.25, degraded_of_fluid=0.736, mitigated_of_fluid=1.003,
            host_was_measured=False, devices_busy_healthy=0.81, devices_busy_mitigated=0.88,
            host_overrun_share=0.01, busy_phases=(),
        ),
        recovery=RecoveryFigures(
            killed_rank=3, survivors=3, kill_to_next_step_s=0.42, steps_lost=0, steps_redone=1
        ),
        training=TrainingFigures(
            loss_first=5.0, loss_last=3.0, generations=4, clock="emulated", steps=100, seed=0
        ),
        phases=Phases(
            healthy=range(11, 30), degraded=range(30, 34), mitigated=range(35, 60),
            recovered=range(65, 80), after_kill=range(82, 100),
        ),
    )  # fmt: skip
    names = ("healthy", "degraded", "mitigated", "recovered", "after_kill")
    late = replace(
        outcome.speed, tokens_per_s=replace(outcome.speed.tokens_per_s, mitigated=None),
        mitigated_of_fluid=None, devices_busy_mitigated=None, host_was_measured=True,
        host_overrun_share=0.3, busy_phases=("mitigated",),
    )  # fmt: skip
    hidden = replace(
        late, tokens_per_s=Throughput(**dict.fromkeys(names)), fluid_limit_tokens_per_s=None,
        degraded_of_fluid=None, devices_busy_healthy=None, host_overrun_share=0.01,
        busy_phases=names,
    )  # fmt: skip
    nothing = Outcome(
        detection=replace(outcome.detection, found_rank=None),
        speed=replace(outcome.speed, fluid_limit_tokens_per_s=None),
        recovery=replace(outcome.recovery, kill_to_next_step_s=None),
        training=replace(outcome.training, clock="cpu"),
        phases=outcome.phases,
    )
    cases = {
        "as wished": outcome,
        "a busy host": replace(outcome, speed=late),
        "a host that hides the fault": replace(outcome, speed=hidden),
        "nothing found, CPU clock": nothing,
    }
    for title, one in cases.items():
        console = Console(width=COLUMNS, file=StringIO())
        print_outcome(console, one)
        terminal.show(f"== the figures, {title}", printed(console))


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


OUTPUTS: dict[str, Callable[[Terminal], None]] = {
    "agent": agent,
    "approve": proposals,
    "certs": certs,
    "checkpoint": checkpoint,
    "cordon": cordon,
    "data": data,
    "demo": demo,
    "deny": denials,
    "doctor": doctor,
    "dry-run": dry_run,
    "explain": explain,
    "fleet": fleet,
    "healthcheck": healthcheck,
    "incidents": incidents,
    "launch": launch,
    "pause": pause,
    "plan": plan,
    "replay": replay,
    "resume": resume,
    "simulate": simulate,
    "status": status,
    "store": store,
    "tokens": tokens,
    "top": top,
    "uncordon": uncordon,
}
