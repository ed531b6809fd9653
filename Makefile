# The two commands of the README are `make demo` and `make test`; each sets itself up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Tests start hundreds of processes: what they import is compiled once, in any environment.
export PYTHONDONTWRITEBYTECODE :=

NEXT := .venv-torch-next

.PHONY: demo test test-fast test-torch-next stress bench gpu venv lint protos clean

# The stamp is newer than what it was made from, or the environment is made again.
$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'pacekeeper needs Python 3.11 or newer; set PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[all,dev]"
	touch $@

# What only some tests need, where it can be had.
$(VENV)/.peers: $(VENV)/.stamp
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev-emulators]" \
	    || echo "no emulator of an object store can be had here: its tests will skip themselves"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev-adapters]" \
	    || echo "other trainers can not be had here: tests of their adapters will skip themselves"
	touch $@

venv: $(VENV)/.stamp

demo: venv
	$(BIN)/pacekeeper demo

# -I: the folders at the top are importable as pacekeeper.<folder> only, as they are for users.
# Most tests of processes wait more than they compute, and go first; by itself runs what asks the
# clock how much others compute, or draws figures from the host's own pace.
WHOLE := --hypothesis-profile whole --durations 20
TOGETHER := --dist loadfile --no-loadscope-reorder -m "not alone and not stress"
test: venv $(VENV)/.peers
	@OMP_NUM_THREADS=1 $(BIN)/python -Im pytest $(WHOLE) $(TOGETHER) --numprocesses 4 \
	    tests/integration tests/unit tests/property tests/golden tests/sim; together=$$?; \
	$(BIN)/python -Im pytest $(WHOLE) -m "alone or gpu" tests/integration tests/gpu && exit $$together

# Unit tests and snapshots of all that needs no torch: for work on the code.
test-fast: venv
	@OMP_NUM_THREADS=1 $(BIN)/python -Im pytest --hypothesis-profile fast --durations 5 $(TOGETHER) \
	    --numprocesses 2 tests/unit tests/golden \
	    --ignore tests/unit/trainer --ignore tests/unit/benchmarks --ignore tests/unit/fuzz

# Groups of ranks with the newest torch that can be had: from 2.15 on it reconfigures them.
test-torch-next:
	@if $(PYTHON) -m venv $(NEXT) && $(NEXT)/bin/python -m pip install --quiet --upgrade \
	    --upgrade-strategy only-if-needed "torch>=2.15" --editable ".[all,dev]"; then \
	    OMP_NUM_THREADS=1 $(NEXT)/bin/python -Im pytest --numprocesses 2 \
	        tests/unit/trainer/groups tests/integration/trainer/test_groups.py; \
	else echo "no torch 2.15 or later can be had here: its groups are not tested"; fi

# Fuzzers and fault schedules; CI runs a slice of two minutes that the day chooses.
MINUTES ?= 60
SEED ?= 0
stress: venv
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m stress.run --minutes $(MINUTES) --seed $(SEED)

bench: venv
	$(BIN)/python -m benchmarks.hook_cost

# Figures of the GPUs of this machine, and the tests that need one: 8 minutes at most, no network.
# GPU_PYTHON has torch for CUDA and what docs/gpu.md names, and needs no pacekeeper; nothing is
# installed into it. GPU_OUT gets gpu.md and gpu.json. Without a GPU it says so and ends well.
GPU_PYTHON ?= $(PYTHON)
GPU_OUT ?= docs
GPU_RUN = PYTHONPATH="$(CURDIR)/src:$(CURDIR)/tests:$$PYTHONPATH" timeout -k 5
gpu:
	@$(GPU_RUN) 400 $(GPU_PYTHON) -m benchmarks.gpu --out $(GPU_OUT); figures=$$?; \
	if $(GPU_PYTHON) -c "import pytest, torch" 2> /dev/null; then \
	    $(GPU_RUN) 70 $(GPU_PYTHON) -m pytest -q -p no:cacheprovider --noconftest \
	        -o addopts=--import-mode=importlib tests/gpu && exit $$figures; \
	else echo "tests/gpu: not run, $(GPU_PYTHON) has no pytest or no torch"; exit $$figures; fi

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python protos/generate.py --check

protos: venv
	$(BIN)/python protos/generate.py

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
