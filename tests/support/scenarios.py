"""Scenario files for tests: a small one as tables, and any tables as TOML."""

import json
from pathlib import Path
from typing import Any

Tables = dict[str, Any]
SMALL_SCENARIO = """
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


def small_tables() -> Tables:
    """Six nodes for 1000 s, a fault every 200 s, every policy that there is."""
    return {
        "scenario": {"seeds": 2},
        "failures": {
            "source": "drawn",
            "num_nodes": 6,
            "kinds": "stop+slow",
            "slow_speed": 0.5,
            "every_s": 200.0,
            "mended_after_s": 300.0,
            "duration_s": 1000.0,
        },
        "job": {
            "num_layers": 2,
            "num_experts": 4,
            "slots_per_node": 2,
            "samples_per_node": 4,
            "tokens_per_sample": 128,
            "balanced_step_s": 1.0,
            "expert_part": 0.5,
            "expert_bytes": 1000,
            "dense_bytes": 1000,
        },
        "policies": {
            "old": {"kind": "checkpoint", "group_size": 2, "checkpoint_steps": 20},
            "none": {"kind": "none", "group_size": 2},
            "fast": {"kind": "checkpoint_fast", "group_size": 2},
            "lazarus": {"kind": "lazarus"},
            "ours": {"kind": "pacekeeper"},
        },
    }


def written(path: Path, tables: Tables) -> Path:
    """Each table in its order; a value that is no table stands where its table would."""
    plain = [f"{_key(name)} = {_value(v)}" for name, v in tables.items() if not isinstance(v, dict)]
    lines = [*plain, *(line for name, v in tables.items() for line in _table(_key(name), v))]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _table(name: str, values: Any) -> list[str]:
    if not isinstance(values, dict):
        return []
    nested = {key: v for key, v in values.items() if isinstance(v, dict)}
    own = [f"{_key(k)} = {_value(v)}" for k, v in values.items() if k not in nested]
    inner = [line for key, v in nested.items() for line in _table(f"{name}.{_key(key)}", v)]
    return [f"[{name}]", *own, *inner]


def _key(name: str) -> str:
    return json.dumps(name)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case list():
            return "[" + ", ".join(map(_value, value)) + "]"
        case str():
            return json.dumps(value)
        case _:
            return repr(value)
