"""What `benchmarks.simulate_faults` asks of policies and makes of their outcomes."""

from pathlib import Path

from benchmarks.simulate_faults import paced, policies, spot_histories, verdict, young_steps
from benchmarks.simulate_lazarus import MODELS, job_of

from pacekeeper.simulator.cluster.history import History, NodesJoined, NodesLost


def test_checkpoints_are_as_far_apart_as_young_says() -> None:
    lost = tuple(NodesLost(at_s=100_000.0 * at, nodes=(at,)) for at in range(1, 11))
    history = History(
        name="x",
        num_nodes=20,
        duration_s=1_000_000.0,
        changes=(NodesJoined(at_s=0.0, nodes=tuple(range(20))), *lost),
    )
    job = job_of(MODELS[0], step_s=0.5, expert_part=0.1)
    # 521e6 parameters of 14 bytes at 10 Gb/s: 5.8 s; a loss every 100,000 s.
    assert abs(young_steps(history, job) - 1080.2 / 0.5) < 5
    quiet = History(name="x", num_nodes=0, duration_s=1e6, changes=())
    assert young_steps(quiet, job) > 3 * young_steps(history, job)


def test_every_policy_but_none_gets_the_periods() -> None:
    for name, policy in policies(MODELS[0], 0.1).items():
        changed = paced(policy, 77, 99)
        assert changed.checkpoint_steps == (None if name == "none" else 77)
        assert changed.review_steps == (99 if name in ("lazarus", "ours") else None)


def test_a_cell_is_won_above_every_other_policy() -> None:
    def row(samples: float, needless: int = 0) -> dict[str, float]:
        return {"samples": samples, "needless_restarts": needless}

    found = verdict(
        {
            "a": {"checkpoint": row(50.0), "lazarus": row(100.0), "ours": row(101.0, 2)},
            "b": {"checkpoint": row(50.0), "lazarus": row(100.0), "ours": row(99.0)},
            "c": {"checkpoint": row(0.0), "ours": row(3.0)},
        }
    )
    assert (found["cells"], found["won"], found["needless_restarts"]) == (3, 2, 2)
    assert found["over_best"] == {"a": 1.01, "b": 0.99, "c": 3.0}


def test_any_trace_that_lies_there_is_played_under_a_name_of_its_own(tmp_path: Path) -> None:
    hour = '[0, "add", {"nodes": ["a"], "duration": 60000}]\n'
    files = {
        "spot_bamboo/aws-spot-instances-g4dn-xlarge-us-east-1b.csv": "0,1\n9,2\n",
        "spot_bamboo/g4dn-trace.csv": "0,add,a\n9,remove,a\n",
        "spot_bamboo/t4x1-west2.txt": "2021-12-11, 11:00:00, 2\n2021-12-11, 11:00:09, 1\n",
        "spot_bamboo/LICENSE.MIT.txt": "MIT",
        "spot_bamboo/SOURCE.md": "# Traces",
        "spot_parcae/gpt-1.5b_trace_hl_55_65.txt": hour,
        "spot_parcae/gpt-6.7b_trace_hl_55_65.txt": hour,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(spot_histories(tmp_path)) == [
        "G4dn",
        "g4dn-trace",
        "t4x1-west2",
        "Parcae hl gpt-1.5b",
        "Parcae hl gpt-6.7b",
    ]
