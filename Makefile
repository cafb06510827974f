# make train [DATA=movielens-100k|synthetic|path/to/train.txt] [ARGS="--epochs 2 ..."]
# make test | test-all | lint | bench | clean
#
# Everything is installed into $(VENV); a second call installs nothing unless pyproject.toml or constraints.txt changed.
# PIP_ARGS goes to every `pip install`, e.g. PIP_ARGS="--find-links wheels --no-index" or an --extra-index-url for the
# CPU build of torch. Another torch: TORCH=torch==2.12.0 CONSTRAINTS=/dev/null.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell sed -n '/^torch==/p' constraints.txt)
CONSTRAINTS ?= constraints.txt
PEERS ?= fbgemm-gpu-cpu==1.8.0
PIP_ARGS ?=
DATA ?= movielens-100k
ARGS ?=
JOBS ?= 2

# Where other processes use the cores too, OpenMP threads that spin while they wait make steps many times slower.
QUIET := OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive}

ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: train test test-all lint bench clean
.DELETE_ON_ERROR:

train: $(VENV)/.train
	$(QUIET) $(BIN)/python -m tritonemb train --data "$(DATA)" $(ARGS)

test: lint
	$(QUIET) $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

test-all: lint
	$(QUIET) $(BIN)/python -m pytest -n $(JOBS) -m "" $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/run.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks

$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tritonemb needs Python 3.11 or newer; '$(PYTHON)' is not (or not there). Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(PIP_ARGS) "$(TORCH)"
	@touch $@

$(VENV)/.train: $(VENV)/.torch pyproject.toml
	$(PIP) install $(PIP_ARGS) -c $(CONSTRAINTS) -e ".[train]"
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) install $(PIP_ARGS) -c $(CONSTRAINTS) -e ".[train,dev]"
	@touch $@

# The peers pin nothing that we use and are not dependencies of the package, so they come last and alone.
$(VENV)/.bench: $(VENV)/.torch pyproject.toml
	$(PIP) install $(PIP_ARGS) -c $(CONSTRAINTS) -e ".[train,bench]"
	$(PIP) install $(PIP_ARGS) -c $(CONSTRAINTS) $(PEERS)
	@touch $@
