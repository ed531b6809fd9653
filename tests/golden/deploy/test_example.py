"""The example configuration and its JSON schema have every key with what the source says of it.

Both are rewritten by `pytest --update-golden`, so that the comments are kept in one place.
"""

import ast
import inspect
import json
import tomllib
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter

from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.config.loader import read_config, table_classes
from support.tree import ROOT

EXAMPLE = ROOT / "deploy" / "pacekeeper.example.toml"
SCHEMA = ROOT / "deploy" / "pacekeeper.schema.json"
HEAD = """\
#:schema ./pacekeeper.schema.json
# All settings of pacekeeper with their defaults; each part reads its own tables from one file.
# An unknown key is refused with the file, the key and what was expected.
# Who may speak to whom, and how that is proven: docs/security.md.
"""


def settings_of(kind: type) -> Iterator[tuple[list[str], str]]:
    """(comment lines above it, name) of each setting, in the order of the source."""
    (base,) = kind.__bases__
    if is_dataclass(base):
        yield from settings_of(base)
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


def example() -> str:
    text = HEAD
    for table, kind in table_classes().items():
        text += f"\n[{table}]\n"
        for comments, name in settings_of(kind):
            value = getattr(kind(), name)
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
    for kind in (AgentConfig, ClientConfig, ControllerConfig, EngineConfig):
        assert read_config(kind, text, file="example") == kind()
    document = tomllib.loads(text)
    assert {table: list(keys) for table, keys in document.items()} == {
        table: plain_keys(kind) for table, kind in table_classes().items()
    }


def plain_keys(kind: type) -> list[str]:
    """The keys of a table: the settings that are not tables of their own."""
    return [name for _, name in settings_of(kind) if not is_dataclass(getattr(kind(), name))]


def schema() -> dict[str, Any]:
    """The JSON schema of a settings file; a comment describes all keys up to the next one."""
    tables: dict[str, Any] = {}
    for table, kind in table_classes().items():
        made = TypeAdapter(kind).json_schema()
        text, keys = "", dict[str, Any]()
        for comments, name in settings_of(kind):
            text = " ".join(line.removeprefix("# ") for line in comments) or text
            keys[name] = made["properties"][name] | {"description": text}
            keys[name].pop("title", None)
        tables[table] = {
            "type": "object",
            "description": made["description"],
            "properties": {name: keys[name] for name in plain_keys(kind)},
            "additionalProperties": made["additionalProperties"],
        }
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "pacekeeper"}
    return {**head, "type": "object", "properties": tables, "additionalProperties": False}


def test_the_schema_is_what_the_code_says(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        SCHEMA.write_text(json.dumps(schema(), indent=1) + "\n")
    assert json.loads(SCHEMA.read_text()) == schema(), "rewrite it by `pytest --update-golden`"


def test_an_editor_accepts_the_example_and_marks_what_a_command_rejects() -> None:
    Draft202012Validator.check_schema(schema())
    validator = Draft202012Validator(schema())
    assert list(validator.iter_errors(tomllib.loads(EXAMPLE.read_text()))) == []
    wrong = "[agent]\nspool_batches = 0\nrign_dir = ''\n[policy]\nmode = 'maybe'\n[agnet]\n"
    found = validator.iter_errors(tomllib.loads(wrong))
    assert sorted(error.json_path for error in found) == [
        "$",
        "$.agent",
        "$.agent.spool_batches",
        "$.policy.mode",
    ]
