"""`pacekeeper simulate` as a person calls it: tables, a page, JSON; refusals by file and key."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pacekeeper.cli.analysis.simulate import command
from pacekeeper.core.errors import ExitCode, HostError, PacekeeperError
from pacekeeper.simulator.scenario.loader import read_scenario
from support.commands import pacekeeper
from support.scenarios import SMALL_SCENARIO


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL_SCENARIO)
    return path


def test_a_scenario_is_played_for_people_and_for_programs(scenario: Path) -> None:
    page = scenario.with_suffix(".html")
    told = pacekeeper("simulate", str(scenario), "--report", str(page))
    assert told.returncode == 0, told.stderr
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2 and "://" not in text
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
        ("[scenario]", "[scenarios]", "[scenarios]"),
        ("seeds = 2", "seeds = 0", "[scenario] seeds"),
        ("seeds = 2", 'seeds = "2"', "[scenario] seeds"),
        ('source = "drawn"', 'source = "x"', "[failures] source"),
        ('source = "drawn"', 'source = "spot"', "[failures] file"),
        ("every_s = 200.0", "", "[failures] every_s"),
        ("every_s = 200.0", "every_s = nan", "[failures] every_s"),
        ('kinds = "stop+slow"', 'kinds = "fire"', "[failures] kinds"),
        ("slow_speed = 0.5", "slow_speed = 1.5", "[failures] slow_speed"),
        ("num_layers = 2", "", "[job] num_layers"),
        ("num_layers = 2", "num_layers = 0", "[job] num_layers"),
        ("expert_part = 0.5", "expert_part = 2.0", "[job] expert_part"),
        ("expert_bytes = 1000", "expert_size = 1000", "[job] expert_bytes"),
        ('kind = "checkpoint"', 'kind = "magic"', "[policies.old] kind"),
        ("group_size = 2", "", "[policies.old] group_size"),
        ("group_size = 2", "group_size = 1", "[policies.old] group_size"),
        ("checkpoint_steps = 20", "steps = 20", "[policies.old] steps"),
        ("group_size = 2", "group_size = 2\nreview_steps = 9", "[policies.old] review_steps"),
        ('kind = "checkpoint"', 'kind = "lazarus"', "[policies.old] group_size"),
        ("[job]", "[routing]\nevery_steps = 9\n[job]", "[routing] every_steps"),
        ("[job]", '[routing]\nfile = "none.npz"\n[job]', "none.npz"),
        ("[job]", "[job", "TOML"),
    ],
)
def test_what_is_wrong_is_said_with_file_key_and_what_was_expected(
    scenario: Path, old: str, new: str, said: str
) -> None:
    assert old in SMALL_SCENARIO
    scenario.write_text(SMALL_SCENARIO.replace(old, new, 1))
    with pytest.raises(PacekeeperError) as refused:
        read_scenario(scenario)
    assert said in str(refused.value), refused.value
    assert "small.toml" in str(refused.value) or "none.npz" in str(refused.value)


def test_a_file_that_is_missing_or_no_text_ends_with_one_line(tmp_path: Path) -> None:
    done = pacekeeper("simulate", str(tmp_path / "none.toml"))
    assert done.returncode == ExitCode.CONFIG and "none.toml" in done.stderr
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    done = pacekeeper("simulate", str(tmp_path / "x.toml"))
    assert done.returncode == ExitCode.CONFIG and "x.toml" in done.stderr


def test_a_page_that_could_not_be_written_is_said_before_anything_is_played(
    scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it is played")

    monkeypatch.setattr("pacekeeper.simulator.scenario.loader.run_scenario", never)
    for page in (scenario.parent, Path("no/x.html")):
        done = CliRunner().invoke(command, [str(scenario), "--report", str(page)])
        assert isinstance(done.exception, HostError) and str(page) in str(done.exception)
