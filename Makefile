# CONTRIBUTING.md says what each target is for.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell sed -n '/^torch==/p' constraints.txt)
CONSTRAINTS ?= constraints.txt
PIP_ARGS ?=
DATA ?= movielens-100k
ARGS ?=
# Tests wait a quarter of their time, for processes and disks: three workers keep two cores busy.
JOBS ?= 3
SANITIZER ?=
GPU_JOBS ?= 8
GPU_SECONDS ?= 560
GPU_EXAMPLES ?= fewest
GPU_CACHE ?= build/gpu-cache
GPU_PEERS ?= build/peers
# A folder per target, whatever OUT the machine has for what is to be kept: the archive goes there.
GPU_OUT ?= build/$@
GPU_ARCHIVE ?= $(if $(OUT),$(OUT),build)/first.tgz

PEERS ?= fbgemm-gpu-cpu==1.8.0
# What TorchRec needs here, as it requires FBGEMM's build for CUDA.
TORCHREC ?= torchrec==1.8.0 tensordict==0.15.3 pyvers==0.2.3 cloudpickle==3.1.3 pyre-extensions==0.0.32 \
  typing-inspect==0.9.0 mypy-extensions==1.2.0 tqdm==4.70.1

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUN_TESTS := JOBS=$(JOBS) $(BIN)/python tools/run_tests.py
# The path is relative: Triton keeps it in the cache, and finds what was carried to the same place of another clone.
ON_GPU := OMP_WAIT_POLICY=passive TRITON_CACHE_DIR=$(GPU_CACHE) $(PYTHON)

.PHONY: train test test-more test-all lint quick bench docs planted clean gpu gpu-archives gpu-bench gpu-first \
  gpu-sanitize gpu-smoke
.DELETE_ON_ERROR:

train: $(VENV)/.train
	$(BIN)/python -m tritonemb train --data "$(DATA)" $(ARGS)

# mypy takes half a minute of one core, beside which tests can run.
test: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j2 lint quick

quick: $(VENV)/.dev
	$(RUN_TESTS) test $(ARGS)

test-more: $(VENV)/.dev
	$(RUN_TESTS) more $(ARGS)

test-all: lint
	$(RUN_TESTS) all $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/planted.py --check
	$(BIN)/python tools/house.py --check

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/run.py $(ARGS)

# The variable silences an advertisement of mkdocs-material's.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

planted: $(VENV)/.dev
	$(BIN)/python tools/planted.py --jobs $(JOBS) $(ARGS)

gpu-archives:
	$(PYTHON) -m tests.gpu.archives --cache $(GPU_CACHE) --jobs $(JOBS) $(ARGS)

gpu-first:
	$(ON_GPU) -m tests.gpu.first --archive "$(GPU_ARCHIVE)" --seconds $(GPU_SECONDS) --jobs $(GPU_JOBS) $(ARGS)

gpu-smoke:
	$(ON_GPU) -m tests.gpu.suite --out $(GPU_OUT) --files tests/gpu/test_smoke.py $(ARGS)

gpu:
	$(ON_GPU) -m tests.gpu.suite --out $(GPU_OUT) --jobs $(GPU_JOBS) --examples $(GPU_EXAMPLES) $(ARGS)

gpu-sanitize:
	$(ON_GPU) -m tests.gpu.sanitize --out $(GPU_OUT) $(if $(SANITIZER),--sanitizer $(SANITIZER)) $(ARGS)

gpu-bench:
	PYTHONPATH="$(GPU_PEERS)$${PYTHONPATH:+:$$PYTHONPATH}" $(ON_GPU) benchmarks/run.py --device cuda $(ARGS)

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
	$(PIP) install $(PIP_ARGS) -c $(CONSTRAINTS) -e ".[train,tensorboard,dev,docs,frameworks,serve,faiss,onnx,kafka,wandb,mlflow,optuna]"
	@touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(PIP) install $(PIP_ARGS) -c $(CONSTRAINTS) -e ".[docs]"
	@touch $@

# The peers pin nothing that we use and are not dependencies of the package, so they come last and alone.
$(VENV)/.bench: $(VENV)/.torch pyproject.toml
	$(PIP) install $(PIP_ARGS) -c $(CONSTRAINTS) -e ".[train,bench]"
	$(PIP) install $(PIP_ARGS) -c $(CONSTRAINTS) $(PEERS)
	$(PIP) install $(PIP_ARGS) --no-deps $(TORCHREC)
	@touch $@
