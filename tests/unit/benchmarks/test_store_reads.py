"""A run on one engine only does not pass, however fast it is."""

import json

import pytest
from benchmarks import store_reads


def test_a_run_without_postgresql_names_it_and_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store_reads, "server_folder", lambda: None)
    monkeypatch.setattr(store_reads, "collect_rarely", lambda: None)
    monkeypatch.setattr(store_reads, "BAR_S", 1e9)
    words = ["store_reads", "--incidents", "20", "--jobs", "4", "--requests", "2"]
    monkeypatch.setattr("sys.argv", words)
    assert store_reads.main() == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["left_out"], told["passed"]) == (["postgresql"], False)
    assert told["sqlite"]["incident_asked_store"] == "3/3"
    assert told["sqlite"]["page_asked_store"] == "0/3"
