# Every target does all of its own set-up on a fresh machine: it finds a Python, makes the environment and installs.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo lint test test-newest test-gpu-compile ascend test-ascend accept clean

VENV ?= .venv
JAX_PIN ?= jax==0.11.2
WORKERS ?= 2
PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist loadfile

help:
	@echo "make setup              $(VENV) with the package (editable) and the dev extra, $(JAX_PIN)"
	@echo "make demo               set up, then a story and an extraction by nano, both checked, with seconds"
	@echo "                        PROMPT=\"a text to continue\" (SCHEMA=file.json for the answer's), or SEED=n for others"
	@echo "make lint               format, lint, types, import direction, file lengths"
	@echo "make test               lint, then the fast tests"
	@echo "make test-newest        the invariance and sharding tests on the newest supported jax"
	@echo "make test-gpu-compile   GPU kernels compiled without a device"
	@echo "make ascend             the Ascend bridge, built into native_ascend/lib (g++, cmake)"
	@echo "make test-ascend        the Ascend bridge against its simulator"
	@echo "make accept ISSUE=n     the full acceptance set of one issue, into benchmarks/results"

setup:
	@tools/setup_venv.sh $(VENV) dev $(JAX_PIN)

# PROMPT, SCHEMA and SEED of the command line reach the script through the environment, so any quoting works.
demo:
	@VENV=$(VENV) JAX_PIN=$(JAX_PIN) tools/demo.sh

lint: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) tools/check_tree.py
	$(PY) -m pyright --pythonpath $(PY)

test: lint
	$(PYTEST) tests

test-newest:
	@tools/test_newest.sh

test-gpu-compile:
	@tools/test_gpu_compile.sh

ascend: setup
	@tools/build_ascend.sh $(VENV)

test-ascend: setup
	@tools/test_ascend.sh $(VENV)

accept: setup
	@VENV=$(VENV) WORKERS=$(WORKERS) tools/accept.sh "$(ISSUE)"

clean:
	rm -rf $(VENV) .venv-newest .cache .pytest_cache .ruff_cache .hypothesis build dist site
