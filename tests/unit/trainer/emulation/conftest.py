"""Tests of the emulated device: those of models are collected where transformers is installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("transformers") else ["test_model_*.py", "test_engine_*.py"]
