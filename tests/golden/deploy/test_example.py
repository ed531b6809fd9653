"""The example configuration says every key with its default and what the source says of it.

Rewritten by `pytest --update-golden`, so that the comments are kept in one place.
"""

import ast
import inspect
import json
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest

from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.loader import read_config
from pacekeeper.core.config.train import TrainConfig
from support.tree import ROOT

EXAMPLE = ROOT / "deploy" / "pacekeeper.example.toml"
HEAD = """\
# All settings of pacekeeper with their defaults; each part reads its own tables from one file.
# An unknown key is refused with the file, the key and what was expected.
# Who may speak to whom, and how that is proven: docs/security.md.
"""


def settings_of(kind: type) -> Iterator[tuple[list[str], str]]:
    """(comment lines above it, name) of each setting, in the order of the source."""
    module = inspect.getmodule(kind)
    assert module is not None
    source = inspect.getsource(module)
    lines = source.splitlines()
    (found,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    ]
    for statement in found.body:
        if not isinstance(statement, ast.AnnAssign):
            continue
        assert isinstance(statement.target, ast.Name)
        first = statement.lineno - 1
        while lines[first - 1].strip().startswith("#"):
            first -= 1
        yield [line.strip() for line in lines[first : statement.lineno - 1]], statement.target.id


def parts() -> dict[str, object]:
    """The settings of each table."""
    controller = ControllerConfig()
    return {
        "agent": AgentConfig(),
        "client": ClientConfig(),
        "controller": controller,
        "detector": controller.detector,
        "policy": controller.policy,
        "access": controller.access,
        "limits": controller.limits,
        "metrics": controller.metrics,
        "webhook": controller.webhook,
        "lease": controller.lease,
        "retention": controller.retention,
        "tls": controller.tls,
        "train": TrainConfig(),
    }


def example() -> str:
    text = HEAD
    for table, settings in parts().items():
        text += f"\n[{table}]\n"
        for comments, name in settings_of(type(settings)):
            value = getattr(settings, name)
            if not is_dataclass(value):
                text += "".join(f"{line}\n" for line in comments)
                text += f"{name} = {json.dumps(value)}\n"
    return text


def test_the_example_is_what_the_code_says(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        EXAMPLE.write_text(example())
    assert EXAMPLE.read_text() == example(), "rewrite it by `pytest --update-golden`"


def test_the_example_has_every_key_and_changes_nothing() -> None:
    text = EXAMPLE.read_text()
    for kind in (AgentConfig, ClientConfig, ControllerConfig, TrainConfig):
        assert read_config(kind, text, file="example") == kind()
    document = tomllib.loads(text)
    for table, settings in parts().items():
        assert is_dataclass(settings)
        plain = [f.name for f in fields(settings) if not is_dataclass(getattr(settings, f.name))]
        assert list(document[table]) == plain
