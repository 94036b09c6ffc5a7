# `make demo` and `make test` do their own set-up. TORCH may name any build, for example a CPU-only one:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
OLDEST := .venv-oldest
RELEASE := .venv-release
# The Pythons in which `make release-check` tries the wheel.
PYTHONS ?= $(PYTHON)
BIN := $(VENV)/bin

# One thread a process: the tests run in parallel processes, which take neighbouring tests, so that they seldom make the
# same fixtures.
export OMP_NUM_THREADS ?= 1
PARALLEL := -n auto --dist worksteal
# Bytecode of the libraries is written once, also where the environment forbids it: each process would compile it again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test tests audit lint types test-oldest wheel hub-kernel release-check clean

setup: $(VENV)/ready

# Python compiles the modules that are imported; pip would compile thousands that never are.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile $(TORCH)
	$(BIN)/pip install --quiet --no-compile --editable ".[dev]"
	touch $@

demo: export OMP_NUM_THREADS = $(shell nproc)
# OpenMP threads wait a moment, not long: fast on an idle machine, bearable on a busy one.
demo: export GOMP_SPINCOUNT = 1000
demo: setup
	$(BIN)/python examples/generate_video.py --compare --output demo_output

test: lint
	$(MAKE) --no-print-directory --jobs=2 types tests

tests: setup
	$(BIN)/python -m pytest $(PARALLEL) -m "not audit and not gpu" --ignore tests/interpreter --ignore tests/gpu
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/interpreter $(PARALLEL) -m "not audit"

# What the kernels compile to on every architecture, and more cases of the promises that `make test` checks.
audit: setup
	$(BIN)/python -m pytest $(PARALLEL) -m "audit and not gpu" --ignore tests/interpreter --ignore tests/gpu
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/interpreter $(PARALLEL) -m audit

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror kernels/sage_kernels/cuda/src/*.cu kernels/sage_kernels/cuda/include/*.cuh

types: setup
	$(BIN)/mypy

# The oldest versions that pyproject.toml admits, as tests/oldest.txt pins them. Audits hold newer compilers' machine code.
test-oldest: $(OLDEST)/ready
	$(OLDEST)/bin/python -m pytest $(PARALLEL) -m "not audit and not gpu" --ignore tests/interpreter --ignore tests/gpu
	TRITON_INTERPRET=1 $(OLDEST)/bin/python -m pytest tests/interpreter $(PARALLEL) -m "not audit"

$(OLDEST)/ready: pyproject.toml tests/oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --no-compile --editable ".[test]" --constraint tests/oldest.txt
	touch $@

wheel: setup
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

# A folder to upload to the Hub as a kernel repository.
hub-kernel: setup
	rm -rf dist/hub-kernel
	$(BIN)/python -m sage_hf.build_hub_kernel dist/hub-kernel

# What a release would publish: built, checked, and tried in fresh environments outside of the checkout.
release-check: $(RELEASE)/ready
	rm -rf dist build
	$(RELEASE)/bin/python -m build --outdir dist . > /dev/null
	$(RELEASE)/bin/twine check --strict dist/*
	$(RELEASE)/bin/python .ci/release_check.py dist "$(TORCH)" $(PYTHONS)

$(RELEASE)/ready:
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --quiet --no-compile build twine
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(RELEASE) build dist demo_output *.egg-info
