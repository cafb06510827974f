# make train [DATA=movielens-100k|synthetic|path/to/train.txt] [ARGS="--epochs 2 ..."]
# make test | test-more | test-all | test-ray | test-versions | planted | lint | bench | docs | clean
# make gpu-smoke | gpu | gpu-bench | gpu-sanitize | gpu-cache [PYTHON=python3] [OUT=build/gpu] [ARGS="-k update"]
#
# Everything is installed into $(VENV); a second call installs nothing unless pyproject.toml or constraints.txt changed.
# PIP_ARGS goes to every `pip install`, e.g. PIP_ARGS="--find-links wheels --no-index" or an --extra-index-url for the
# CPU build of torch. Another torch: TORCH=torch==2.12.0 CONSTRAINTS=/dev/null.
#
# The gpu targets are for a machine with an NVIDIA GPU: they use $(PYTHON) and its own torch >= 2.11, triton >= 3.6, numpy,
# numba, pytest and hypothesis as they are, install nothing, need no network, and take less than ten minutes each. What
# they find is in $(OUT). `gpu-smoke` comes first: each launcher once. `gpu` runs the suite, a process per file, with few
# examples (GPU_EXAMPLES=fast: more); ARGS=--left goes on with what has not passed. `gpu-bench` compares with FBGEMM if
# fbgemm_gpu can be imported from there or from $(GPU_PEERS), for 540 seconds at most; ARGS=--list shows the cases,
# ARGS="-k forward,codec" runs some of them. `gpu-sanitize` runs the core cases under compute-sanitizer
# (SANITIZER=path/to/it). `gpu-cache` compiles the core cases without a GPU into $(GPU_CACHE), where the others look;
# carry it along.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell sed -n '/^torch==/p' constraints.txt)
CONSTRAINTS ?= constraints.txt
PEERS ?= fbgemm-gpu-cpu==1.8.0
# What TorchRec needs here, as it requires FBGEMM's build for CUDA.
TORCHREC ?= torchrec==1.8.0 tensordict==0.15.3 pyvers==0.2.3 cloudpickle==3.1.3 pyre-extensions==0.0.32 \
  typing-inspect==0.9.0 mypy-extensions==1.2.0 tqdm==4.70.1
PIP_ARGS ?=
DATA ?= movielens-100k
ARGS ?=
JOBS ?= 2
SANITIZER ?=
OUT ?= build/$@
GPU_JOBS ?= 8
GPU_EXAMPLES ?= fewest
GPU_CACHE ?= build/gpu-cache
GPU_PEERS ?= .peers

# Where other processes use the cores too, OpenMP threads that spin while they wait make steps many times slower. Byte
# code is kept, also where the environment says otherwise: each process that a test starts would compile it anew.
QUIET := PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive}
INTERPRETED := TRITON_INTERPRET=1 HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-few}
QUICK := HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-quick}
FEWEST := TRITON_INTERPRET=1 HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-fewest}
# Compiled or not, a module calls the same reference.
BY_REFERENCE := --kernels reference tests/ops tests/nn --ignore tests/nn/test_compile.py tests/compiler \
  --ignore tests/compiler/test_backend.py --ignore tests/compiler/test_models.py

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The path is relative: Triton keeps it in the cache, and finds what was carried to the same place of another clone.
ON_GPU := OMP_WAIT_POLICY=passive TRITON_CACHE_DIR=$(GPU_CACHE) $(PYTHON)

.PHONY: train test test-selection test-more test-all test-ray test-versions planted lint bench docs clean gpu gpu-smoke gpu-sanitize gpu-cache gpu-bench
.DELETE_ON_ERROR:

train: $(VENV)/.train
	$(BIN)/python -m tritonemb train --data "$(DATA)" $(ARGS)

# Every feature once; tests/README.md says which tests that are. Triton reads TRITON_INTERPRET once, so the tests of its
# kernels are a run of their own, on few examples.
test: lint test-selection

test-selection:
	$(QUIET) $(QUICK) $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --quick $(ARGS)
	$(QUIET) $(FEWEST) $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --quick -m "triton and not slow" $(ARGS)

# What `make test` leaves out, but for the longest sweeps. Everything by the CPU kernels; the public tests by the
# references; then those of the kernels, and the public ones, by Triton kernels that are interpreted.
test-more: $(VENV)/.dev
	$(QUIET) $(BIN)/python -m pytest -n $(JOBS) --rest $(ARGS)
	$(QUIET) $(QUICK) $(BIN)/python -m pytest -n $(JOBS) --quick -m "public and not slow" $(BY_REFERENCE) $(ARGS)
	$(QUIET) $(INTERPRETED) $(BIN)/python -m pytest -n $(JOBS) --rest -m "triton and not slow" $(ARGS)
	$(QUIET) $(INTERPRETED) $(BIN)/python -m pytest -n $(JOBS) --quick -m "public and not (triton or slow)" $(ARGS)

test-all: lint
	$(QUIET) $(BIN)/python -m pytest -n $(JOBS) -m "" $(ARGS)
	$(QUIET) $(BIN)/python -m pytest -n $(JOBS) -m public $(BY_REFERENCE) $(ARGS)
	$(QUIET) $(INTERPRETED) $(BIN)/python -m pytest -n $(JOBS) -m "triton or public" $(ARGS)

# Embedding servers on Ray, which is installed for this alone; they skip in the others until then.
test-ray: $(VENV)/.ray
	$(QUIET) $(BIN)/python -m pytest tests/server/test_ray.py $(ARGS)

# A core selection on other versions of Python, torch and triton.
test-versions:
	PIP_ARGS="$(PIP_ARGS)" $(PYTHON) tools/versions.py $(ARGS)

# Plants the mistakes of tests/planted one at a time into a copy of the tree, and says which of them `make test` finds.
planted: $(VENV)/.dev
	$(QUIET) $(BIN)/python tools/planted.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	for patch in tests/planted/*.patch; do git apply --check "$$patch" || exit 1; done

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/run.py $(ARGS)

# The variable silences an advertisement of mkdocs-material's.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

gpu-smoke:
	$(ON_GPU) -m tests.gpu.smoke --out $(OUT) --jobs $(GPU_JOBS) $(ARGS)

gpu:
	$(ON_GPU) -m tests.gpu.suite --out $(OUT) --jobs $(GPU_JOBS) --examples $(GPU_EXAMPLES) $(ARGS)

gpu-sanitize:
	$(ON_GPU) -m tests.gpu.sanitize --out $(OUT) --jobs $(GPU_JOBS) $(if $(SANITIZER),--sanitizer $(SANITIZER)) $(ARGS)

gpu-cache:
	$(PYTHON) -m tests.gpu.cache --out $(GPU_CACHE) --jobs $(JOBS) $(ARGS)

gpu-bench:
	PYTHONPATH="$(GPU_PEERS)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) benchmarks/gpu/run.py $(ARGS)

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
	$(PIP) install $(PIP_ARGS) -c $(CONSTRAINTS) -e ".[train,tensorboard,dev,docs,frameworks]"
	@touch $@

$(VENV)/.ray: $(VENV)/.dev
	$(PIP) install $(PIP_ARGS) -c $(CONSTRAINTS) -e ".[ray]"
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
