"""The dashboard is what its script writes, fits the grid, and asks for what there is."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.dashboards import dashboard, expressions, generator
from support.series import labels_of_series


def test_the_file_is_what_the_script_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = generator()
    monkeypatch.setattr("sys.argv", ["generate.py", "--check"])
    assert script.main() == 0, "run deploy/grafana/generate.py"
    changed = tmp_path / "pacekeeper.json"
    monkeypatch.setattr(script, "FILE", changed)
    changed.write_text("{}\n")
    assert script.main() == 1 and "run it" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["generate.py"])
    assert script.main() == 0 and json.loads(changed.read_text()) == dashboard()


def test_panels_have_numbers_and_titles_of_their_own_and_do_not_lie_on_each_other() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        mine = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & mine, panel["title"]
        cells |= mine


@pytest.mark.parametrize(("title", "expression"), expressions().items())
def test_a_panel_asks_for_series_that_are_told(title: str, expression: str) -> None:
    assert "$" not in expression, "a variable that is not filled in"
    assert set(re.findall(r"\bpacekeeper_\w+", expression)) <= set(labels_of_series())


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (Debian: prometheus)")
def test_every_expression_is_one(tmp_path: Path) -> None:
    rules = [{"record": f"a:b{n}:c", "expr": e} for n, e in enumerate(expressions().values())]
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
