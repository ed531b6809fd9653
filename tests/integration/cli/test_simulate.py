"""`pacekeeper simulate` as a person calls it: tables, a page, JSON; refusals by file and key."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pacekeeper.cli.analysis.simulate import command
from pacekeeper.core.errors import ExitCode, PacekeeperError
from pacekeeper.simulator.scenario.loader import read_scenario
from support.commands import pacekeeper

SCENARIO = """
[scenario]
seeds = 2
[failures]
source = "drawn"
num_nodes = 6
kinds = "stop+slow"
slow_speed = 0.5
every_s = 200.0
mended_after_s = 300.0
duration_s = 1000.0
[job]
num_layers = 2
num_experts = 4
slots_per_node = 2
samples_per_node = 4
tokens_per_sample = 128
balanced_step_s = 1.0
expert_part = 0.5
expert_bytes = 1000
dense_bytes = 1000
[policies.old]
kind = "checkpoint"
group_size = 2
checkpoint_steps = 20
[policies.ours]
kind = "pacekeeper"
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return path


def test_a_scenario_is_played_for_people_and_for_programs(scenario: Path) -> None:
    page = scenario.with_suffix(".html")
    told = pacekeeper("simulate", str(scenario), "--report", str(page))
    assert told.returncode == 0, told.stderr
    assert "where the time went" in told.stdout and "restarting" in told.stdout
    assert "of the limit" in told.stdout and "regrouped" in told.stdout  # in 80 columns
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2 and "http" not in text
    done = pacekeeper("simulate", str(scenario), "--json", "--seeds", "1")
    document = json.loads(done.stdout)
    assert document["seeds"] == [0] and document["duration_s"] == 1000.0
    old, ours = document["policies"]
    assert (old["policy"], ours["policy"]) == ("old", "ours")
    assert old["ratio_95"] is None  # of one seed
    assert old["ratio"] == 1.0 and ours["ratio"] > 1.0
    assert ours["needless_restarts"] == 0 and old["restarts"] >= 1
    for row in (old, ours):
        assert sum(row["spent"].values()) == pytest.approx(1.0)
        assert row["answers"][0]["cause"] == "start"
    again = pacekeeper("simulate", str(scenario), "--json", "--seeds", "1")
    assert again.stdout == done.stdout


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[scenario]", "[scenarios]", "unknown table [scenarios]"),
        ("seeds = 2", "seeds = 0", "[scenario] seeds"),
        ("seeds = 2", 'seeds = "2"', "[scenario] seeds: expected int, got str"),
        ('source = "drawn"', 'source = "x"', "[failures] source: expected one of spot"),
        ('source = "drawn"', 'source = "spot"', "[failures] file: missing"),
        ("every_s = 200.0", "", "[failures] every_s: missing"),
        ("every_s = 200.0", "every_s = nan", "[failures] every_s: expected a finite number"),
        (
            'kinds = "stop+slow"',
            'kinds = "fire"',
            "[failures] kinds: expected rack or slow",
        ),
        ("slow_speed = 0.5", "slow_speed = 1.5", "[failures] slow_speed: expected above 0"),
        ("num_layers = 2", "", "[job] num_layers: missing; expected int"),
        ("num_layers = 2", "num_layers = 0", "[job] num_layers: expected a value above 0"),
        ("expert_part = 0.5", "expert_part = 2.0", "[job] expert_part: expected 0 to 1"),
        ("expert_bytes = 1000", "expert_size = 1000", "[job] expert_bytes: missing"),
        ('kind = "checkpoint"', 'kind = "magic"', "[policies.old] kind: expected one of none"),
        ("group_size = 2", "", "[policies.old] group_size: expected at least 1"),
        ("group_size = 2", "group_size = 1", "[policies.old] group_size: 1 nodes of 2 slots"),
        ("checkpoint_steps = 20", "steps = 20", "[policies.old] steps: unknown key"),
        (
            "group_size = 2",
            "group_size = 2\nreview_steps = 9",
            "[policies.old] review_steps: says nothing with kind = 'checkpoint'; leave it out; it "
            "belongs to kind = 'lazarus' or 'pacekeeper'",
        ),
        ('kind = "checkpoint"', 'kind = "lazarus"', "[policies.old] group_size: says nothing"),
        ("[job]", "[routing]\nevery_steps = 9\n[job]", "[routing] every_steps: expected a file"),
        ("[job]", '[routing]\nfile = "none.npz"\n[job]', "none.npz"),
        ("[job]", "[job", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_said_with_file_key_and_what_was_expected(
    scenario: Path, old: str, new: str, said: str
) -> None:
    assert old in SCENARIO
    scenario.write_text(SCENARIO.replace(old, new, 1))
    with pytest.raises(PacekeeperError) as refused:
        read_scenario(scenario)
    assert said in str(refused.value), refused.value
    assert "small.toml" in str(refused.value) or "none.npz" in str(refused.value)


def test_a_file_that_is_missing_or_no_text_ends_with_one_line(tmp_path: Path) -> None:
    done = pacekeeper("simulate", str(tmp_path / "none.toml"))
    assert done.returncode == ExitCode.CONFIG and "none.toml: No such file" in done.stderr
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    done = pacekeeper("simulate", str(tmp_path / "x.toml"))
    assert done.returncode == ExitCode.CONFIG and "not valid TOML" in done.stderr


def test_a_page_that_could_not_be_written_is_said_before_anything_is_played(
    scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it is played")

    monkeypatch.setattr("pacekeeper.simulator.scenario.loader.played", never)
    for page, said in ((scenario.parent, "is a folder"), (Path("no/x.html"), "no folder no")):
        done = CliRunner().invoke(command, [str(scenario), "--report", str(page)])
        assert isinstance(done.exception, PacekeeperError) and said in str(done.exception)
