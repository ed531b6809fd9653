"""A wrong setting is rejected with file, key and expectation; a right one is accepted."""

import math
import pickle  # noqa: TID251
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest

from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.config.loader import find_errors, override, read_config, read_table
from pacekeeper.core.errors import ConfigError, ExitCode


def test_an_empty_file_gives_the_defaults() -> None:
    assert read_config(ControllerConfig, "", file="f") == ControllerConfig()


def test_values_and_nested_tables_are_taken() -> None:
    text = "[controller]\nlisten='h:1'\n[detector]\nwarmup_steps=20\n[policy]\nmin_gain=1\n"
    config = read_config(ControllerConfig, text, file="f")
    assert (config.listen, config.detector.warmup_steps, config.policy.min_gain) == ("h:1", 20, 1.0)


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("[agent]\nrign_dir='x'", "[agent] rign_dir", "ring_dir"),
        ("[agent]\nspool_batches='1'", "[agent] spool_batches", "integer, got '1'"),
        ("[agent]\nspool_batches=1.0", "[agent] spool_batches", "integer, got 1.0"),
        ("[agent]\nspool_batches=true", "[agent] spool_batches", "integer, got True"),
        ("[agent]\npoll_interval_s='1'", "[agent] poll_interval_s", "number, got '1'"),
        ("[agent]\ninsecure=1", "[agent] insecure", "boolean, got 1"),
        ("[agent]\nspool_batches=0", "[agent] spool_batches", "0, got 0"),
        ("[agent]\nring_dir=''", "[agent] ring_dir", "expected at least 1 character, got ''"),
        ("[agnet]\n", "unknown table [agnet]; expected one of [agent], [client], [con", "engine"),
        ("agent = 3", "agent", "table, got 3"),
        ("[agent", "not valid TOML", ""),
        pytest.param("x = " + "9" * 5000, "not valid TOML", "", id="endless number"),
        pytest.param(
            "[access]\naudit_kept = 0x" + "f" * 5000,
            "[access] audit_kept",
            "1000",
            id="hex",
        ),
        ("[detector]\nblind_slowdown=1.05", "[detector] blind_slowdown", "recover_slowdown"),
        ("[detector]\nhistory_steps=2", "[detector] history_steps", "warmup_steps"),
        ("[policy]\nload_ema=1.5", "[policy] load_ema", "1, got 1.5"),
        ("[policy]\nmode='maybe'", "[policy] mode", "'act', 'observe' or 'approve', got 'maybe'"),
        ("[lease]\nrenew_s=3", "[lease] duration_s", "renew_s + margin_s"),
        ("[lease]\nurl='http://x'", "[lease] url", "unknown key"),
        ("[metrics]\nca='a'", "[metrics] ca", "cert and key"),
        ("[engine]\nrow_tokens=1", "[engine] row_tokens", "2, got 1"),
        ("[engine]\ndevice='tpu'", "[engine] device", "'cuda' or 'cpu', got 'tpu'"),
        ("[engine]\nwarmup_steps=201", "[engine] warmup_steps", "steps = 200, got 201"),
        ("[engine]\nrows_per_step=3", "[engine] rows_per_microbatch", "rows_per_step = 3, got 4"),
        ("[engine]\ndata='a.bin'", "[engine] data", "'a.bin'"),
        (
            "[engine]\nexperts_per_checkpoint=1\ncheckpoint_window_steps=2",
            "[engine] checkpoint_window_steps",
            "1",
        ),
        (
            "[engine]\nexperts_per_checkpoint=1\ncheckpoint_period_steps=0",
            "[engine] checkpoint_period_steps",
            "1",
        ),
        (
            "[engine]\ncheckpoint_dir='d'\nreplica_check_period_steps=201",
            "[engine] replica_check_period_steps",
            "200",
        ),
        ("[engine]\nresume='last'", "[engine] resume", "'auto', 'never'"),
        ("[controller]\ndetector=3", "[controller] detector", "listen"),
        ("[controller.detector]\nwarmup_steps=9", "[controller] detector", "listen"),
    ],
)
def test_an_error_names_file_key_and_expectation(text: str, place: str, expected: str) -> None:
    (error,) = find_errors(text, file="f.toml")
    said = str(error)
    assert said.startswith(f"f.toml: {place}") and expected in said.partition(place)[2]
    with pytest.raises(ConfigError) as caught:
        read_config(AgentConfig, text, file="f.toml")
    assert str(caught.value) == said
    assert caught.value.exit_code is ExitCode.CONFIG


def test_all_errors_of_a_file_are_reported_at_once() -> None:
    text = """
    [agent]
    rign_dir = 'x'
    spool_batches = 'many'
    metrics_listen = 'here'
    [agnet]
    [engine]
    rows_per_step = 3
    warmup_steps = 201
    """
    errors = [str(error) for error in find_errors(text, file="f")]
    places = ["[agent] rign_dir", "[agent] metrics_listen", "[agent] spool_batches"]
    places += ["unknown table [agnet]", "[engine] rows_per_microbatch", "[engine] warmup_steps"]
    assert len(errors) == len(places)
    for error, place in zip(errors, places, strict=True):
        assert error.startswith(f"f: {place}")
    with pytest.raises(ConfigError) as caught:
        read_config(EngineConfig, text, file="f")
    assert str(caught.value).splitlines() == errors


@pytest.mark.parametrize("key", ["self", "__dataclass_self__", "two words", "__post_init__"])
def test_a_key_that_is_no_setting_is_unknown(key: str) -> None:
    (error,) = find_errors(f"[agent]\n'{key}' = 1", file="f")
    assert str(error).startswith(f"f: [agent] {key}: unknown key")


def test_the_command_line_overrides_and_is_named_in_errors() -> None:
    assert override(EngineConfig(), steps=7, seed=None).steps == 7
    with pytest.raises(ConfigError, match=r"^command line steps: .*got 0$"):
        override(EngineConfig(), steps=0)


def test_settings_are_frozen_hashable_and_equal_by_value() -> None:
    one, same = (ControllerConfig(detector=DetectorConfig(warmup_steps=9)) for _ in range(2))
    assert one == same != ControllerConfig() and len({one, same}) == 1
    with pytest.raises(FrozenInstanceError):
        one.listen = "h:1"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(one)) == one


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of a scenario file."""

    number: int
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.number == 7:
            raise ValueError("number: expected another one")


def test_a_table_becomes_a_value_of_its_own_class() -> None:
    made = read_table(Table, {"number": 3, "share": 1}, where="f: [t]")
    assert type(made) is Table and made == Table(number=3, share=1.0)
    assert type(made.share) is float


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({}, "number: missing"),
        ({"number": 7}, "number: expected another one"),
        ({"number": "1"}, "number: expected a valid integer"),
        ({"number": 1, "share": math.inf}, "share: expected a finite"),
        ({"number": 1, "nmber": 2}, "nmber: unknown key; expected one of: number, share"),
    ],
)
def test_an_error_in_a_table_names_its_place(values: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_table(Table, values, where="f: [t]")
    assert str(caught.value).startswith(f"f: [t] {place}") and "\n" not in str(caught.value)
