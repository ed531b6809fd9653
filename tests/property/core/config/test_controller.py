"""Whatever stands in a configuration file: settings come out of it, or a ConfigError that helps."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.config.controller import ControllerConfig, LeaseConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.config.loader import override, read_config
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.config.security import AccessConfig, LimitsConfig, TlsConfig
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.errors import ConfigError

TABLES = {
    "agent": AgentConfig,
    "controller": ControllerConfig,
    "detector": DetectorConfig,
    "policy": PolicyConfig,
    "client": ClientConfig,
    "access": AccessConfig,
    "limits": LimitsConfig,
    "lease": LeaseConfig,
    "tls": TlsConfig,
    "train": TrainConfig,
}
KEYS = [
    (table, field.name, field.type)
    for table, kind in TABLES.items()
    for field in fields(kind)
    if field.type in (int, float, str)
]
WRITE: dict[type, Callable[[Any], str]] = {
    int: str,
    float: repr,
    str: lambda value: f"'{value}'",
    bool: lambda value: str(value).lower(),
    list: lambda value: "[]",
}
SAMPLE: dict[type, object] = {int: 7, float: 7.5, str: "seven", bool: True, list: []}


@given(st.text(max_size=60))
def test_any_text_gives_settings_or_a_complaint_that_names_the_file(text: str) -> None:
    try:
        assert isinstance(read_config(AgentConfig, text, file="f.toml"), AgentConfig)
    except ConfigError as error:
        assert str(error).startswith("f.toml: ")


@pytest.mark.parametrize(("table", "key", "expected"), KEYS)
@pytest.mark.parametrize("given_kind", [int, float, str, bool, list])
def test_a_value_of_another_type_is_refused_by_name(
    table: str, key: str, expected: type, given_kind: type
) -> None:
    if given_kind is expected or (given_kind, expected) == (int, float):
        return
    text = f"[{table}]\n{key} = {WRITE[given_kind](SAMPLE[given_kind])}\n"
    wanted = rf"f\.toml: \[{table}\] {key}: expected {expected.__name__}, got {given_kind.__name__}"
    with pytest.raises(ConfigError, match=wanted):
        read_config(AgentConfig, text, file="f.toml")


@pytest.mark.parametrize(("table", "key", "expected"), KEYS)
def test_the_default_written_down_is_the_default(table: str, key: str, expected: type) -> None:
    default = getattr(TABLES[table](), key)
    text = f"[{table}]\n{key} = {WRITE[expected](default)}\n"
    for kind in (AgentConfig, ControllerConfig, TrainConfig):
        assert read_config(kind, text, file="f.toml") == kind()


@pytest.mark.parametrize(("table", "key", "expected"), [k for k in KEYS if k[2] is float])
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", f"1{'0' * 400}"])
def test_a_number_without_end_is_refused(table: str, key: str, expected: type, value: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^f\.toml: \[{table}\] {key}: expected (float|a finite)"
    ):
        read_config(AgentConfig, f"[{table}]\n{key} = {value}\n", file="f.toml")


@given(st.integers(1, 2**53))
def test_a_whole_number_is_taken_where_a_float_is_wanted(value: int) -> None:
    config = read_config(AgentConfig, f"[agent]\npoll_interval_s = {value}", file="f.toml")
    assert type(config.poll_interval_s) is float
    assert config.poll_interval_s == value


@given(st.sampled_from([k for k in KEYS if k[2] is int]), st.integers(-(10**6), -1))
def test_a_negative_count_is_refused_by_name(key: tuple[str, str, type], value: int) -> None:
    table, name, _ = key
    with pytest.raises(ConfigError, match=rf"f\.toml: \[{table}\] .*expected"):
        read_config(AgentConfig, f"[{table}]\n{name} = {value}\n", file="f.toml")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", "1e300"),
        ("weight_decay", "1e300"),
        ("emulated_jitter", "1e300"),
        ("emulated_step_s", "1e12"),
        ("tick_s", "1e300"),
        ("peer_timeout_s", "1e300"),
    ],
)
def test_a_number_that_no_step_could_be_made_with_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"f\.toml: \[train\] {name}: expected at most"):
        read_config(TrainConfig, f"[train]\n{name} = {value}\n", file="f.toml")


def test_nesting_beyond_reason_is_not_valid_toml() -> None:
    with pytest.raises(ConfigError, match=r"f\.toml: not valid TOML"):
        read_config(AgentConfig, "[agent]\nx = " + "[" * 5000, file="f.toml")


def test_a_bare_key_is_told_where_to_go() -> None:
    with pytest.raises(ConfigError, match=r"unknown table \[steps\]; expected one of \[agent\]"):
        read_config(TrainConfig, "steps = 3", file="f.toml")


@pytest.mark.parametrize("name", ["x" * 254, "tab\\there"])
def test_a_node_name_that_nobody_could_read_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"f\.toml: .*node: expected 1 to 253 printable"):
        read_config(AgentConfig, f'[agent]\nnode = "{name}"', file="f.toml")


def test_a_job_name_that_is_no_directory_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"command line job: expected 1 to 64 of letters"):
        override(TrainConfig(), job="../elsewhere")
