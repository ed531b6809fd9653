"""Tests of the engine: collected where transformers is installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]
