"""What `benchmarks.simulate_faults` asks of policies and makes of their outcomes."""

from benchmarks.simulate_faults import paced, policies, verdict, young_steps
from benchmarks.simulate_lazarus import MODELS, job_of

from pacekeeper.simulator.changes import History, NodesJoined, NodesLost


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
