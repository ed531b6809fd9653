"""The dashboard in `deploy/grafana/`: its generator, and its expressions as Grafana would ask."""

import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

from support.tree import ROOT

FOLDER = ROOT / "deploy" / "grafana"
# What Grafana puts in for its variables.
FILLED = {"$job": ".*", "$__rate_interval": "1m"}


def generator() -> ModuleType:
    """The script, as a module."""
    name = "dashboard_generator"
    spec = importlib.util.spec_from_file_location(name, FOLDER / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def dashboard() -> dict[str, Any]:
    """The file."""
    document: dict[str, Any] = json.loads((FOLDER / "pacekeeper.json").read_text())
    return document


def expressions() -> dict[str, str]:
    """What each panel asks, by its title."""
    found = {}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for variable, value in FILLED.items():
                expression = expression.replace(variable, value)
            found[panel["title"]] = expression
    return found
