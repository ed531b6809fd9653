"""Tests of models: collected where transformers is installed, each expert in its own slot."""

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]


@pytest.fixture(scope="package", autouse=True)
def _experts_function() -> None:
    from pacekeeper.trainer.model import library
    from support.tiny_models import local_experts

    library.register_experts_function(local_experts)
