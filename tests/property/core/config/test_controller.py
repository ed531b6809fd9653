"""Any text in a configuration file gives settings, or a ConfigError that names file and key."""

import json
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.config.loader import find_errors, override, read_config, table_classes
from pacekeeper.core.errors import ConfigError


def keys() -> Iterator[tuple[str, str, object]]:
    """(table, key, default) of every setting."""
    for table, kind in table_classes().items():
        for key, value in asdict(kind()).items():
            if not isinstance(value, dict):
                yield table, key, value


KEYS = list(keys())
WRONG = ("7", "7.5", "'7'", "true", "[]", "{}", "2026-11-23", "inf", "nan", "0x" + "f" * 4000)
OF_TYPE = {
    int: ("7",),
    float: ("7", "7.5"),
    str: ("'7'",),
    bool: ("true",),
    tuple: ("[]",),
}


@given(st.text(max_size=60))
def test_any_text_gives_settings_or_an_error_that_names_the_file(text: str) -> None:
    try:
        assert isinstance(read_config(AgentConfig, text, file="f.toml"), AgentConfig)
    except ConfigError as error:
        assert str(error).startswith("f.toml: ")


@pytest.mark.parametrize("value", WRONG)
def test_a_value_of_another_type_is_rejected_by_name(value: str) -> None:
    for table, key, default in KEYS:
        if value in OF_TYPE[type(default)] or (value[:2] == "0x" and type(default) is int):
            continue
        (error,) = find_errors(f"[{table}]\n{key} = {value}", file="f.toml")
        assert str(error).startswith(f"f.toml: [{table}] {key}: expected ")


@pytest.mark.parametrize("table", table_classes())
def test_the_default_written_down_is_the_default(table: str) -> None:
    kind = table_classes()[table]
    lines = [f"{key} = {json.dumps(value)}" for owner, key, value in KEYS if owner == table]
    assert read_config(kind, "\n".join([f"[{table}]", *lines]), file="f.toml") == kind()


@given(st.integers(1, 2**53))
def test_an_integer_is_accepted_for_a_float(value: int) -> None:
    config = read_config(AgentConfig, f"[agent]\npoll_interval_s = {value}", file="f.toml")
    assert type(config.poll_interval_s) is float
    assert config.poll_interval_s == value


COUNTS = [key for key in KEYS if type(key[2]) is int and key[2] >= 0]


@given(st.sampled_from(COUNTS), st.integers(-(10**6), -1))
def test_a_negative_count_is_rejected_by_name(key: tuple[str, str, object], value: int) -> None:
    table, name, _ = key
    with pytest.raises(ConfigError, match=rf"f\.toml: \[{table}\] {name}: .*expected"):
        read_config(AgentConfig, f"[{table}]\n{name} = {value}\n", file="f.toml")


@pytest.mark.parametrize(
    "key",
    [
        *("learning_rate", "final_ratio", "beta1"),
        *("evaluation_fraction", "tick_s", "peer_timeout_s"),
    ],
)
def test_a_number_too_large_for_a_step_is_rejected_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"f\.toml: \[engine\] {key}: "):
        read_config(EngineConfig, f"[engine]\n{key} = 1e12\n", file="f.toml")


def test_too_deep_nesting_is_not_valid_toml() -> None:
    with pytest.raises(ConfigError, match=r"f\.toml: not valid TOML"):
        read_config(AgentConfig, "[agent]\nx = " + "[" * 5000, file="f.toml")


@pytest.mark.parametrize("name", ["x" * 254, "tab\\there"])
def test_an_unprintable_or_long_node_name_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=r"f\.toml: \[agent\] node: .*253"):
        read_config(AgentConfig, f'[agent]\nnode = "{name}"', file="f.toml")


@pytest.mark.parametrize("name", ["", "../elsewhere"])
def test_a_job_name_that_is_no_directory_name_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=r"command line job: .*1 to 64"):
        override(EngineConfig(), job=name)
