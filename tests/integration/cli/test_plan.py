"""`pacekeeper plan placement` as a person calls it: a plan, an update of it, and clear refusals."""

import json
from pathlib import Path

import pytest

from pacekeeper.core.errors import ExitCode
from support.commands import pacekeeper
from support.controllers import ControllerProcess, ScriptedAgent, attached, first_layout

LOADS = [[40.0, 30.0, 10.0, 8.0, 6.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]]


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    path = tmp_path / "loads.json"
    path.write_text(json.dumps(LOADS))
    return path


def planned(loads: Path, *more: str) -> dict[str, object]:
    done = pacekeeper(
        "plan", "placement", "--loads", str(loads), "--nodes", "4", "--slots", "5", "--json", *more
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, object] = json.loads(done.stdout)
    return document


def test_a_plan_holds_replicas_shares_and_proof(loads: Path) -> None:
    plan = planned(loads, "--min-nodes", "2", "--speeds", "1=0.5")
    replicas = plan["replicas"]
    assert isinstance(replicas, list)
    at = [0.0] * 4
    for rows, layer in zip(LOADS, replicas, strict=True):
        for load, on in zip(rows, layer, strict=True):
            assert len({replica["device"] for replica in on}) >= 2
            for replica in on:
                at[replica["device"]] += load * replica["share"]
    assert at[1] == pytest.approx(at[0] / 2, rel=0.05)
    assert plan["survival"]["by_lost_nodes"][:2] == [1.0, 1.0]  # type: ignore[index]


def test_an_earlier_plan_is_where_the_next_begins(loads: Path, tmp_path: Path) -> None:
    first = planned(loads)
    (tmp_path / "first.json").write_text(json.dumps(first))
    again = planned(loads, "--current", str(tmp_path / "first.json"))
    assert again["replicas"] == first["replicas"]
    assert again["num_copied"] == 0 and first["num_copied"] == first["num_replicas"]


def test_people_get_a_table_and_a_picture(tmp_path: Path) -> None:
    csv = tmp_path / "loads.csv"
    csv.write_text("\n".join(",".join(map(str, row)) for row in LOADS))
    picture = tmp_path / "plan.png"
    done = pacekeeper(
        "plan", "placement", "--loads", str(csv), "--nodes", "2", "--devices", "2",
        "--slots", "5", "--plot", str(picture),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (["--slots", "1"], ExitCode.CONFIG, "slots"),
        (["--speeds", "9=0.5"], ExitCode.CONFIG, "--speeds"),
        (["--speeds", "1=fast"], ExitCode.CONFIG, "DEVICE=NUMBER"),
        (["--speeds", "1=0"], ExitCode.CONFIG, "speed"),
        (["--min-racks", "2"], ExitCode.CONFIG, "floors"),
        (["--devices", "1000000000"], ExitCode.CONFIG, "16384"),
        (["--max-copies", "3"], ExitCode.CONFIG, "--current"),
        (["--current", "loads.json"], ExitCode.DATA, "loads.json"),
        (["--loads", "none.json"], ExitCode.DATA, "none.json"),
        (["--loads", "ragged.json"], ExitCode.DATA, "ragged.json"),
        (["--loads", "text.json"], ExitCode.DATA, "text.json"),
        (["--plot", "no/where.png"], ExitCode.HOST, "no/where.png"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    loads: Path, more: list[str], code: ExitCode, says: str
) -> None:
    (loads.parent / "ragged.json").write_text("[[1, 2], [3]]")
    (loads.parent / "text.json").write_text("none")
    is_file = "." in more[1] and "=" not in more[1]
    more = [more[0], str(loads.parent / more[1]) if is_file else more[1]]
    done = pacekeeper(
        "plan", "placement", "--loads", str(loads), "--nodes", "4", "--slots", "5", *more
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert says in done.stderr.strip().splitlines()[-1]


def refused(*arguments: str) -> tuple[int, str]:
    """Exit code and last line of a plan that is refused, which must not be a traceback."""
    done = pacekeeper("plan", "placement", "--nodes", "2", "--slots", "8", *arguments)
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("option", ["--drift", "--failure"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_number_that_is_none_is_refused(loads: Path, option: str, value: str) -> None:
    code, line = refused("--loads", str(loads), option, value)
    assert code == ExitCode.USAGE
    assert option in line


@pytest.mark.parametrize("option", ["--speeds", "--suspects"])
def test_a_device_s_value_that_is_no_number_is_refused(loads: Path, option: str) -> None:
    code, _ = refused("--loads", str(loads), option, "0=nan")
    assert code == ExitCode.CONFIG


def test_the_layout_of_a_job_is_written_in_eplbs_form(tmp_path: Path) -> None:
    layout = first_layout()
    with ControllerProcess(tmp_path) as controller:
        where = ("--controller", controller.api)
        agent = ScriptedAgent(controller.address)
        agent.report_and_wait(attached("train", layout))
        file = tmp_path / "plan.json"
        done = pacekeeper("plan", "eplb", "train", str(file), *where)
        assert done.returncode == ExitCode.OK, done.stderr
        done = pacekeeper("plan", "eplb", "other", str(file), *where)
        assert done.returncode == ExitCode.USAGE
        agent.close()
    tables = json.loads(file.read_text())
    assert tables["ranks"] == [list(layout.ranks_of_layer(n)) for n in tables["layers"]]
    assert len(tables["phy2log"]) == len(tables["layers"]) > 0
